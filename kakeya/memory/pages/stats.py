"""Pages by state, counted from the layout of the slabs; the state is never kept twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.memory.pages.content import ContentType
from kakeya.memory.pages.windows import WindowSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Pages by state; `pinned_pages` includes blocks that are being prepared."""

    total_pages: int
    free_pages: int
    pinned_pages: int
    dirty_pages: int  # not pinned, and waiting for the disk
    largest_free: int  # pages in a row
    slabs: int
    slab_pages: int
    blocks: int
    evicted_pages: int  # since the start
    evicted_ahead_pages: int  # in the background, before an allocation needed them
    by_content: tuple[tuple[ContentType, int], ...]

    @property
    def utilisation(self) -> float:
        """The share of pages with content, evictable or not."""
        return 1.0 - self.free_pages / self.total_pages if self.total_pages else 0.0

    @property
    def contiguity(self) -> float:
        """The longest free range against the longest there could be: 1 is no fragmentation.

        A range cannot leave its slab, so with more than a slab free the slab is the measure.
        """
        possible = min(self.free_pages, self.slab_pages)
        return self.largest_free / possible if possible else 1.0


def count_pages(
    slabs: Sequence[Sequence[WindowSegment]],
    *,
    slab_pages: int,
    evicted_pages: int,
    evicted_ahead_pages: int,
) -> PoolStats:
    """Count the pages of all slabs, each given as its segments by address."""
    free = pinned = dirty = blocks = largest = 0
    by_content = dict.fromkeys(ContentType, 0)
    for segments in slabs:
        run = 0
        for segment in segments:
            block = segment.block
            if block is None or block.tenant is None:
                free += segment.pages
                run += segment.pages
                largest = max(largest, run)
                continue
            run = 0
            blocks += 1
            by_content[block.tenant.content] += block.pages
            if block.is_pinned:
                pinned += block.pages
            elif block.dirty:
                dirty += block.pages
    return PoolStats(
        total_pages=len(slabs) * slab_pages,
        free_pages=free,
        pinned_pages=pinned,
        dirty_pages=dirty,
        largest_free=largest,
        slabs=len(slabs),
        slab_pages=slab_pages,
        blocks=blocks,
        evicted_pages=evicted_pages,
        evicted_ahead_pages=evicted_ahead_pages,
        by_content=tuple(by_content.items()),
    )
