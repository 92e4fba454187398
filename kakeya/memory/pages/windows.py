"""Choices of evictions when room is needed: pure, on a layout that the pool shows.

An allocation needs `n` pages in a row: the window of one slab with the least worth in it, in which
every block may be evicted; or none at all, so that nothing is evicted in vain.

The watermarks keep pages free ahead of need: from 90 % of the pages in use on, blocks are evicted
in the background, faster the fuller the pool is, until 80 %; then none until 90 % is reached again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.memory.pages.pins import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSegment:
    """A stretch of one slab: free (no block), or a block with its cost of eviction."""

    pages: int
    block: Block | None = None
    cost: float = 0.0  # infinite: it may not be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionWindow:
    """Blocks that leave a free range that is long enough when they are evicted."""

    blocks: tuple[Block, ...]
    cost: float


def cheapest_window(segments: Sequence[WindowSegment], pages: int) -> EvictionWindow | None:
    """The cheapest stretch of one slab that is `pages` long, or None when every stretch is blocked.

    For each beginning the shortest stretch that suffices is compared: a longer one costs no less.
    Segments are in the order of their addresses.
    """
    best: tuple[float, int, int] | None = None
    begin, length, cost = 0, 0, 0.0
    for end, segment in enumerate(segments):
        if math.isinf(segment.cost):
            begin, length, cost = end + 1, 0, 0.0
            continue
        length += segment.pages
        cost += segment.cost
        while length - segments[begin].pages >= pages:
            length -= segments[begin].pages
            cost -= segments[begin].cost
            begin += 1
        if length >= pages and (best is None or cost < best[0] - 1e-12):
            best = (cost, begin, end)
    if best is None:
        return None
    cost, begin, end = best
    blocks = tuple(s.block for s in segments[begin : end + 1] if s.block is not None)
    return EvictionWindow(blocks=blocks, cost=max(0.0, cost))


class Watermarks:
    """Whether blocks are evicted ahead of need: from the high watermark on, to the low one."""

    __slots__ = ("_high", "_low", "is_on")

    def __init__(self, *, high: float, low: float) -> None:
        self._high = high
        self._low = low
        self.is_on = False

    def is_reached(self, used_pages: int, total_pages: int) -> bool:
        """Whether the pool is so full that eviction begins."""
        return total_pages > 0 and used_pages >= self._high * total_pages

    def excess_pages(self, used_pages: int, total_pages: int) -> int:
        """Whole pages in use above the low watermark; none of a pool of a few pages."""
        return max(0, math.floor(used_pages - self._low * total_pages + 1e-9))

    def wanted_pages(self, used_pages: int, total_pages: int) -> int:
        """Pages to evict in this round; 0 when eviction is off.

        The share of the excess grows from the low watermark to a full pool, where all of it goes.
        """
        excess = self.excess_pages(used_pages, total_pages)
        if self.is_reached(used_pages, total_pages):
            self.is_on = True
        elif not excess:
            self.is_on = False
        if not self.is_on or not excess:
            return 0
        urgency = (used_pages / total_pages - self._low) / (1.0 - self._low)
        return max(1, math.ceil(excess * min(1.0, urgency) - 1e-9))

    def rest(self) -> None:
        """Evict nothing until the high watermark is reached again."""
        self.is_on = False
