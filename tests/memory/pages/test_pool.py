"""The pool of pages: what an allocation gets, what eviction takes, what pins keep."""

from __future__ import annotations

import random

import pytest

from kakeya.core.errors import (
    Conflict,
    InvalidArgument,
    InvariantBroken,
    OutOfPages,
    PageFreed,
)
from kakeya.memory.pages.content import ContentPriority, ContentType, Fit, PageConfig
from kakeya.memory.pages.pins import Block
from kakeya.memory.pages.pool import PageOwner, PagePool


def pool_of(slabs: int = 1, slab_pages: int = 16, **config: float | str) -> PagePool:
    made = PagePool(PageConfig(slab_pages=slab_pages, total_pages=16 * slab_pages, **config))
    made.at(100.0)
    for _ in range(slabs):
        made.grow()
    return made


def kv(pool: PagePool) -> PageOwner:
    return pool.tenant(ContentType.KV_CACHE, "prefixes")


def temp(pool: PagePool) -> PageOwner:
    return pool.tenant(ContentType.TEMP_BUFFER, "kernels")


def fill(pool: PagePool, tenant: PageOwner) -> list[Block]:
    """One-page blocks until nothing is free, a second apart, by address."""
    blocks = []
    while pool.free_pages:
        pool.at(pool.now.s + 1)
        blocks.append(tenant.page())
    return sorted(blocks, key=lambda block: block.first)


def test_pages_of_a_range_are_in_a_row_and_in_one_slab() -> None:
    pool = pool_of(slabs=2, slab_pages=8)
    first, second = kv(pool).range(6), kv(pool).range(6)
    assert {first.first // 8, second.first // 8} == {0, 1}
    with pytest.raises(InvalidArgument, match=r"9 pages is asked; a slab allows 1\.\.8"):
        kv(pool).range(9)
    with pytest.raises(InvalidArgument):
        kv(pool).range(0)


def test_the_second_free_is_refused_also_when_the_page_is_used_again() -> None:
    pool = pool_of()
    block = kv(pool).page()
    pool.free(block)
    with pytest.raises(PageFreed, match="free already"):
        pool.free(block)
    again = kv(pool).page()
    assert again.first == block.first
    with pytest.raises(PageFreed):
        pool.free(block)
    assert again.is_live
    assert again.stamp != block.stamp


def test_a_pinned_block_is_not_freed_and_not_evicted() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    block = kv(pool).page()
    with engine.hold(block):
        with pytest.raises(Conflict, match="pinned 1 times"):
            pool.free(block)
        assert pool.evict_until_free(16).short_pages == 1
        assert block.is_live
    assert pool.evict_until_free(16).blocks == (block,)
    assert not block.is_live


def test_a_pin_of_freed_pages_is_refused() -> None:
    """S2.12."""
    pool = pool_of()
    engine = pool.holder("engine")
    block = kv(pool).page()
    hold = engine.hold(block)
    pool.free(block)
    with pytest.raises(PageFreed, match=r"engine holds .* no longer"):
        hold.pin()
    with pytest.raises(PageFreed, match=r"engine holds .* no longer"):
        hold.unpin()
    with pytest.raises(PageFreed), hold:
        raise AssertionError("it was entered")
    assert (hold.pins, block.pins) == (0, 0)
    with pytest.raises(PageFreed):
        engine.hold(block)


def test_a_pin_whose_holder_ends_meanwhile_ends_in_peace() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    block = kv(pool).page()
    with engine.hold(block):
        assert pool.close(engine).pins == 1
    assert not block.is_pinned


def test_more_unpins_than_pins_are_refused_and_change_nothing() -> None:
    pool = pool_of()
    one, other = pool.holder("one"), pool.holder("other")
    block = kv(pool).page()
    one.hold(block).pin()
    with pytest.raises(InvariantBroken, match="other has no pin"):
        other.hold(block).unpin()
    assert block.pins == 1
    assert block.is_pinned


def test_the_end_of_a_holder_takes_back_exactly_its_pins() -> None:
    pool = pool_of()
    one, other = pool.holder("one"), pool.holder("other")
    blocks = [kv(pool).page() for _ in range(4)]
    for block in blocks[:3]:
        one.hold(block).pin()
        one.hold(block).pin()
    for block in blocks[1:]:
        other.hold(block).pin()
    mine = one.hold(blocks[0])
    closed = pool.close(one)
    assert (closed.pins, closed.rolled_back) == (6, 0)
    assert [block.pins for block in blocks] == [0, 1, 1, 1]
    with pytest.raises(PageFreed):
        mine.pin()
    with pytest.raises(PageFreed, match="has ended"):
        one.hold(blocks[1])
    assert pool.close(one).pins == 0


def test_a_block_whose_holder_died_counts_as_used_until_then() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    first = kv(pool).page()
    engine.hold(first).pin()
    pool.at(pool.now.s + 10)
    second = kv(pool).page()
    pool.at(pool.now.s + 10)
    pool.close(engine)
    assert [pool.evict_one(), pool.evict_one()] == [second, first]


def test_a_scope_whose_holder_died_ends_quietly() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    with engine.hold(kv(pool).page()):
        pool.close(engine)
    assert pool.stats().pinned_pages == 0


def test_a_prepared_block_is_nobodys_until_commit() -> None:
    pool = pool_of()
    engine, other = pool.holder("engine"), pool.holder("other")
    block = pool.prepare(kv(pool), 3, engine)
    with pytest.raises(PageFreed, match="not committed"):
        other.hold(block)
    with pytest.raises(Conflict):
        pool.free(block)
    assert pool.evict_until_free(16).blocks == ()
    pool.commit(block)
    with pytest.raises(Conflict, match="committed already"):
        pool.rollback(block)
    other.hold(block).pin()


def test_what_took_long_to_fill_is_as_young_as_its_commit() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    slow = pool.prepare(kv(pool), 1, engine)
    pool.at(pool.now.s + 10)
    quick = kv(pool).page()
    pool.at(pool.now.s + 10)
    pool.commit(slow)
    assert [pool.evict_one(), pool.evict_one()] == [quick, slow]


def test_rollback_leaves_no_trace() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    kv(pool).page()
    pool.merge()
    before = pool.stats()
    block = pool.prepare(kv(pool), 5, engine)
    pool.rollback(block)
    assert pool.stats() == before
    assert engine.preparing == set()
    with pytest.raises(PageFreed):
        pool.commit(block)


def test_the_end_of_a_holder_rolls_back_what_it_was_filling() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    block = pool.prepare(kv(pool), 5, engine)
    assert pool.close(engine).rolled_back == 1
    assert not block.is_live
    assert pool.free_pages == 16
    with pytest.raises(PageFreed):
        pool.prepare(kv(pool), 1, engine)


def test_eviction_for_a_range_makes_its_pages_contiguous() -> None:
    """The document's loop frees a count; here every other page is pinned but for one stretch."""
    pool = pool_of(headroom=0.0)
    engine = pool.holder("engine")
    blocks = fill(pool, kv(pool))
    for block in blocks[:8:2]:
        engine.hold(block).pin()
    found = kv(pool).range(6)
    assert found.first >= 7
    assert all(block.is_live for block in blocks[:7])


def test_a_range_that_cannot_be_had_evicts_nothing_and_ends() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    blocks = fill(pool, kv(pool))
    for block in blocks[::2]:
        engine.hold(block).pin()
    with pytest.raises(OutOfPages, match=r"2 pages cannot be had: of 16, 8 are pinned, 0 dirty"):
        kv(pool).range(2)
    assert all(block.is_live for block in blocks)
    for block in blocks[1::2]:
        engine.hold(block).pin()
    with pytest.raises(OutOfPages):
        kv(pool).page()


def test_a_pinned_block_that_eviction_passed_by_is_evicted_later() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    blocks = fill(pool, kv(pool))
    hold = engine.hold(blocks[0])
    hold.pin()
    pool.evict_until_free(10)
    hold.unpin()
    pool.at(pool.now.s + 60)
    pool.evict_until_free(14)
    assert not blocks[0].is_live


def test_of_blocks_of_one_moment_the_pinned_one_stays() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    first, second = kv(pool).page(), kv(pool).page()
    engine.hold(first).pin()
    assert pool.evict_one() is second
    assert pool.evict_one() is None


def test_the_block_used_longest_ago_goes_first() -> None:
    pool = pool_of()
    engine = pool.holder("engine")
    blocks = fill(pool, kv(pool))
    pool.at(pool.now.s + 1)
    with engine.hold(blocks[0]):
        pass
    pool.at(pool.now.s + 1)
    with engine.hold(blocks[1]):
        pass
    gone = pool.evict_until_free(14).blocks
    assert gone == (*blocks[2:], blocks[0], blocks[1])[: len(gone)]
    assert len(gone) == 16


def test_an_old_prefix_goes_before_a_buffer_in_use_and_a_cold_buffer_before_both() -> None:
    pool = pool_of()
    old = kv(pool).page()
    cold = temp(pool).page()
    pool.at(pool.now.s + 1000)
    fresh = temp(pool).page()
    assert [pool.evict_one() for _ in range(3)] == [cold, old, fresh]
    assert pool.evict_one() is None


def test_headroom_is_rounded_up() -> None:
    """S2.15: n times 1.1 is no number of pages."""
    pool = pool_of(slabs=2)
    blocks = fill(pool, kv(pool))
    assert len(pool.evict_until_free(11).blocks) == 13
    assert sum(block.is_live for block in blocks) == 32 - 13


def test_a_range_that_had_to_evict_leaves_headroom_for_the_next() -> None:
    pool = pool_of(slabs=2)
    fill(pool, kv(pool))
    kv(pool).range(14)
    assert pool.free_pages == 2


def test_of_two_slabs_the_range_comes_from_the_one_that_is_worth_less() -> None:
    for old in (0, 1):
        pool = pool_of(slabs=2, headroom=0.0)
        blocks = fill(pool, kv(pool))
        pool.at(pool.now.s + 50)
        for block in blocks[16 * (1 - old) :][:16]:
            block.used_s = pool.now.s
        assert kv(pool).range(16).first == 16 * old


def test_time_that_seems_to_go_back_stands_still() -> None:
    pool = pool_of()
    pool.at(50.0)
    assert pool.now.s == 100.0


def test_a_block_counts_as_used_until_its_unpin() -> None:
    pool = pool_of()
    hold = pool.holder("engine").hold(kv(pool).page())
    hold.pin()
    pool.at(pool.now.s + 10)
    other = kv(pool).page()
    pool.at(pool.now.s + 10)
    hold.unpin()
    assert [pool.evict_one(), pool.evict_one()] == [other, hold.block]


def test_freed_pages_at_hand_never_stand_in_the_way_of_a_range() -> None:
    """A cache of single pages is not contiguous, so it serves single pages alone."""
    pool = pool_of()
    for block in fill(pool, kv(pool)):
        pool.free(block)
    assert kv(pool).range(16).pages == 16


def test_an_adapter_that_cools_goes_earlier() -> None:
    pool = pool_of()
    warm = pool.tenant(ContentType.LORA_WEIGHT, "adapters")
    cold = pool.tenant(ContentType.LORA_WEIGHT, "adapters", ContentPriority.LORA_COLD)
    first, second = warm.page(), warm.page()
    pool.at(pool.now.s + 60)
    second.used_s = pool.now.s
    first.used_s = pool.now.s
    pool.move(second, cold)
    assert pool.evict_one() is second
    pool.free(first)
    with pytest.raises(PageFreed):
        pool.move(first, cold)


def test_a_block_that_became_worth_more_stays_longer() -> None:
    pool = pool_of()
    risen = temp(pool).page()
    other = pool.tenant(ContentType.ACTIVATION, "layers").page()
    pool.at(pool.now.s + 1)
    pool.move(risen, kv(pool))
    assert [pool.evict_one(), pool.evict_one()] == [other, risen]


def test_a_dirty_block_is_evicted_after_every_clean_one() -> None:
    pool = pool_of()
    blocks = fill(pool, kv(pool))
    for block in blocks[:2]:
        pool.mark_dirty(block)
    pool.at(pool.now.s + 60)
    assert pool.least_worth() is blocks[2]
    assert pool.evict_until_free(15).blocks == (*blocks[2:], blocks[0])


def test_no_dirty_block_goes_for_the_headroom() -> None:
    pool = pool_of(headroom=0.5)
    blocks = fill(pool, kv(pool))
    for block in blocks:
        pool.mark_dirty(block)
    assert len(pool.evict_until_free(4).blocks) == 4
    pool.mark_clean(blocks[10])
    kv(pool).range(6)
    assert not blocks[10].is_live
    assert sum(block.is_live for block in blocks) == 9, "two for the range, one for the headroom"


def test_a_range_takes_many_clean_blocks_before_one_dirty_one() -> None:
    pool = pool_of(headroom=0.0)
    blocks = fill(pool, kv(pool))
    pool.mark_dirty(blocks[3])
    pool.at(pool.now.s + 60)
    for block in blocks[4:]:
        block.used_s = pool.now.s
    kv(pool).range(12)
    assert [block for block in blocks if block.is_live] == blocks[:4]


def test_a_block_that_became_clean_may_go_by_its_age() -> None:
    pool = pool_of()
    blocks = fill(pool, kv(pool))
    pool.mark_dirty(blocks[0])
    assert pool.least_worth() is blocks[1]
    pool.mark_clean(blocks[0])
    assert pool.least_worth() is blocks[0]


def test_only_pins_without_an_owner_end_by_themselves() -> None:
    """R4: what has an owner is reported, never yanked."""
    pool = pool_of()
    engine = pool.holder("engine")
    orphan, leaked, renewed, adapter = [kv(pool).page() for _ in range(3)] + [
        pool.tenant(ContentType.LORA_WEIGHT, "adapters").page()
    ]
    pool.ownerless.hold(orphan).pin()
    pool.holder("idle").hold(renewed)
    for block in (leaked, renewed, adapter):
        engine.hold(block).pin()
    pool.at(pool.now.s + 20)
    engine.hold(renewed).renew()
    assert pool.end_overdue() == 0
    pool.at(pool.now.s + 11)
    assert pool.end_overdue() == 1
    assert not orphan.is_pinned
    assert [hold.block for hold in pool.overdue()] == [leaked]
    assert leaked.is_pinned
    with pytest.raises(InvalidArgument):
        pool.close(pool.ownerless)


def test_a_slab_comes_and_goes_whole() -> None:
    pool = pool_of(slabs=2)
    engine = pool.holder("engine")
    blocks = fill(pool, kv(pool))
    pinned = blocks[3]
    engine.hold(pinned).pin()
    plan = pool.plan_shrink(2)
    assert (plan.slabs, plan.short) == ((1,), 1)
    assert set(plan.blocks) == set(blocks[16:])
    with pytest.raises(Conflict, match="slab 0 cannot go"):
        pool.remove(0)
    pool.remove(1)
    assert pool.slabs() == (0,)
    assert pool.stats().total_pages == 16
    with pytest.raises(InvalidArgument, match="no slab 1"):
        pool.remove(1)
    assert pool.grow() == 1
    assert pool.free_pages == 16
    assert all(kv(pool).page().stamp > blocks[-1].stamp for _ in range(16))


def test_the_slab_that_is_worth_least_goes_first() -> None:
    pool = pool_of(slabs=3)
    blocks = fill(pool, kv(pool))
    pool.at(pool.now.s + 50)
    for block in blocks[:32]:
        block.used_s = pool.now.s
    assert pool.plan_shrink(1).slabs == (2,)


def test_growth_ends_at_the_configured_total() -> None:
    pool = PagePool(PageConfig(slab_pages=16, total_pages=40))
    pool.grow()
    pool.grow()
    with pytest.raises(OutOfPages, match="32 pages and one more slab of 16"):
        pool.grow()


def test_a_block_is_found_by_page_and_stamp_alone() -> None:
    pool = pool_of()
    block = kv(pool).range(4)
    assert pool.find(block.first, block.stamp) is block
    for first, stamp in ((block.first, block.stamp + 1), (block.first + 1, block.stamp), (99, 1)):
        with pytest.raises(PageFreed):
            pool.find(first, stamp)
    pool.free(block)
    waiting = pool._table._range[block.first]  # at hand for the next, and nobody's
    for stamp in (block.stamp, waiting.stamp):
        with pytest.raises(PageFreed):
            pool.find(block.first, stamp)


@pytest.mark.parametrize("fit", Fit)
def test_fragmentation_counts_the_longest_run_also_of_what_lies_at_hand(fit: Fit) -> None:
    pool = pool_of(fit=fit)
    blocks = fill(pool, kv(pool))
    assert pool.stats().contiguity == 1.0
    for block in blocks[::4]:
        pool.free(block)
    assert pool.stats().contiguity == 0.25
    for block in blocks[1:4]:
        pool.free(block)
    assert pool.stats().largest_free == 5


def test_mixed_sizes_leave_little_unusable_under_best_fit() -> None:
    """S2.31: a fragmentation ratio above 0.8, and more than 95 % of the pages in use."""
    pool = pool_of(slabs=8, slab_pages=64)
    rng = random.Random(5)
    tenants = [pool.tenant(content, "mixed") for content in ContentType]
    shares = []
    for step in range(1500):
        pool.at(pool.now.s + 0.01)
        rng.choice(tenants).range(rng.choice((1, 1, 1, 2, 4, 8, 16)))
        if step > 1000 and step % 5 == 0:
            shares.append(pool.stats().utilisation)
    assert sum(shares) / len(shares) > 0.95


def test_notes_of_allocations_do_not_pile_up_without_decisions() -> None:
    pool = pool_of()
    tenant = kv(pool)
    for _ in range(20_000):
        pool.free(tenant.page())
    assert len(pool._ageing.notes) <= 5_000


def test_what_was_moved_and_freed_does_not_pile_up_without_evictions() -> None:
    pool = pool_of()
    warm, cold = kv(pool), temp(pool)
    kept = warm.page()
    for step in range(500):
        passing = warm.page()
        pool.move(kept, cold if step % 2 else warm)
        pool.at(pool.now.s + 1)
        pool.free(passing)
    assert sum(map(len, pool._ageing._heaps.values())) <= 2 * 16 + 4
    assert pool.evict_one() is kept
