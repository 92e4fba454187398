"""KV of parked sequences that has to go: it lies in pages of the agent until its sequence goes on.

    asked    the engine asks for pages when it needs the room: for a sequence that is to enter, or
             because running ones outgrew their bounds, or because the agent wants memory back; all
             of these wait for the pages, for PAGES_S
    lent     the agent has prepared pages; they are never committed, so no other engine sees them
    stowed   the KV was copied there, prompt and answer, and the live arrays are gone
    restored the KV was copied back, bit for bit: nothing is computed again

KV of an answer has other bits than a prefill of it gives, so no other sequence may begin from it,
and it lies in no prefix. Where no pages come in time, or the KV has no blocks, the sequence ends
with an error that says it can go on, and its KV is computed again.
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
"""The longest wait for pages: the agent prepares them in milliseconds."""


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
        """`lost` ends a sequence that lost its KV."""
        self._lost = lost
        self._queue = queue
        self._room = queue.room
        self._facts = facts
        self._timer = timer
        self._due: list[QueueRow] = []
        self._settled: list[Callable[[], None]] = []

    def are_coming(self, entry: Admitted, now_s: float) -> bool:
        """Whether pages are on their way for the KV that has to go for an entry.

        Asks for pages where that was not done yet. The entry is then promised the next place.
        """
        coming = [row for row in entry.drops if self._is_coming(row, now_s)]
        if coming:
            self._queue.promise(entry.row)
        return bool(coming)

    def wait(self) -> None:
        """Sleep a moment, where no row computes because pages or bytes are on their way."""
        if self._queue.waiting or self._queue.growth.is_asking:
            time.sleep(_MOMENT_S)

    def lend(self, park_id: int, number: int, pages: tuple[PageRef, ...]) -> None:
        """Take the pages that the agent prepared for a parked row; () = it has none.

        An answer to an earlier request of the row is dropped. Raises InvalidArgument for pages of
        other lengths than were asked for.
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
        """Take the KV of a parked row as soon as its pages came, or will not come."""
        if not self._is_coming(row, now_s):
            self.drop(row)
        elif row not in self._due:
            self._due.append(row)

    def settle(self, now_s: float) -> bool:
        """Take due KV that need not wait for pages any more; whether there was some."""
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
        """Call `tell` once no KV is due."""
        self._settled.append(tell)

    def drop_until(self, size: int) -> int:
        """Take KV of parked rows, of the last one first, until `size` bytes are gone.

        Returns the bytes that went at once; KV that can lie in pages goes a moment later.
        """
        before, now_s = self._room.parked_bytes, self._timer()
        for row in reversed(self._queue.parked_with_kv):
            if size <= 0:
                break
            size -= self._room.held_bytes(row)
            self.drop_soon(row, now_s)
        return before - self._room.parked_bytes

    def drop(self, row: QueueRow) -> None:
        """Take the KV of a parked row, to the pages lent for it; without pages it is lost."""
        if not self._stow(row):
            self._lost(row)
            return
        row.is_stowed = True
        self._room.leave(row)
        self._queue.recheck()

    def resume(self, row: QueueRow) -> bool:
        """Restore a row that has a place again from its pages, and give these back.

        False where that failed, and the row is lost.
        """
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
        """Whether pages for a parked row are on their way; asks for them where it was not done."""
        can_park = row.ticket.job.park_id and row.length and self._facts.kv_block_tokens
        if row.asked_s is None and can_park:
            row.asked_s, row.asks = now_s, row.asks + 1
            wanted = lengths(self._facts, row.length)
            row.ticket.on_frame(KvPark(lengths=wanted, number=row.asks))
        return row.asked_s is not None and row.pages is None and now_s < row.asked_s + PAGES_S

    def _stow(self, row: QueueRow) -> bool:
        """Copy the KV to its pages; False where that fails, and nothing changed."""
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
    """Bytes of each of the pages for the KV of so many tokens; state lies behind the last rows."""
    size = facts.kv_block_tokens
    each = facts.kv_block_bytes // size
    if not each:
        return (facts.kv_state_bytes,)
    whole, rest = divmod(tokens, size)
    found = [each * size] * whole + ([each * rest] if rest else [])
    found[-1] += facts.kv_state_bytes
    return tuple(found)
