"""A larger KV bound, asked of the agent: it lends the memory that its ledger has, step by step.

    needed     a generation cannot begin, or go on, without it: it waits for the answer
    wished     beside that, room for kept KV that would be dropped, and for tokens to come
    answered   with a larger bound; or with the same one, if there is no memory now: as much is
               asked for again only after REST_S

The bound becomes smaller only at the agent's word.
"""

from __future__ import annotations

from kakeya.engine.queue.room import KvRoom
from kakeya.engine.queue.rows import QueueRow
from kakeya.generation.frames import KvWant

ANSWER_S = 8.0
"""The longest wait for an answer: idle models may leave for the room meanwhile."""
REST_S = 1.0
WISHES_REST_S = 5.0
"""The same for bytes that are only wished for."""


class KvGrowth:
    """Belongs to the model thread; one question at a time."""

    def __init__(self, room: KvRoom) -> None:
        self._room = room
        self._asker: QueueRow | None = None
        self._needed_bytes = self._bound_bytes = 0
        self._until_s = 0.0
        self._refused: QueueRow | None = None
        self._refused_bytes = 0
        self._rests_until_s = self._wishes_from_s = 0.0

    @property
    def is_asking(self) -> bool:
        """Whether an answer did not come yet."""
        return self._asker is not None

    def may_ask(self, size: int, now_s: float) -> bool:
        """Whether so many more bytes may be there, if they are asked for."""
        is_refused = now_s < self._rests_until_s and size >= self._refused_bytes
        return size <= self._room.growth_bytes and not is_refused

    def is_coming(self, row: QueueRow, needed: int, wished: int, now_s: float) -> bool:
        """Whether an answer is on its way; asks for these bytes where that was not done yet."""
        if self.is_pending(now_s):
            return True
        if not (self.may_ask(needed, now_s) if needed else now_s >= self._wishes_from_s):
            return False
        wished = min(max(needed, wished), self._room.growth_bytes)
        if not wished:
            return False
        self._asker, self._needed_bytes = row, needed
        self._bound_bytes, self._until_s = self._room.budget_bytes, now_s + ANSWER_S
        row.ticket.on_frame(KvWant(needed_bytes=needed, wished_bytes=wished))
        return True

    def is_pending(self, now_s: float) -> bool:
        """Whether an answer is on its way. One that is late counts as a refusal."""
        if self._asker is not None and now_s >= self._until_s:
            self.answered(now_s)
        return self._asker is not None

    def answered(self, now_s: float) -> None:
        """Take the bound of now as the answer."""
        asker, self._asker = self._asker, None
        if asker is None or self._room.budget_bytes > self._bound_bytes:
            return
        self._wishes_from_s = now_s + WISHES_REST_S
        if self._needed_bytes:
            self._refused, self._refused_bytes = asker, self._needed_bytes
            self._rests_until_s = now_s + REST_S

    def is_refused(self, row: QueueRow, now_s: float) -> bool:
        """Whether there was no memory for a row a moment ago."""
        return row is self._refused and now_s < self._rests_until_s

    def left(self, row: QueueRow) -> None:
        """Forget the question of a row that is over."""
        if row is self._asker:
            self._asker = None
        if row is self._refused:
            self._refused = None
