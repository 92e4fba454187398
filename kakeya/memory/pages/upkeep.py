"""The background work of an arena: eviction ahead of need, and a sweep for overdue pins.

An allocation that finds no free range evicts at once, and waits for that. So from the high
watermark on blocks are evicted in the background, in rounds that take more the fuller the pool
is, down to the low watermark; then nothing goes until the high one is reached again. A pool that
may still grow is left alone: more memory is better than less content.

The pool chooses the content that makes way, by age, size and priority. The owner of that content
may choose which of its blocks go (`makes_way`), as it knows what they would cost to make again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.memory.pages.pins import Allocator, Hold
from kakeya.memory.pages.shared_arena import PageArena
from kakeya.memory.pages.windows import Watermarks

_log = logging.getLogger(__name__)
ROUND_S = 0.05
"""Between two rounds of eviction: requests run meanwhile."""
SWEEP_S = 10.0
"""Between two sweeps for pins: a third of the time after which one is overdue."""

MakesWay = Callable[[int], int]
"""Frees the block of the least worth, if it has at most so many bytes; returns the bytes freed."""


class ArenaUpkeep:
    """See the module; `tend` is a supervised task. Lives on the event loop of the arena."""

    def __init__(
        self,
        arena: PageArena,
        *,
        is_limited: Callable[[], bool],
        freed: Callable[[], None],
        clock: Clock,
    ) -> None:
        """`is_limited` says whether the arena may not grow; `freed` is called after a round."""
        self.makes_way: dict[Allocator, MakesWay] = {}
        self._arena = arena
        self._pool = arena.pool
        self._is_limited = is_limited
        self._freed = freed
        self._clock = clock
        config = arena.config
        self._watermarks = Watermarks(high=config.high_watermark, low=config.low_watermark)
        self._wake = asyncio.Event()
        self._overdue: frozenset[Hold] = frozenset()

    def allocated(self) -> None:
        """Begin to evict if an allocation filled the pool to the high watermark."""
        if self._watermarks.is_reached(self._pool.used_pages, self._pool.total_pages):
            self._wake.set()

    async def tend(self) -> None:
        """Evict from the high watermark to the low one, and sweep now and then, for ever."""
        while True:
            await self._clock.sleep(SWEEP_S, self._wake)
            self._wake.clear()
            self.sweep()
            is_more = True
            while is_more:
                is_more = self.evict() > 0
                await self._clock.sleep(ROUND_S)

    def evict(self) -> int:
        """Evict the share of one round, if the watermarks want any; how many pages it freed."""
        used, total = self._pool.used_pages, self._pool.total_pages
        wanted = self._watermarks.wanted_pages(used, total)
        if not wanted:
            return 0
        most = self._watermarks.excess_pages(used, total)
        freed = self._take(wanted, most) if self._is_limited() else 0
        if freed:
            self._pool.evicted_ahead_pages += freed
            self._freed()
        else:
            self._watermarks.rest()
        return freed

    def _take(self, wanted: int, most: int) -> int:
        """Free pages until `wanted` are, and never more than `most`."""
        self._arena.at(self._clock.mono())
        page_bytes = self._arena.config.page_bytes
        freed = 0
        while freed < wanted:
            block = self._pool.least_worth()
            if block is None:
                break
            make_way = self.makes_way.get(block.tenant) if block.tenant is not None else None
            if make_way is not None:
                pages = make_way((most - freed) * page_bytes) // page_bytes
            elif block.pages <= most - freed:
                pages = block.pages
                self._pool.evict(block)
            else:
                pages = 0
            if not pages:
                break
            freed += pages
        return freed

    def sweep(self) -> None:
        """Move the time on, and report each pin that outlived its scope, once."""
        self._arena.at(self._clock.mono())
        overdue = frozenset(self._pool.overdue())
        for hold in overdue - self._overdue:
            event(
                _log,
                "a pin outlived its scope",
                level=logging.WARNING,
                holder=hold.holder.name,
                pages=hold.block.pages,
                pins=hold.pins,
            )
        self._overdue = overdue
