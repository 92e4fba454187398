"""The laws of the pool, held against any order of calls.

A plain model knows which pages each block has and who pinned what; the pool must agree with it
after every step: no two blocks overlap, no page is lost, nothing pinned goes, what fails
changes nothing, and what is gone stays gone for its old handle.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kakeya.core.errors import Conflict, InvariantBroken, OutOfPages, PageFreed
from kakeya.memory.pages.content import ContentType, Fit, PageConfig
from kakeya.memory.pages.pins import Block, PinHolder
from kakeya.memory.pages.pool import PageOwner, PagePool
from tests.laws import laws_of

SLAB = 8
# Few kinds and sizes, so that blocks compete with their like.
WHO = st.sampled_from((0, 0, 0, 1, 2, 3, 4))
SIZES = st.sampled_from((1, 1, 1, 2, 2, 3, 5, SLAB))


class Pool(RuleBasedStateMachine):
    blocks = Bundle("blocks")
    filling = Bundle("filling")
    holders = Bundle("holders")

    @initialize(fit=st.sampled_from(Fit), ready=st.integers(1, 4))
    def start(self, fit: Fit, ready: int) -> None:
        self.freed: list[Block] = []
        self.evicted: list[Block] = []
        self.pool = PagePool(
            PageConfig(slab_pages=SLAB, total_pages=4 * SLAB, fit=fit, ready_blocks=ready),
            freed=self.saw_freed,
        )
        self.pool.at(1.0)
        self.pool.grow()
        self.tenants = [self.pool.tenant(content, "any") for content in ContentType]
        self.live: dict[Block, int] = {}  # block -> pages
        self.preparing: dict[Block, PinHolder] = {}
        self.pins: dict[tuple[PinHolder, Block], int] = {}
        self.dirty: set[Block] = set()
        self.stamps: set[int] = set()

    def saw_freed(self, block: Block, evicted: bool) -> None:
        assert block.is_live, "told after its pages were given away"
        (self.evicted if evicted else self.freed).append(block)

    def in_use(self, block: Block) -> bool:
        return block in self.preparing or any(
            count for (_, held), count in self.pins.items() if held is block
        )

    def settle(self) -> None:
        """Take what the pool evicted out of the model, if it was allowed to go."""
        for block in self.evicted:
            assert block in self.live, "evicted what was not there"
            assert not self.in_use(block), "evicted what was in use"
            self.forget(block)
        self.evicted.clear()

    def forget(self, block: Block) -> None:
        del self.live[block]
        self.dirty.discard(block)
        self.pins = {key: n for key, n in self.pins.items() if key[1] is not block}

    def enter(self, block: Block, pages: int) -> Block:
        self.settle()
        assert block.pages == pages
        assert block.first // SLAB == (block.first + pages - 1) // SLAB
        assert block.stamp not in self.stamps, "a stamp came twice"
        self.stamps.add(block.stamp)
        self.live[block] = pages
        return block

    def possible(self, pages: int) -> bool:
        """Whether some run of pages is free of what must stay."""
        staying = {
            page
            for block, size in self.live.items()
            if self.in_use(block)
            for page in range(block.first, block.first + size)
        }
        return any(
            not staying & set(range(start, start + pages))
            for slab in self.pool.slabs()
            for start in range(slab * SLAB, (slab + 1) * SLAB - pages + 1)
        )

    def refused(self, pages: int) -> None:
        assert not self.possible(pages), "refused although a run of pages could be had"
        assert not self.evicted, "evicted for an allocation that failed"

    @rule(target=blocks, tenant=WHO, pages=SIZES)
    def allocate(self, tenant: int, pages: int) -> object:
        suffices = self.pool.stats().largest_free >= pages
        assert self.pool.has_free(pages) == suffices
        try:
            block = self.tenants[tenant].range(pages)
        except OutOfPages:
            self.refused(pages)
            return multiple()
        assert not (self.evicted and suffices), "evicted although such a range was free"
        return self.enter(block, pages)

    @rule(target=filling, holder=holders, pages=SIZES)
    def prepare(self, holder: PinHolder, pages: int) -> object:
        try:
            block = self.pool.prepare(self.tenants[0], pages, holder)
        except OutOfPages:
            self.refused(pages)
            return multiple()
        except PageFreed:
            assert not holder.is_open
            return multiple()
        self.enter(block, pages)
        self.preparing[block] = holder
        return block

    @rule(target=blocks, block=consumes(filling))
    def commit(self, block: Block) -> Block:
        if block not in self.preparing:
            with pytest.raises(PageFreed):
                self.pool.commit(block)
            return block
        self.pool.commit(block)
        del self.preparing[block]
        return block

    @rule(block=consumes(filling))
    def rollback(self, block: Block) -> None:
        if block not in self.preparing:
            with pytest.raises(PageFreed):
                self.pool.rollback(block)
            return
        self.pool.merge()
        before = self.pool.free_pages
        self.pool.rollback(block)
        assert self.freed == [block]
        self.freed.clear()
        assert self.pool.free_pages == before + self.live[block]
        del self.preparing[block]
        self.forget(block)

    @rule(block=blocks)
    def free(self, block: Block) -> None:
        if block not in self.live:
            with pytest.raises(PageFreed):
                self.pool.free(block)
        elif self.in_use(block):
            with pytest.raises(Conflict):
                self.pool.free(block)
        else:
            self.pool.free(block)
            assert self.freed == [block]
            self.freed.clear()
            self.forget(block)

    @rule(target=holders)
    def open_holder(self) -> PinHolder:
        return self.pool.holder("any")

    @rule(holder=consumes(holders))
    def close_holder(self, holder: PinHolder) -> None:
        mine = {key: n for key, n in self.pins.items() if key[0] is holder}
        filled = [block for block, by in self.preparing.items() if by is holder]
        closed = self.pool.close(holder)
        assert closed.pins == sum(mine.values())
        assert closed.rolled_back == len(filled)
        assert set(self.freed) == set(filled)
        self.freed.clear()
        for key in mine:
            del self.pins[key]
        for block in filled:
            del self.preparing[block]
            self.forget(block)

    @rule(holder=holders, block=blocks)
    def pin(self, holder: PinHolder, block: Block) -> None:
        if block not in self.live:
            with pytest.raises(PageFreed):
                holder.hold(block).pin()
            return
        holder.hold(block).pin()
        self.pins[holder, block] = self.pins.get((holder, block), 0) + 1

    @rule(holder=holders, block=blocks)
    def unpin(self, holder: PinHolder, block: Block) -> None:
        if block not in self.live:
            with pytest.raises(PageFreed):
                holder.hold(block)
        elif not self.pins.get((holder, block)):
            with pytest.raises(InvariantBroken):
                holder.hold(block).unpin()
        else:
            holder.hold(block).unpin()
            self.pins[holder, block] -= 1

    @rule(block=blocks, dirty=st.booleans())
    def mark(self, block: Block, dirty: bool) -> None:
        if block not in self.live:
            return
        if dirty:
            self.pool.mark_dirty(block)
            self.dirty.add(block)
        else:
            self.pool.mark_clean(block)
            self.dirty.discard(block)

    @rule(block=blocks, tenant=WHO)
    def move(self, block: Block, tenant: int) -> None:
        if block in self.live:
            self.pool.move(block, self.tenants[tenant])

    @rule()
    def evict_one(self) -> None:
        worth = {
            block: self.pool._worth.keep(block) + (block in self.dirty)
            for block in self.live
            if block.is_evictable
        }
        gone = self.pool.evict_one()
        assert (gone is None) == (not worth)
        if gone is not None:
            assert worth[gone] <= min(worth.values()) + 1e-12, "evicted what is worth more"
        self.settle()

    @rule(pages=st.integers(1, 2 * SLAB))
    def evict(self, pages: int) -> None:
        could = self.pool.free_pages + sum(
            size for block, size in self.live.items() if not self.in_use(block)
        )
        eviction = self.pool.evict_until_free(pages)
        assert list(eviction.blocks) == self.evicted
        self.settle()
        assert eviction.short_pages == max(0, pages - could)

    @precondition(lambda self: len(self.pool.slabs()) < 4)
    @rule()
    def grow(self) -> None:
        free = self.pool.free_pages
        self.pool.grow()
        assert self.pool.free_pages == free + SLAB

    @rule(slabs=st.integers(1, 3))
    def shrink(self, slabs: int) -> None:
        plan = self.pool.plan_shrink(slabs)
        assert len(plan.slabs) + plan.short == slabs
        for slab in plan.slabs:
            self.pool.remove(slab)
        assert set(self.evicted) == set(plan.blocks)
        self.settle()

    @rule(seconds=st.sampled_from((0.0, 0.5, 3.0, 100.0)))
    def wait(self, seconds: float) -> None:
        self.pool.at(self.pool.now.s + seconds)

    @rule()
    def merge(self) -> None:
        self.pool.merge()

    @invariant()
    def agrees_with_the_model(self) -> None:
        taken: set[int] = set()
        for block in self.pool.blocks():
            pages = set(range(block.first, block.first + block.pages))
            taken |= pages
            assert block in self.live
            assert block.is_pinned == self.in_use(block)
            assert block.is_evictable == (not self.in_use(block))
            assert block.pins == sum(n for (_, b), n in self.pins.items() if b is block)
        self.pool.check_integrity()
        stats = self.pool.stats()
        assert len(taken) == sum(self.live.values())
        assert stats.free_pages == self.pool.free_pages
        assert sum(count for _, count in stats.by_content) == len(taken)
        assert 0.0 <= stats.contiguity <= 1.0
        assert not self.freed
        assert not self.evicted


TestPool = laws_of(Pool, cases=150, part=3)


def test_the_machine_notices_a_pool_that_evicts_what_is_pinned() -> None:
    """A control: without the look at pins the laws above must fail."""
    machine = Pool()
    machine.start(Fit.BEST, 1)
    holder = machine.open_holder()
    block = machine.allocate(0, 1)
    assert isinstance(block, Block)
    machine.pin(holder, block)
    machine.pool._evict(block)
    with pytest.raises(AssertionError, match="in use"):
        machine.settle()


def test_a_tenant_of_another_pool_allocates_there() -> None:
    one, other = PagePool(PageConfig(slab_pages=2)), PagePool(PageConfig(slab_pages=2))
    one.grow()
    other.grow()
    PageOwner(
        one, ContentType.KV_CACHE, "any", one.tenant(ContentType.KV_CACHE, "x").priority
    ).page()
    assert (one.free_pages, other.free_pages) == (1, 2)
