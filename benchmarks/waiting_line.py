"""The line in front of an engine: what one arrival and one entry take while many wait.

Each round one generation arrives, one is chosen by class, share and work, and enters. Depths: what
a node lets in by default, and far more than it ever does. Beside it: a push and a pop of a heap,
which knows neither shares nor ages.

    .venv/bin/python -m benchmarks.waiting_line
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable

from benchmarks.report import emit, interleaved, median
from kakeya.engine.policy import Claim, FairShares, next_place
from kakeya.serving.backends.engine_life import EngineOptions

GOAL_US = 20.0
CLIENTS = 16
ROUNDS = 200
DEFAULT_DEPTH = EngineOptions().max_running + EngineOptions().max_waiting


class Filled:
    """A line of so many that wait, of several clients and classes."""

    def __init__(self, depth: int) -> None:
        self._rng = random.Random(depth)
        self._shares = FairShares()
        self._waiting: list[Claim] = []
        self._count = 0
        self._clock_s = 0.0
        for _ in range(depth):
            self._arrive()

    def round(self) -> None:
        """One arrives, one enters and ends."""
        self._arrive()
        claim = next_place(self._waiting, self._count, self._clock_s, lambda _: True)
        self._waiting.remove(claim)
        self._shares.begin(claim.account)
        claim.account.used += 100
        self._shares.leave(claim.account, was_running=True)

    def _arrive(self) -> None:
        self._count += 1
        self._clock_s += 0.01
        client = f"client {self._rng.randrange(CLIENTS)}"
        self._waiting.append(
            Claim(
                account=self._shares.arrive(client, self._rng.randrange(3)),
                number=self._count,
                arrived_s=self._clock_s,
                work_s=self._rng.random(),
            )
        )


def heap_of(depth: int) -> Callable[[], None]:
    rng = random.Random(depth)
    heap = [(rng.random(), number) for number in range(depth)]
    heapq.heapify(heap)
    return lambda: (heapq.heappushpop(heap, (rng.random(), 0)), None)[1]


def timed_us(work: Callable[[], None]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        for _ in range(ROUNDS):
            work()
        return (time.perf_counter() - started) / ROUNDS * 1e6

    return measure


def main() -> None:
    for depth in (DEFAULT_DEPTH, 10_000):
        line = Filled(depth)
        taken = interleaved({"line": timed_us(line.round), "heap": timed_us(heap_of(depth))})
        ours, heap = median(taken["line"]), median(taken["heap"])
        emit(
            f"one arrival and one entry while {depth} wait, us",
            ours=ours,
            baseline=heap,
            ratio=ours / heap,
            goal=f"< {GOAL_US:g} us",
            met=ours < GOAL_US,
        )


if __name__ == "__main__":
    main()
