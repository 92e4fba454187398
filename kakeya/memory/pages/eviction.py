"""The worth of a pool's blocks at one moment, and the choice of evictions by it. Changes
nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kakeya.memory.pages.content import keep_score
from kakeya.memory.pages.pins import Block, Now
from kakeya.memory.pages.table import PageTable
from kakeya.memory.pages.windows import EvictionWindow, WindowSegment, cheapest_window


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkPlan:
    """Slabs to remove, with the blocks in them; `short` more slabs were wanted and not found."""

    slabs: tuple[int, ...]
    blocks: tuple[Block, ...]
    short: int


class Worth:
    """Looks at the blocks of one table, at the time of its pool."""

    __slots__ = ("_now", "_table")

    def __init__(self, table: PageTable, now: Now) -> None:
        self._table = table
        self._now = now

    def keep(self, block: Block) -> float:
        """The worth of a block, in 0..1."""
        if block.tenant is None:
            return 0.0
        return keep_score(
            age_s=self._now.s - (block.last_used_s() or self._now.s),
            pages=block.pages,
            total_pages=self._table.total_pages,
            priority=block.tenant.priority,
        )

    def layouts(self) -> Iterator[tuple[int, list[WindowSegment]]]:
        """Each slab by its number, laid out by address with the cost of its blocks."""
        for slab in self._table.slabs():
            yield slab, self._table.segments(slab, self._cost)

    def cheapest_window(self, pages: int) -> EvictionWindow | None:
        """The blocks to evict for so many pages in a row; None = every range is blocked."""
        found = (cheapest_window(segments, pages) for _, segments in self.layouts())
        windows = (window for window in found if window is not None)
        return min(windows, key=lambda window: window.cost, default=None)

    def cheapest_slabs(self, slabs: int) -> ShrinkPlan:
        """Choose slabs without pins, those first with the least worth in them."""
        costs = []
        for slab, segments in self.layouts():
            cost = sum(segment.cost for segment in segments)
            if not math.isinf(cost):
                costs.append((cost, slab, [s.block for s in segments if s.block is not None]))
        chosen = sorted(costs, key=lambda found: found[:2])[:slabs]
        return ShrinkPlan(
            slabs=tuple(slab for _, slab, _ in chosen),
            blocks=tuple(block for _, _, blocks in chosen for block in blocks),
            short=max(0, slabs - len(chosen)),
        )

    def least_dirty(self) -> Block | None:
        """Find the dirty block of the least worth without pins; None = there is none."""
        blocks = (block for slab in self._table.slabs() for block in self._table.blocks(slab))
        dirty = [block for block in blocks if block.dirty and block.is_evictable]
        return min(dirty, key=self.keep, default=None)

    def _cost(self, block: Block) -> float:
        if not block.is_evictable:
            return math.inf
        # One dirty block weighs more than a slab full of clean ones, each of which is worth <= 1.
        return self.keep(block) + (self._table.config.slab_pages if block.dirty else 0.0)
