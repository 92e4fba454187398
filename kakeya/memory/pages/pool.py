"""The pages of an arena: their owners, and the evictions when there are too few. Pure: no memory.

An allocation tries, in order:

    1. a block of exactly this size that was freed lately, at hand   (an exact fit is the best fit)
    2. the best, or the first, fit among the free ranges, merged first if need be
    3. evict: for one page the block least worth keeping, for a range the cheapest window
    4. OutOfPages; then nothing was evicted

The hot calls (`PageOwner.page`, `Hold.pin`, `Hold.unpin`) only take notes, which are put into order
when a decision needs it.

One thread owns a pool. It tells the time with `at` before it decides, and nothing here waits, logs,
or knows models and requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kakeya.core.errors import Conflict, InvalidArgument, InvariantBroken, OutOfPages, PageFreed
from kakeya.memory.pages.age_order import Ageing
from kakeya.memory.pages.content import PIN_RULES, ContentPriority, ContentType, PageConfig
from kakeya.memory.pages.eviction import ShrinkPlan, Worth
from kakeya.memory.pages.pins import Block, Hold, Now, PinHolder, is_scoped
from kakeya.memory.pages.stats import PoolStats, count_pages
from kakeya.memory.pages.table import PageTable

_NOTES = 4096  # file before so many notes pile up


class PageOwner:
    """An owner of blocks: one kind of content for one part. Made by `PagePool.tenant`."""

    __slots__ = ("_notes", "_pool", "_singles", "content", "owner", "priority")

    def __init__(
        self, pool: PagePool, content: ContentType, owner: str, priority: ContentPriority
    ) -> None:
        self.content = content
        self.owner = owner
        self.priority = priority
        self._pool = pool
        self._singles, self._notes = pool.at_hand()

    def page(self) -> Block:
        """Allocate one page, unpinned. Raises OutOfPages."""
        try:
            block = self._singles.pop()
        except IndexError:
            block = self._pool.next_single()
        block.tenant = self
        self._notes.append(block)
        return block

    def range(self, pages: int) -> Block:
        """Allocate pages in a row, unpinned. Raises OutOfPages, InvalidArgument."""
        if pages == 1:
            return self.page()
        block = self._pool.next_range(pages)
        block.tenant = self
        self._notes.append(block)
        return block


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEviction:
    """The evicted blocks, and the number of pages that are still missing."""

    blocks: tuple[Block, ...]
    short_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The pins and blocks that the end of a holder gave back."""

    pins: int
    rolled_back: int


class PagePool:
    """All pages of one arena, in slabs of equal size."""

    def __init__(
        self, config: PageConfig, *, freed: Callable[[Block, bool], None] | None = None
    ) -> None:
        """`freed(block, evicted)` is called before the pages of a block can be used again."""
        self.config = config
        self.now = Now()
        self.ownerless = PinHolder("no owner", self.now)
        self.evicted_pages = 0
        self.evicted_ahead_pages = 0  # freed in the background, before an allocation needed them
        self._freed = freed
        self._table = PageTable(config)
        self._worth = Worth(self._table, self.now)
        self._ageing = Ageing(self.now)
        self._holders: set[PinHolder] = {self.ownerless}

    # --- time, tenants, holders

    def at(self, now: float) -> None:
        """Move the time on; `now` in monotonic seconds. It is the time of all that follows."""
        self._ageing.file()
        self._ageing.tidy(2 * self._table.total_pages)
        self.now.s = max(self.now.s, now)

    def tenant(
        self, content: ContentType, owner: str, priority: ContentPriority | None = None
    ) -> PageOwner:
        """Make a tenant; without a priority it has that of its content."""
        return PageOwner(self, content, owner, priority or PIN_RULES[content].priority)

    def holder(self, name: str) -> PinHolder:
        """Make a holder, which can pin and prepare until it is closed."""
        holder = PinHolder(name, self.now)
        self._holders.add(holder)
        return holder

    def close(self, holder: PinHolder) -> Closed:
        """End a holder: its pins end, and blocks that it prepares are rolled back; harmless
        twice."""
        if holder is self.ownerless:
            raise InvalidArgument("the holder of pins without an owner cannot be closed")
        holder.is_open = False
        self._holders.discard(holder)
        pins = holder.drop_all()
        prepared = tuple(holder.preparing)
        for block in prepared:
            self.rollback(block)
        return Closed(pins=pins, rolled_back=len(prepared))

    def end_overdue(self) -> int:
        """End ownerless pins that are older than the limit; returns their number."""
        limit = self.config.pin_limit_s
        old = [h for h in self.ownerless.holds() if h.pins and self.now.s - h.used_s > limit]
        ended = sum(hold.pins for hold in old)
        for hold in old:
            hold.close()
        return ended

    def overdue(self) -> tuple[Hold, ...]:
        """Find pins that should have ended with a scope, and were not renewed: to be reported."""
        limit = self.config.pin_limit_s
        return tuple(
            hold
            for holder in self._holders
            for hold in holder.holds()
            if hold.pins > 0
            and self.now.s - hold.used_s > limit
            and hold.block.tenant is not None
            and is_scoped(hold.block.tenant.content)
        )

    # --- allocation

    def at_hand(self) -> tuple[list[Block], list[Block]]:
        """Give a tenant the single pages at hand, and the list that notes allocations."""
        return self._table.singles, self._ageing.notes

    def next_single(self) -> Block:
        """Find one page, evicting if need be. Raises OutOfPages."""
        block = self._table.single()
        if block is None:
            if self.evict_until_free(1).short_pages:
                raise self._out_of_pages(1)
            block = self._table.single()
        if block is None:
            raise InvariantBroken("eviction", "a page was evicted, and none is free")
        return block

    def next_range(self, pages: int) -> Block:
        """Find pages in a row, evicting if need be. Raises OutOfPages, InvalidArgument."""
        if not 1 < pages <= self.config.slab_pages:
            raise InvalidArgument(
                f"a range of {pages} pages is asked; a slab allows 1..{self.config.slab_pages}"
            )
        block = self._table.range(pages)
        if block is None:
            self._evict_window(pages)
            block = self._table.range(pages)
            self._evict_to(math.ceil(pages * self.config.headroom - 1e-9))
        if block is None:
            raise InvariantBroken("eviction", f"{pages} pages were evicted, but not in a row")
        return block

    def free(self, block: Block) -> None:
        """Give a block back. Raises PageFreed the second time, Conflict while it is pinned."""
        self._check_idle(block)
        self._release(block)

    def prepare(self, tenant: PageOwner, pages: int, holder: PinHolder) -> Block:
        """Allocate a block for `holder` to fill. It is neither evicted nor held until `commit`."""
        if not holder.is_open:
            raise PageFreed(f"{holder.name} has ended and can prepare nothing")
        block = tenant.range(pages)
        block.preparing = holder
        holder.preparing.add(block)
        return block

    def commit(self, block: Block) -> None:
        """Let all see a prepared block. Raises PageFreed when it was rolled back meanwhile."""
        self._end_preparing(block)
        block.used_s = self.now.s

    def rollback(self, block: Block) -> None:
        """Give a prepared block back as if it had never been. Raises PageFreed, Conflict."""
        self._end_preparing(block)
        self._release(block)

    def find(self, first: int, stamp: int) -> Block:
        """Find a live block by the reference of another process. Raises PageFreed."""
        return self._table.find(first, stamp)

    # --- reports of tenants

    def move(self, block: Block, tenant: PageOwner) -> None:
        """Give a block to another tenant, as when an adapter cools. Raises PageFreed."""
        if block.tenant is None:
            raise PageFreed(f"{block} is free and cannot be moved to {tenant.owner}")
        block.tenant = tenant
        self._ageing.notes.append(block)

    def mark_dirty(self, block: Block) -> None:
        """Note that a block waits for the disk: it is evicted last until `mark_clean`."""
        if block.tenant is None:
            raise PageFreed(f"{block} is free and cannot be dirty")
        block.dirty = True

    def mark_clean(self, block: Block) -> None:
        """Note that a block is on disk, or will not be."""
        if block.dirty:
            block.dirty = False
            self._ageing.notes.append(block)

    # --- eviction

    def evict_until_free(self, pages: int) -> PageEviction:
        """Evict the least worth until `pages` and the headroom are free, or no block may go."""
        wanted = math.ceil(pages * (1.0 + self.config.headroom) - 1e-9)
        evicted = self._evict_to(wanted, needed_pages=pages)
        return PageEviction(
            blocks=tuple(evicted), short_pages=max(0, pages - self._table.free_pages)
        )

    def evict_one(self) -> Block | None:
        """Evict the block least worth keeping, a dirty one last; None when no block may go."""
        block = self.least_worth() or self._worth.least_dirty()
        if block is not None:
            self._evict(block)
        return block

    def least_worth(self) -> Block | None:
        """Find the block least worth keeping that is neither pinned nor dirty."""
        return self._ageing.least_worth(self._table.total_pages)

    def evict(self, block: Block) -> None:
        """Evict one block. Raises PageFreed, Conflict while it is pinned."""
        self._check_idle(block)
        self._evict(block)

    # --- slabs

    def grow(self) -> int:
        """Add a slab and return its number. Raises OutOfPages at the configured total."""
        self.check_growth()
        return self._table.grow()

    def check_growth(self) -> None:
        """Raise OutOfPages where no further slab is allowed."""
        total, size = self._table.total_pages, self.config.slab_pages
        if total + size > self.config.total_pages:
            raise OutOfPages(
                f"the arena has {total} pages and one more slab of {size} would pass "
                f"the configured total of {self.config.total_pages}"
            )

    def plan_shrink(self, slabs: int) -> ShrinkPlan:
        """Choose slabs without pins, those with the least worth in them first."""
        return self._worth.cheapest_slabs(slabs)

    def remove(self, slab: int) -> tuple[Block, ...]:
        """Evict the blocks of a slab and take it away; returns the blocks.

        Raises Conflict when one of them is pinned; then nothing has changed.
        """
        if slab not in self._table.slabs():
            raise InvalidArgument(f"there is no slab {slab}; there are {self._table.slabs()}")
        blocks = self._table.blocks(slab)
        held = [block for block in blocks if not block.is_evictable]
        if held:
            raise Conflict(f"slab {slab} cannot go: {held[0]} in it is pinned")
        for block in blocks:
            self._evict(block)
        self._table.remove(slab)
        return blocks

    def slabs(self) -> tuple[int, ...]:
        """The numbers of the slabs there are."""
        return self._table.slabs()

    # --- queries

    @property
    def total_pages(self) -> int:
        """Pages of all slabs."""
        return self._table.total_pages

    @property
    def free_pages(self) -> int:
        """Pages without content."""
        return self._table.free_pages

    @property
    def used_pages(self) -> int:
        """Pages with content."""
        return self._table.total_pages - self._table.free_pages

    def has_free(self, pages: int) -> bool:
        """Whether so many pages in a row are free, so that no block is evicted for them."""
        return self._table.has_free(pages)

    def merge(self) -> None:
        """Merge the blocks at hand into the free ranges now, not when a search needs it."""
        self._table.merge()

    def blocks(self) -> Iterator[Block]:
        """Every live block, by address."""
        for slab in self._table.slabs():
            yield from self._table.blocks(slab)

    def stats(self) -> PoolStats:
        """Count everything once, without changing anything."""
        slabs = [self._table.segments(slab) for slab in self._table.slabs()]
        return count_pages(
            slabs,
            slab_pages=self.config.slab_pages,
            evicted_pages=self.evicted_pages,
            evicted_ahead_pages=self.evicted_ahead_pages,
        )

    def check_integrity(self) -> None:
        """Check that a page is free or in one block, and that a block knows its holders, which are
        open, as they know it. Raises InvariantBroken."""
        taken: set[int] = set()
        for block in self.blocks():
            pages = set(range(block.first, block.first + block.pages))
            if taken & pages:
                raise InvariantBroken("pages", f"{block} overlaps another block")
            taken |= pages
            if block.preparing is not None and block not in block.preparing.preparing:
                raise InvariantBroken("pages", f"{block} is prepared by no holder")
            for hold in block.holds:
                if not hold.holder.is_open or hold not in hold.holder.holds():
                    raise InvariantBroken("pages", f"{block} is held by {hold.holder.name}, ended")
        if len(taken) + self.free_pages != self._table.total_pages:
            raise InvariantBroken(
                "pages",
                f"{len(taken)} in blocks and {self.free_pages} free of {self._table.total_pages}",
            )

    # --- inside

    def _check_idle(self, block: Block) -> None:
        if block.tenant is None:
            raise PageFreed(f"{block} is free already")
        if block.preparing is not None or (block.holds and block.is_pinned):
            raise Conflict(f"{block} is pinned {block.pins} times or being filled; unpin it first")

    def _release(self, block: Block, *, evicted: bool = False) -> None:
        if self._freed is not None:
            self._freed(block, evicted)
        for hold in block.holds:
            hold.holder.drop(block)
        block.tenant = None
        self._table.put_back(block)
        if len(self._ageing.notes) > _NOTES:
            self._ageing.file()

    def _evict(self, block: Block) -> None:
        self.evicted_pages += block.pages
        self._release(block, evicted=True)

    def _end_preparing(self, block: Block) -> None:
        if block.tenant is None:
            raise PageFreed(f"{block} was rolled back already")
        if block.preparing is None:
            raise Conflict(f"{block} is committed already")
        block.preparing.preparing.discard(block)
        block.preparing = None

    def _evict_to(self, free_pages: int, *, needed_pages: int = 0) -> list[Block]:
        """Evict until so many pages are free; dirty blocks go for the needed ones alone."""
        evicted: list[Block] = []
        free = self._table.free_pages
        while free < free_pages:
            block = self.least_worth()
            if block is None and free < needed_pages:
                block = self._worth.least_dirty()
            if block is None:
                break
            self._evict(block)
            free += block.pages
            evicted.append(block)
        return evicted

    def _evict_window(self, pages: int) -> None:
        """Make a range of `pages` free. Raises OutOfPages, and then evicts nothing."""
        window = self._worth.cheapest_window(pages)
        if window is None:
            raise self._out_of_pages(pages)
        for block in window.blocks:
            self._evict(block)

    def _out_of_pages(self, pages: int) -> OutOfPages:
        stats = self.stats()
        return OutOfPages(
            f"{pages} pages cannot be had: of {stats.total_pages}, {stats.pinned_pages} "
            f"are pinned, {stats.dirty_pages} dirty, {stats.free_pages} free "
            f"({stats.largest_free} in a row)"
        )
