"""The queue of requests for memory: one request more arrives and leaves while others wait.

The arbiter decides about the whole queue at each event. Beside it: push and pop of a heap of as
many. Processor time, the least of some turns. An HTTP gateway lets 256 generations in, 512 at most.

    .venv/bin/python -m benchmarks.memory_queue
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable

from benchmarks.report import emit, interleaved
from kakeya.core.units import MIB
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.plan import Ask
from kakeya.memory.arbiter.queue import LoadTicket
from kakeya.memory.arbiter.resident import (
    TEXT_TARGET,
    LeaseId,
    RequestPriority,
    ResidentKey,
    Warmth,
)

GOAL_US = 20.0
DEPTHS, MODELS = (256, 10_000), 3
REPEATS = 3


def ask(rng: random.Random) -> Ask:
    return Ask(
        key=ResidentKey("text", f"m{rng.randrange(MODELS)}"),
        role=TEXT_TARGET,
        estimate_bytes=100 * MIB,
        priority=rng.choice([*RequestPriority]),
        warmth=Warmth(stay_warm_s=300.0),
    )


def arbiter_of(depth: int) -> Callable[[], float]:
    """Measures microseconds of a request that arrives and leaves behind so many others, while a
    model in use holds all room."""
    rng, arbiter = random.Random(depth), Arbiter(120 * MIB)
    held, now = ResidentKey("text", "held"), 0.0
    _, outcome = arbiter.ask(Ask(key=held, role=TEXT_TARGET, estimate_bytes=100 * MIB), now)
    arbiter.begin_load(outcome.plans[0], now)
    arbiter.loaded(held, None, now)
    tickets = arbiter._tickets  # noqa: SLF001  by asking, each would decide about all before it
    for number in range(depth):
        tickets.enter(LoadTicket(LeaseId(-1 - number), ask(rng), now, now))
    rounds = max(2, 4_000 // depth)

    def measure() -> float:
        began = time.thread_time()
        for _ in range(rounds):
            lease, _ = arbiter.ask(ask(rng), now)
            arbiter.withdraw(lease, now)
        return (time.thread_time() - began) / rounds * 1e6

    return measure


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
    """Print a line for each depth."""
    for depth in DEPTHS:
        taken = interleaved({"ours": arbiter_of(depth), "heap": heap_of(depth)}, repeats=REPEATS)
        ours, heap = min(taken["ours"]), min(taken["heap"])
        emit(
            f"one request for memory arrives and leaves while {depth} wait, us, against a heap",
            ours=ours,
            baseline=heap,
            ratio=ours / heap,
            goal=f"< {GOAL_US:g} us",
            met=ours < GOAL_US,
        )


if __name__ == "__main__":
    main()
