"""Prefill beside decoding: the prompts that are being computed, and the part that comes next.

Pieces of prompts are long, for throughput, so a forward over them is computed in parts, a few
layers each. Between two rounds of decoding sequences, parts are computed as they fit the time that
these can wait (`policy`). While a sequence is about to send its first token, parts are held back
for a few rounds.

Prompts that are there at the same time share forwards: a piece of few tokens leaves room for
others, and reading the weights takes most of its time. Only pieces of about one length do, since
the shorter ones are filled up, and only where that changes no bit. The time of each forward that
has one prompt goes to `pace`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from kakeya.core.log import event
from kakeya.engine.model import CHUNK_LIMIT_S, LEAST_CHUNK_TOKENS, PART_S, Model
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import ROUND_S, SPECULATIVE, is_chunk_due, passed
from kakeya.engine.queue.queue import EngineQueue
from kakeya.engine.queue.rows import PieceWork, QueueRow
from kakeya.generation.request import GenerationPriority

_log = logging.getLogger(__name__)
_HELD_BACK_ROUNDS = 2
"""A sequence sends its first token two rounds after its prompt was done."""
_ROUNDS_ABOVE = 4
"""So many times as long go prompts on between two steps in which only less urgent rows decode."""
MOST_TOKENS = 256
"""Of a shared forward, filled up; with more, a token takes no less time."""


class Prefilling:
    """Belongs to the model thread. `rows` prefill; `chunks` parts were computed in all; this round
    has spent `round_s` on prompts, and all together `spent_s`."""

    __slots__ = (
        "_began_s",
        "_chunks_in_round",
        "_ended_s",
        "_held_back",
        "_is_beside",
        "_is_oldest",
        "_model",
        "_pace",
        "_passed_s",
        "_queue",
        "_round_began_s",
        "_shares",
        "_timer",
        "chunks",
        "last_rows",
        "round_s",
        "rows",
        "spent_s",
    )

    def __init__(
        self, model: Model, queue: EngineQueue, pace: Pace, timer: Callable[[], float]
    ) -> None:
        self.rows: list[QueueRow] = []
        self.chunks = 0
        self.last_rows = 0
        """Rows that shared the last forward over prompts."""
        self.round_s = self.spent_s = 0.0
        self._model = model
        self._queue = queue
        self._pace = pace
        self._timer = timer
        self._shares, self._is_beside = True, False
        self._chunks_in_round = self._held_back = 0
        self._is_oldest, self._passed_s = False, 0.0
        self._began_s = self._round_began_s = 0.0
        # When the last part was done; None = the time from there to the next one tells nothing.
        self._ended_s: float | None = None

    def enter(self, row: QueueRow) -> None:
        """Take a row that got its place, if some of its prompt is to be computed."""
        row.is_prefilling = row.prompt_left > 0 or row.ticket.job.max_tokens == 0
        if row.is_prefilling:
            self.rows.append(row)

    def leave(self, row: QueueRow) -> None:
        """Drop a row that lost its place, and its part in a forward that is not done."""
        if row in self.rows:
            self.rows.remove(row)
        work, row.work = row.work, None
        if work is not None and row.run is not None:
            work.rows.remove(row)
            work.forward.leave(row.run.state)

    def begin_round(self) -> None:
        """Begin a round of the decoding rows."""
        self._chunks_in_round, self.round_s = 0, 0.0
        self._round_began_s = self._timer()

    def end_round(self) -> None:
        """End it: the decoding rows had their turns."""
        self._pace.stepped(self._timer() - self._round_began_s)

    def due(self, running: Collection[QueueRow]) -> QueueRow | None:
        """The row that gets a part before the next round; None = none does."""
        self._is_beside = is_beside = len(self.rows) < len(running)
        row, self._is_oldest = self._queue.next_chunk(
            self.rows, self._passed_s, self._timer(), others_decode=is_beside
        )
        if row is None or not is_beside:
            return row
        is_first_token_due = self._held_back < _HELD_BACK_ROUNDS and any(
            not one.has_first_token and not one.is_prefilling for one in running
        )
        is_due = is_chunk_due(
            self._chunks_in_round,
            self.round_s,
            self._queue.chunk_s(row),
            round_s=self._most_round_s(running),
            is_first_token_due=is_first_token_due,
        )
        self._held_back = 0 if is_due or self._chunks_in_round else self._held_back + 1
        return row if is_due else None

    def _most_round_s(self, running: Collection[QueueRow]) -> float:
        """Seconds for chunks between two rounds, also for one that goes by age: half of the time at
        least, however long a step is, and more where only less urgent rows than a prompt decode."""
        urgent = min(one.priority for one in self.rows)
        if all(one.is_prefilling or one.priority > urgent for one in running):
            return _ROUNDS_ABOVE * max(ROUND_S, self._pace.round_s)
        return max(ROUND_S, self._pace.step_s)

    def compute(self, row: QueueRow) -> list[QueueRow]:
        """Compute a part of the forward that a row takes part in, or of its next one.

        Returns the rows with pieces that are done by that. `end` is to be called in any case.
        """
        self._began_s = self._timer()
        self.chunks += 1
        self._chunks_in_round += 1
        work = row.work or self._begin(row)
        for one in work.rows:
            one.served = self.chunks
        is_done = work.forward.advance()
        work.took_s += self._timer() - self._began_s
        if not is_done:
            return []
        if not work.is_shared:  # several take about as long as one, which says nothing of one
            self._pace.computed(_tokens(row), work.expected_s, work.took_s)
        for one in work.rows:
            one.work = one.piece = None
        return work.rows

    def end(self, row: QueueRow, done: Sequence[QueueRow]) -> None:
        """Note that a part was computed, and that the next pieces of these rows are due, if any."""
        now_s = self._timer()
        took_s = now_s - self._began_s
        self.round_s += took_s
        self.spent_s += took_s
        self._passed_s = passed(self._passed_s, took_s, is_oldest=self._is_oldest)
        if self._is_beside and self._ended_s is not None and row.priority != SPECULATIVE:
            self._pace.interleaved(took_s, self._began_s - self._ended_s)
        self._ended_s, row.chunk_ended_s = None, now_s
        for one in done:
            if one.is_over:
                continue
            one.chunk_ended_s, one.work_s = now_s, self._queue.prompt_s(one)
            if not one.prompt_left and one.ticket.job.max_tokens:
                one.is_prefilling = False
                self.rows.remove(one)
        if self.rows and row.priority != SPECULATIVE and not row.is_over:
            self._ended_s = now_s

    def failed(self, row: QueueRow, failure: Exception) -> bool:
        """Give up the forward of a row; whether it was begun for that row alone.

        Rows that shared it compute their pieces anew, each by itself.
        """
        work = row.work
        members = work.rows if work is not None else [row]
        is_shared = work is not None and work.is_shared
        for one in members:
            one.work = None
        if is_shared:
            self._shares = False
            event(
                _log,
                "prompts take turns: a forward of several failed",
                level=logging.WARNING,
                rows=len(members),
                error=repr(failure),
            )
        return not is_shared

    def _begin(self, row: QueueRow) -> PieceWork:
        """Begin a forward over the next piece of a row, and of rows that can share it."""
        rows = self._sharing(row)
        due = [(one.run.state, one.piece.tokens) for one in rows if one.run and one.piece]
        expected_s = sum(
            self._pace.prefill_s(state.length, state.length + len(piece)) for state, piece in due
        )
        states, pieces = [state for state, _ in due], [piece for _, piece in due]
        # While none decodes, only a cancellation waits, and what is more urgent than a batch.
        alone_s = ROUND_S if row.priority > GenerationPriority.NORMAL else CHUNK_LIMIT_S
        part_s = PART_S if self._is_beside else alone_s
        parts = self._model.facts.parts_of(expected_s, part_s)
        # Before the forward is begun: where that fails, all of them are concerned.
        work = PieceWork(rows=rows, is_shared=len(rows) > 1, expected_s=expected_s)
        for one in rows:
            one.work = work
        work.forward = self._model.begin_prompts(states, pieces, parts)
        work.part_s = expected_s / work.forward.parts
        self.last_rows = len(rows)
        return work

    def _sharing(self, row: QueueRow) -> list[QueueRow]:
        """A row, and those of its class whose next pieces are computed in one forward with its own:
        with more urgent ones, these would wait for it."""
        least, rows = self._model.facts.shares_pieces_from, [row]
        if not least or not self._shares or _tokens(row) < least:
            return rows
        others = [
            one
            for one in self.rows
            if one is not row
            and one.work is None
            and one.priority == row.priority
            and _tokens(one) >= least
            and not one.ticket.cancelled
        ]
        for one in sorted(others, key=lambda one: abs(_tokens(one) - _tokens(row))):
            sizes = [_tokens(member) for member in (*rows, one)]
            filled = max(sizes) * len(sizes)
            # Reading the weights once less saves about the time of so many rows.
            if filled <= MOST_TOKENS and filled - sum(sizes) <= LEAST_CHUNK_TOKENS * len(rows):
                rows.append(one)
        return rows


def _tokens(row: QueueRow) -> int:
    """Tokens of the piece that is due."""
    return len(row.piece.tokens) if row.piece is not None else 0
