"""The queue of an engine: one arrival, one end and one entry while 16, 192 and 704 wait.

An engine lets 256 generations in (64 run, 192 wait), 768 at most when many clients and users share
it. Beside it: the same where one generation waits. Processor time, the least of some turns;
`at_reference` is that over how much slower than the reference machine this one is at best.

    .venv/bin/python -m benchmarks.engine_queue
"""

from __future__ import annotations

import random
import time

from benchmarks.report import at_reference, emit, interleaved, machine_factor
from kakeya.backends.engine.engine import EngineOptions
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.model import LoadedFacts
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.queue import EngineQueue
from kakeya.engine.queue.room import KvRoom
from kakeya.engine.queue.rows import QueueRow, QueueTicket
from kakeya.generation.request import DecodeJob

GOAL_US = 1000.0
"""Less than one step of the smallest model that is served."""
DEPTHS = (16, 192, 704)
CLIENTS = 16
ROUNDS, REPEATS = 400, 7
PLACES = EngineOptions().max_running
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


class Engine:
    """The queue as an engine uses it: jobs with deadlines arrive, enter and end."""

    def __init__(self, depth: int) -> None:
        self._rng = random.Random(depth)
        slots = KvSlots(1 << 20)
        self._room = KvRoom(slots, FACTS)
        self._queue = EngineQueue(self._room, slots, FACTS, Pace(FACTS), places=PLACES)
        self._running: list[QueueRow] = []
        self._now_s = 0.0
        for _ in range(depth + PLACES):
            self._arrive()
        self._enter()

    def us_per_entry(self) -> float:
        """One arrives, one that ran ends, and the next one enters."""
        began = time.thread_time()
        for _ in range(ROUNDS):
            self._arrive()
            ended = self._running.pop(0)
            ended.account.pay(100)
            self._queue.ended(ended)
            self._room.leave(ended)
            self._enter()
        return (time.thread_time() - began) / ROUNDS * 1e6

    def _enter(self) -> None:
        assert not self._queue.departures(self._running, self._now_s)
        while (entry := self._queue.next_entry(self._running, self._now_s)) is not None:
            for row in entry.parks:
                self._running.remove(row)
                self._room.park(row, 0)
                self._queue.park(row)
            self._queue.enter(entry.row)
            self._room.enter(entry.row, entry.row.ticket.job)
            self._running.append(entry.row)

    def _arrive(self) -> None:
        self._now_s += 0.01
        job = DecodeJob(
            token_ids=range(self._rng.randrange(1, 9_000)),
            max_tokens=500,
            client=f"client {self._rng.randrange(CLIENTS)}",
            priority=self._rng.randrange(3),
            deadline_s=1e9,
        )
        ticket = QueueTicket(job, lambda frame: None, lambda error: None)
        self._queue.arrive(ticket, self._running, self._now_s)


def main() -> None:
    """Print a line for each depth."""
    engines = {f"{depth}": Engine(depth).us_per_entry for depth in (1, *DEPTHS)}
    taken = interleaved({**engines, "machine_x": machine_factor}, repeats=REPEATS)
    # Other processes on the machine only add to a time.
    least = {name: min(values) for name, values in taken.items()}
    for depth in DEPTHS:
        ours = least[f"{depth}"]
        emit(
            f"one generation arrives, ends and enters while {depth} wait, us",
            ours=ours,
            baseline=least["1"],
            ratio=ours / least["1"],
            goal=f"< {GOAL_US:g} us",
            met=ours < GOAL_US,
            **at_reference(ours, least["machine_x"]),
        )


if __name__ == "__main__":
    main()
