"""The places of blocks: slabs, the free ranges in them, and freed blocks kept at hand. No policy.

Each page has a block object ready for an allocation of that page alone, and a freed block is
replaced at once by a new one: an allocation builds nothing, and a handle never means two blocks.
Freed blocks lie at hand unmerged, for an exact fit; a search without a fit merges them first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from kakeya.core.errors import PageFreed
from kakeya.memory.pages.content import PageConfig
from kakeya.memory.pages.extents import Extents
from kakeya.memory.pages.pins import Block
from kakeya.memory.pages.windows import WindowSegment

_READY_RANGES = 2  # of each size above one page


def _free_of_charge(_block: Block) -> float:
    return 0.0


class PageTable:
    """Slabs of equal size, and the places of blocks in them."""

    __slots__ = (
        "_exists",
        "_extents",
        "_range",
        "_ready",
        "_single",
        "_stamps",
        "config",
        "singles",
    )

    def __init__(self, config: PageConfig) -> None:
        self.config = config
        self._extents = Extents(slab_pages=config.slab_pages, fit=config.fit)
        self._exists: list[bool] = []  # by slab number
        self._single: list[Block] = []  # by page: what an allocation of it alone gets
        self._range: dict[int, Block] = {}  # first page -> range, live or at hand
        self.singles: list[Block] = []  # at hand; the same list for ever
        self._ready: dict[int, list[Block]] = {1: self.singles}  # size -> at hand
        self._stamps = count(1)

    # --- taking and giving; None: no free range is long enough

    def single(self) -> Block | None:
        """Take one page, and lay its neighbours at hand."""
        if not self.singles:
            found = self._extents.take_smallest(self.config.ready_blocks)
            if found is None and len(self._ready) > 1:
                self.merge()
                found = self._extents.take_smallest(self.config.ready_blocks)
            if found is None:
                return None
            start, size = found
            self.singles.extend(reversed(self._single[start : start + size]))
        return self.singles.pop()

    def range(self, pages: int) -> Block | None:
        """Take pages in a row."""
        ready = self._ready.get(pages)
        if ready:
            return ready.pop()
        start = self._extents.take(pages)
        if start is None:
            self.merge()
            start = self._extents.take(pages)
        if start is None:
            return None
        block = self._range[start] = Block(start, pages, next(self._stamps))
        return block

    def put_back(self, block: Block) -> None:
        """Free the pages of a block; its handle is dead from here on."""
        first, pages = block.first, block.pages
        if pages == 1:
            fresh = self._single[first] = Block(first, 1, next(self._stamps))
            if len(self.singles) < self.config.ready_blocks:
                self.singles.append(fresh)
            else:
                self._extents.give(first, 1)
            return
        ready = self._ready.setdefault(pages, [])
        if len(ready) < _READY_RANGES:
            fresh = self._range[first] = Block(first, pages, next(self._stamps))
            ready.append(fresh)
        else:
            del self._range[first]
            self._extents.give(first, pages)

    def merge(self) -> None:
        """Merge the blocks at hand into the free ranges."""
        for block in self.singles:
            self._extents.give(block.first, 1)
        self.singles.clear()
        if len(self._ready) > 1:
            for pages, ready in self._ready.items():
                for block in ready:
                    del self._range[block.first]
                    self._extents.give(block.first, pages)
            self._ready = {1: self.singles}

    # --- slabs

    def grow(self) -> int:
        """Add a slab and return its number, the lowest free one."""
        size = self.config.slab_pages
        if False in self._exists:
            slab = self._exists.index(False)
            self._exists[slab] = True
        else:
            slab = len(self._exists)
            self._exists.append(True)
            first = slab * size
            self._single += [Block(first + i, 1, next(self._stamps)) for i in range(size)]
        self._extents.give(slab * size, size)
        return slab

    def remove(self, slab: int) -> None:
        """Take away a slab that holds no live block."""
        self.merge()
        self._extents.remove(slab * self.config.slab_pages)
        self._exists[slab] = False

    def slabs(self) -> tuple[int, ...]:
        """The numbers of all slabs."""
        return tuple(number for number, exists in enumerate(self._exists) if exists)

    # --- looking

    @property
    def total_pages(self) -> int:
        """Pages of all slabs."""
        return sum(self._exists) * self.config.slab_pages

    @property
    def free_pages(self) -> int:
        """Pages without content."""
        free = self._extents.pages
        for pages, ready in self._ready.items():
            free += pages * len(ready)
        return free

    def has_free(self, pages: int) -> bool:
        """Whether so many pages in a row are free; merges the blocks at hand if that may decide."""
        if self._ready.get(pages) or self._extents.largest() >= pages:
            return True
        return self.free_pages >= pages and self.largest_free() >= pages

    def largest_free(self) -> int:
        """The longest free range, after merging the blocks at hand."""
        self.merge()
        return self._extents.largest()

    def find(self, first: int, stamp: int) -> Block:
        """Find a live block by its first page and stamp. Raises PageFreed."""
        if 0 <= first < len(self._single):
            for block in (self._range.get(first), self._single[first]):
                if block is not None and block.stamp == stamp and block.is_live:
                    return block
        raise PageFreed(f"page {first} holds no block with stamp {stamp}")

    def blocks(self, slab: int) -> tuple[Block, ...]:
        """The live blocks of one slab, by address."""
        return tuple(found.block for found in self.segments(slab) if found.block is not None)

    def segments(
        self, slab: int, cost: Callable[[Block], float] = _free_of_charge
    ) -> list[WindowSegment]:
        """Lay out one slab by address, each live block with its cost of eviction."""
        segments: list[WindowSegment] = []
        page = slab * self.config.slab_pages
        end = page + self.config.slab_pages
        while page < end:
            block = self._range.get(page) or self._single[page]
            if block.is_live:
                pages = block.pages
                segments.append(WindowSegment(pages=pages, block=block, cost=cost(block)))
            else:
                pages = self._extents.size_at(page) or block.pages
                segments.append(WindowSegment(pages=pages))
            page += pages
        return segments
