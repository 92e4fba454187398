"""Prefill beside decoding: the prompts that are being computed, and the chunk that comes next.

Between two rounds of decoding sequences, chunks are computed as they fit the time that these can
wait (`policy`). While a sequence is about to send its first token, chunks are held back for a few
rounds. The time of each chunk goes to `pace`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import SPECULATIVE, is_chunk_due
from kakeya.engine.queue.queue import EngineQueue
from kakeya.engine.queue.rows import QueueRow

_HELD_BACK_ROUNDS = 2
"""A sequence sends its first token two rounds after its prompt was done."""


class Prefilling:
    """Belongs to the model thread. `rows` prefill; `chunks` were computed in all; this round has
    spent `round_s` on prompts."""

    __slots__ = (
        "_began_s",
        "_chunks_in_round",
        "_ended_s",
        "_first",
        "_held_back",
        "_pace",
        "_queue",
        "_timer",
        "chunks",
        "round_s",
        "rows",
    )

    def __init__(self, queue: EngineQueue, pace: Pace, timer: Callable[[], float]) -> None:
        self.rows: list[QueueRow] = []
        self.chunks = 0
        self.round_s = 0.0
        self._queue = queue
        self._pace = pace
        self._timer = timer
        self._chunks_in_round = self._held_back = 0
        self._began_s = 0.0
        self._first = 0
        # When the last chunk was done; None = the time from there to the next one tells nothing.
        self._ended_s: float | None = None

    def enter(self, row: QueueRow) -> None:
        """Take a row that got its place, if some of its prompt is to be computed."""
        row.is_prefilling = row.prompt_left > 0 or row.ticket.job.max_tokens == 0
        if row.is_prefilling:
            self.rows.append(row)

    def leave(self, row: QueueRow) -> None:
        """Drop a row that lost its place."""
        if row in self.rows:
            self.rows.remove(row)

    def begin_round(self) -> None:
        """Begin a round of the decoding rows."""
        self._chunks_in_round, self.round_s = 0, 0.0

    def due(self, running: Collection[QueueRow]) -> QueueRow | None:
        """The row that gets a chunk before the next round; None = none does."""
        is_beside = len(self.rows) < len(running)
        row = self._queue.next_chunk(self.rows, self.chunks, self._timer(), others_decode=is_beside)
        if row is None or not is_beside:
            return row
        is_first_token_due = self._held_back < _HELD_BACK_ROUNDS and any(
            not one.has_first_token and not one.is_prefilling for one in running
        )
        chunks, next_s = self._chunks_in_round, self._queue.chunk_s(row)
        is_due = is_chunk_due(chunks, self.round_s, next_s, is_first_token_due=is_first_token_due)
        self._held_back = 0 if is_due or chunks else self._held_back + 1
        return row if is_due else None

    def begin_chunk(self, row: QueueRow) -> None:
        """Begin the chunk of a row; `end_chunk` ends it."""
        self._began_s, self._first = self._timer(), row.length
        self.chunks += 1
        self._chunks_in_round += 1
        row.served = self.chunks

    def end_chunk(self, row: QueueRow) -> None:
        """Note that the chunk was computed, or that the row is over."""
        now_s = self._timer()
        took_s = now_s - self._began_s
        self.round_s += took_s
        if self._ended_s is not None and row.priority != SPECULATIVE:
            self._pace.interleaved(took_s, self._began_s - self._ended_s)
        self._ended_s, row.chunk_ended_s = None, now_s
        if row.is_over:
            return
        self._pace.computed(self._first, row.length, took_s)
        row.work_s = self._queue.prompt_s(row)
        if not row.prompt_left and row.ticket.job.max_tokens:
            row.is_prefilling = False
            self.rows.remove(row)
        if self.rows and row.priority != SPECULATIVE:
            self._ended_s = now_s
