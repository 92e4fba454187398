"""KV of parked sequences that has to go: it lies in pages of the agent until its sequence goes on.

    asked    pages are asked for when somebody needs the room, and waited for, for PAGES_S: by who
             is to enter; by all, where those that run outgrew what there is; by the agent, where it
             wants memory back
    lent     the agent has prepared them; nobody else sees them, they are never committed
    stowed   the KV was copied there, prompt and answer, and the live arrays are gone
    restored it was copied back, bit for bit: nothing is computed again

KV of an answer has other bits than a prefill of it gives, so nobody else may begin from it: that is
why it lies in no prefix. Where there are no pages in time, or the KV has no blocks, the sequence
ends with an error that says it can go on, and what it had is computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kakeya.core.errors import InvalidArgument
from kakeya.core.log import event
from kakeya.engine.kv.blocks import FAULTS
from kakeya.engine.model import KvView, LoadedFacts
from kakeya.engine.queue.queue import EngineQueue
from kakeya.engine.queue.rows import Admitted, QueueRow
from kakeya.generation.frames import KvPark
from kakeya.generation.kv import PageRef
from kakeya.memory.pages.reader import PageReader

_log = logging.getLogger(__name__)
_MOMENT_S = 0.0005
PAGES_S = 0.25
"""So long whoever needs the room waits for pages: the agent prepares them in milliseconds."""


class Parking:
    """Belongs to the model thread."""

    def __init__(
        self,
        queue: EngineQueue,
        facts: LoadedFacts,
        timer: Callable[[], float],
        *,
        lost: Callable[[QueueRow], None],
    ) -> None:
        """`lost` ends a sequence whose KV is gone."""
        self._lost = lost
        self._queue = queue
        self._room = queue.room
        self._facts = facts
        self._timer = timer
        self._due: list[QueueRow] = []
        self._settled: list[Callable[[], None]] = []

    def are_coming(self, entry: Admitted, now_s: float) -> bool:
        """Whether pages are on their way for the KV that has to go for an entry, which is the next
        one then.

        They are asked for where they were not yet.
        """
        coming = [row for row in entry.drops if self._is_coming(row, now_s)]
        if coming:
            self._queue.promise(entry.row)
        return bool(coming)

    def wait(self) -> None:
        """A moment, where nobody computes because pages are on their way."""
        if self._queue.waiting:
            time.sleep(_MOMENT_S)

    def lend(self, park_id: int, number: int, pages: tuple[PageRef, ...]) -> None:
        """The agent has prepared these pages for one of the parked; () = it has none.

        What answers an earlier question is not the row's any more. Raises InvalidArgument when
        they are not those that were asked for.
        """
        for row in self._queue.parked:
            if row.ticket.job.park_id == park_id and row.asks == number and row.pages is None:
                wanted = lengths(self._facts, row.length)
                if pages and tuple(one.length for one in pages) != wanted:
                    raise InvalidArgument(
                        f"{len(pages)} pages were lent for the KV of {row.length} tokens, "
                        f"and {len(wanted)} of other lengths were asked for"
                    )
                row.pages = pages
                return

    @property
    def is_due(self) -> bool:
        """Whether KV is to go and waits for pages."""
        return bool(self._due)

    def drop_soon(self, row: QueueRow, now_s: float) -> None:
        """Take the KV of a parked one as soon as there are pages for it, or are sure to be none."""
        if not self._is_coming(row, now_s):
            self.drop(row)
        elif row not in self._due:
            self._due.append(row)

    def settle(self, now_s: float) -> bool:
        """Take what is due and need not wait for pages any more; whether there was some."""
        ready = [row for row in self._due if not self._is_coming(row, now_s)]
        for row in ready:
            self._due.remove(row)
            if row in self._queue.parked_with_kv:
                self.drop(row)
        if not self._due:
            while self._settled:
                self._settled.pop()()
        return bool(ready)

    def when_settled(self, tell: Callable[[], None]) -> None:
        """Call this once nothing is due."""
        self._settled.append(tell)

    def drop_until(self, size: int) -> int:
        """Take KV of parked ones, of the last one first, until `size` bytes are gone; what went.

        What can lie in pages goes when these are there, a moment later.
        """
        before, now_s = self._room.parked_bytes, self._timer()
        for row in reversed(self._queue.parked_with_kv):
            if size <= 0:
                break
            size -= self._room.held_bytes(row)
            self.drop_soon(row, now_s)
        return before - self._room.parked_bytes

    def drop(self, row: QueueRow) -> None:
        """Take the KV of a parked one, to the pages that were lent for it, or it is lost."""
        if not self._stow(row):
            self._lost(row)
            return
        row.is_stowed = True
        self._room.leave(row)
        self._queue.recheck()

    def resume(self, row: QueueRow) -> bool:
        """It has a place again: take its KV back where that lies in pages, which are needed no
        longer then. False where that failed, and it is lost."""
        if row in self._due:
            self._due.remove(row)
        if row.is_stowed and not self._restore(row):
            self._lost(row)
            return False
        if row.asked_s is not None:
            row.is_stowed, row.pages, row.asked_s = False, None, None
            row.ticket.on_frame(KvPark(lengths=()))
        return True

    def _is_coming(self, row: QueueRow, now_s: float) -> bool:
        """Whether pages for the KV of a parked one are on their way. They are asked for where they
        were not yet."""
        can_park = row.ticket.job.park_id and row.length and self._facts.kv_block_tokens
        if row.asked_s is None and can_park:
            row.asked_s, row.asks = now_s, row.asks + 1
            wanted = lengths(self._facts, row.length)
            row.ticket.on_frame(KvPark(lengths=wanted, number=row.asks))
        return row.asked_s is not None and row.pages is None and now_s < row.asked_s + PAGES_S

    def _stow(self, row: QueueRow) -> bool:
        """Copy it there; False, and nothing changed, where that fails."""
        if not row.pages or row.run is None:
            return False
        try:
            with PageReader() as reader:
                return row.run.state.stow(self._views(reader, row))
        except FAULTS as fault:
            event(_log, "KV could not be parked", level=logging.WARNING, reason=repr(fault))
            return False

    def _restore(self, row: QueueRow) -> bool:
        if row.run is None:
            return False
        try:
            with PageReader() as reader:
                row.run.state.restore(self._views(reader, row))
        except FAULTS as fault:
            event(_log, "parked KV is lost", level=logging.WARNING, reason=repr(fault))
            return False
        return True

    def _views(self, reader: PageReader, row: QueueRow) -> list[KvView]:
        size, views = self._facts.kv_block_tokens, []
        for index, pages in enumerate(row.pages or ()):
            tokens = min(size, row.length - index * size)
            has_state = self._facts.kv_state_bytes > 0 and index + 1 == len(row.pages or ())
            views.append(KvView(reader.fill(pages), tokens, has_state))
        return views


def lengths(facts: LoadedFacts, tokens: int) -> tuple[int, ...]:
    """Of the pages for the KV of so many tokens, in bytes; state lies behind the last rows."""
    size = facts.kv_block_tokens
    each = facts.kv_block_bytes // size
    if not each:
        return (facts.kv_state_bytes,)
    whole, rest = divmod(tokens, size)
    found = [each * size] * whole + ([each * rest] if rest else [])
    found[-1] += facts.kv_state_bytes
    return tuple(found)
