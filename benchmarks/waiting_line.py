"""The line in front of an engine: what one arrival and one entry take while many wait.

Each round one generation arrives, one that ran ends, and one enters, chosen by class, share and
work, each FLOOR_TURNS-th by age. `orders` is the structure alone: a push and a pop. `line` is all
that an engine does with it: rooms, deadlines, refusals and the look at who runs too. Beside it: a
push and a pop of a heap, which knows neither shares nor ages. Processor time, the least of some
turns; `at_reference` is that over how much slower than the reference machine this one is at best.

    .venv/bin/python -m benchmarks.waiting_line
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable

from benchmarks.report import at_reference, emit, interleaved, machine_factor
from kakeya.backends.engine.life import EngineOptions
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.model import LoadedFacts
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import CLASSES, GenerationClaim, is_turn_of_age
from kakeya.engine.queue.queue import Line
from kakeya.engine.queue.room import KvRoom
from kakeya.engine.queue.rows import QueueRow, QueueTicket
from kakeya.engine.queue.waiting import Waiting
from kakeya.generation.request import DecodeJob

GOAL_US = 20.0
ROUNDS, REPEATS = 400, 7
PLACES = EngineOptions().max_running
DEFAULT_DEPTH = PLACES + EngineOptions().max_waiting
FACTS = LoadedFacts(
    model_id="m",
    model_path="",
    vocab_size=32_000,
    context_tokens=32_768,
    eos_token_ids=(),
    quantization="",
    dtype="",
    weight_bytes=0,
    kv_bytes_per_token=1,
    mlx_version="",
    tokens_per_second=30.0,
    prefill_tokens_per_second=400.0,
    load_s=0.0,
    prefill_chunk_tokens=256,
    vocabulary_digest="",
    device="",
    blas_accelerated=False,
    forward_costs_s={},
)
_ROOMS = [(36, 36)] * CLASSES
"""Most of those that wait fit, not all."""


class Orders:
    """A push and a pop of those that wait, `depth` of them, of so many clients."""

    def __init__(self, depth: int, clients: int) -> None:
        rng = random.Random(depth)
        self._asked = [
            (f"client {rng.randrange(clients)}", rng.randrange(3), rng.random(), rng.randrange(40))
            for _ in range(20_000)
        ]
        self._waiting: Waiting[GenerationClaim] = Waiting()
        self._running: deque[GenerationClaim] = deque()
        self._count = 0
        for _ in range(depth):
            self._push()

    def round(self) -> None:
        """One arrives, one enters, and one that ran ends."""
        self._push()
        shares = self._waiting.shares
        if len(self._running) == PLACES:
            ended = self._running.popleft()
            ended.account.used += 100
            shares.leave(ended.account, was_running=True)
        claim = shares.first()
        if is_turn_of_age(self._count):
            claim = self._waiting.oldest_within(_ROOMS, ())
        assert claim is not None
        self._waiting.remove(claim)
        shares.begin(claim.account)
        self._running.append(claim)

    def _push(self) -> None:
        self._count += 1
        client, priority, work_s, need_bytes = self._asked[self._count % len(self._asked)]
        claim = GenerationClaim(
            account=self._waiting.shares.arrive(client, priority),
            number=self._count,
            arrived_s=0.01 * self._count,
            work_s=work_s,
            expires_s=1e9,
            need_bytes=need_bytes,
        )
        self._waiting.add(claim)


class Engine:
    """The line as an engine has it: jobs with deadlines arrive, enter and end."""

    def __init__(self, depth: int, clients: int) -> None:
        self._rng = random.Random(depth)
        slots = KvSlots(1 << 20)
        self._room = KvRoom(slots, FACTS)
        self._line = Line(self._room, slots, FACTS, Pace(FACTS), places=PLACES)
        self._running: list[QueueRow] = []
        self._now_s = 0.0
        prompts = [range(at) for at in range(1, 9_000)]
        self._jobs = [
            DecodeJob(
                token_ids=self._rng.choice(prompts),
                max_tokens=500,
                client=f"client {self._rng.randrange(clients)}",
                priority=self._rng.randrange(3),
                deadline_s=1e9,
            )
            for _ in range(20_000)
        ]
        for _ in range(depth):
            self._arrive()

    def round(self) -> None:
        """One arrives, one that ran ends, and who can enter does."""
        self._arrive()
        if self._running:
            ended = self._running.pop(0)
            ended.account.used += 100
            self._line.ended(ended)
            self._room.leave(ended)
        while (entry := self._line.next_entry(self._running, self._now_s)) is not None:
            for row in entry.parks:
                self._running.remove(row)
                self._room.park(row, 1)
                self._line.park(row)
            for row in entry.drops:
                self._line.leave(row)
                self._room.leave(row)
            self._line.enter(entry.row)
            self._room.enter(entry.row, entry.row.ticket.job)
            self._running.append(entry.row)

    def _arrive(self) -> None:
        self._now_s += 0.01
        job = self._jobs[self._rng.randrange(len(self._jobs))]
        ticket = QueueTicket(job, lambda frame: None, lambda error: None)
        self._line.arrive(ticket, self._running, self._now_s)


def heap_of(depth: int) -> Callable[[], None]:
    rng = random.Random(depth)
    heap = [(rng.random(), number) for number in range(depth)]
    heapq.heapify(heap)
    return lambda: (heapq.heappushpop(heap, (rng.random(), 0)), None)[1]


def timed_us(work: Callable[[], None]) -> Callable[[], float]:
    def measure() -> float:
        started = time.thread_time()
        for _ in range(ROUNDS):
            work()
        return (time.thread_time() - started) / ROUNDS * 1e6

    return measure


def main() -> None:
    for depth in (DEFAULT_DEPTH, 10_000):
        for clients in (16, depth):
            taken = interleaved(
                {
                    "orders": timed_us(Orders(depth, clients).round),
                    "line": timed_us(Engine(depth, clients).round),
                    "heap": timed_us(heap_of(depth)),
                    "machine_x": machine_factor,
                },
                repeats=REPEATS,
            )
            # What others do on the machine only adds to it.
            ours, heap = min(taken["orders"]), min(taken["heap"])
            emit(
                f"push and pop while {depth} of {clients} clients wait, us",
                ours=ours,
                baseline=heap,
                ratio=ours / heap,
                goal=f"< {GOAL_US:g} us",
                met=ours < GOAL_US,
                whole_line=float(f"{min(taken['line']):.4g}"),
                **at_reference(ours, min(taken["machine_x"])),
            )


if __name__ == "__main__":
    main()
