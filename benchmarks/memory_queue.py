"""The queue of requests for memory: one request more arrives and leaves while others wait.

A request behind others of its model and priority changes no decision; one that stands first does.
At the end of a load all requests for the model have their leases. Beside it: push and pop of a heap
of as many. Processor time, with the arbiter's next wake, for which its keeper asks after each
event; the least of some turns. An HTTP gateway lets 256 generations in, 512 at most.

    .venv/bin/python -m benchmarks.memory_queue
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable

from benchmarks.report import emit, interleaved
from kakeya.core.units import MIB
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.plan import Ask
from kakeya.memory.arbiter.resident import (
    TEXT_TARGET,
    LeaseId,
    RequestPriority,
    ResidentKey,
    Warmth,
)

GOAL_US = 20.0
DEPTHS, MODELS = (256, 10_000), 3
REPEATS, ROUNDS = 5, 400
EVERY_S = 0.0002
"""Between two arrivals: no request waits for the model in use up to its limit of 10 s."""


class Waiting:
    """So many requests for three models, while a model in use holds all room."""

    def __init__(self, depth: int) -> None:
        self._rng, self._now = random.Random(depth), 0.0
        self._arbiter = Arbiter(120 * MIB)
        self._load(self._ask("held"))
        self._leases = deque(self._enter() for _ in range(depth))

    def behind(self) -> float:
        """Microseconds of a request that arrives and leaves."""
        return self._timed(self._enter)

    def first(self) -> float:
        """Microseconds of a request that arrives, and the oldest one that leaves."""

        def oldest() -> LeaseId:
            self._leases.append(self._enter())
            return self._leases.popleft()

        return self._timed(oldest)

    def _timed(self, leaving: Callable[[], LeaseId]) -> float:
        began = time.thread_time()
        for _ in range(ROUNDS):
            lease = leaving()
            self._arbiter.withdraw(lease, self._now)
            self._arbiter.next_wake_mono(self._now)
        return (time.thread_time() - began) / ROUNDS * 1e6

    def _ask(self, model: str) -> Ask:
        return Ask(
            key=ResidentKey("text", model),
            role=TEXT_TARGET,
            estimate_bytes=100 * MIB,
            priority=self._rng.choice([*RequestPriority]),
            warmth=Warmth(stay_warm_s=300.0),
            deadline_mono=self._now + self._rng.uniform(100.0, 200.0),
        )

    def _enter(self) -> LeaseId:
        self._now += EVERY_S
        lease, _ = self._arbiter.ask(self._ask(f"m{self._rng.randrange(MODELS)}"), self._now)
        self._arbiter.next_wake_mono(self._now)
        return lease

    def _load(self, ask: Ask) -> None:
        _, outcome = self._arbiter.ask(ask, self._now)
        self._arbiter.begin_load(outcome.plans[0], self._now)
        self._arbiter.loaded(ask.key, None, self._now)


def served_us(depth: int) -> float:
    """Microseconds of each of so many requests for one model, from its arrival to the lease that
    the end of the load gives."""
    arbiter, now = Arbiter(120 * MIB), 0.0
    wish = Ask(key=ResidentKey("text", "m"), role=TEXT_TARGET, estimate_bytes=100 * MIB)
    _, outcome = arbiter.ask(wish, now)
    arbiter.begin_load(outcome.plans[0], now)
    began = time.thread_time()
    for _ in range(depth):
        arbiter.ask(wish, now)
        arbiter.next_wake_mono(now)
    granted = len(arbiter.loaded(wish.key, None, now).grants)
    return (time.thread_time() - began) / granted * 1e6


def heap_of(depth: int) -> Callable[[], float]:
    """Measures microseconds of a push and a pop."""
    rng = random.Random(depth)
    heap = [(rng.random(), number) for number in range(depth)]
    heapq.heapify(heap)

    def measure() -> float:
        began = time.thread_time()
        for number in range(1_000):
            heapq.heappush(heap, (rng.random(), number))
            heapq.heappop(heap)
        return (time.thread_time() - began) / 1_000 * 1e6

    return measure


def main() -> None:
    """Print three lines for each depth."""
    for depth in DEPTHS:
        waiting = Waiting(depth)
        said = {
            "behind": f"one request for memory arrives and leaves while {depth} wait",
            "first": f"one request for memory arrives and the oldest of {depth} leaves",
            "served": f"each of {depth} requests arrives in a load and has its lease at the end",
        }
        taken = interleaved(
            {
                "behind": waiting.behind,
                "first": waiting.first,
                "served": lambda depth=depth: served_us(depth),
                "heap": heap_of(depth),
            },
            repeats=REPEATS,
        )
        heap = min(taken["heap"])
        for name, what in said.items():
            ours = min(taken[name])
            emit(
                f"{what}, us, against a heap",
                ours=ours,
                baseline=heap,
                ratio=ours / heap,
                goal=f"< {GOAL_US:g} us",
                met=ours < GOAL_US,
            )


if __name__ == "__main__":
    main()
