"""The order in which blocks are evicted: by last use, for each priority and size.

Within one priority and size the age alone decides, so each has a heap by last use, and the block
least worth keeping is the worst of a few heads. Allocation only appends to `notes`; they are filed
when a decision needs them.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush, heapreplace

from kakeya.memory.pages.content import ContentPriority, keep_score
from kakeya.memory.pages.pins import Block, Now

_Entry = tuple[float, int, Block]  # last use, stamp, block
_Heap = list[_Entry]


class Ageing:
    """The order of eviction of all blocks of one pool."""

    __slots__ = ("_heaps", "_now", "notes")

    def __init__(self, now: Now) -> None:
        self._now = now
        self._heaps: dict[tuple[ContentPriority, int], _Heap] = {}
        self.notes: list[Block] = []  # to be filed; the same list for ever

    def file(self) -> None:
        """Put the noted blocks into order, as of now."""
        for block in self.notes:
            if block.tenant is None:
                continue
            if not block.used_s:
                block.used_s = self._now.s
            heap = self._heaps.setdefault((block.tenant.priority, block.pages), [])
            heappush(heap, (block.used_s, block.stamp, block))
        self.notes.clear()

    def least_worth(self, total_pages: int) -> Block | None:
        """Find the clean block to evict first; None when all are pinned or dirty."""
        if self.notes:
            self.file()
        now = self._now.s
        best, lowest = None, math.inf
        empty = []
        for key, heap in self._heaps.items():
            oldest = self._oldest(heap, key[0])
            if oldest is None:
                if not heap:
                    empty.append(key)
                continue
            used_s, _, block = oldest
            score = keep_score(
                age_s=now - used_s, pages=key[1], total_pages=total_pages, priority=key[0]
            )
            if score < lowest:
                best, lowest = block, score
        for key in empty:
            del self._heaps[key]
        return best

    def tidy(self, most: int) -> None:
        """Leave one entry for each block, at its right place, once there are over `most`."""
        if sum(map(len, self._heaps.values())) <= most:
            return
        for (priority, _), heap in self._heaps.items():
            kept = {
                entry[1]: entry
                for entry in heap
                if entry[2].tenant is not None and entry[2].tenant.priority is priority
            }
            heap[:] = kept.values()
            heapify(heap)

    def _oldest(self, heap: _Heap, priority: ContentPriority) -> _Entry | None:
        """Find the entry of the block with the oldest last use that may be evicted."""
        found = None
        pinned: list[Block] = []
        # Entries are corrected here alone, as heads. One whose block is gone, dirty or of another
        # priority is dropped (a change of these notes the block again); one that was used since is
        # filed anew.
        while heap:
            used_s, stamp, block = heap[0]
            if block.tenant is None or block.dirty or block.tenant.priority is not priority:
                heappop(heap)
            elif block.is_pinned:
                heappop(heap)
                pinned.append(block)
            elif (last_s := block.last_used_s()) > used_s:
                heapreplace(heap, (last_s, stamp, block))
            else:
                found = heap[0]
                break
        for block in pinned:  # in use now, so as young as any
            heappush(heap, (self._now.s, block.stamp, block))
        return found
