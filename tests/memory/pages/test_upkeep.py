"""The background work of an arena: eviction ahead of need, and overdue pins."""

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.pins import Block
from kakeya.memory.pages.shared_arena import PageArena
from kakeya.memory.pages.upkeep import SWEEP_S, ArenaUpkeep
from tests.fakes import FakeClock

PAGES = 20


class Kept:
    """An arena of one full slab, with its upkeep."""

    def __init__(self, folder: Path) -> None:
        config = PageConfig(page_bytes=512 * 1024, slab_pages=PAGES, total_pages=PAGES)
        self.clock = FakeClock()
        self.arena = PageArena(config, folder=folder, rng=random.Random(1))
        self.is_limited = True
        self.rounds = 0
        self.upkeep = ArenaUpkeep(
            self.arena, is_limited=lambda: self.is_limited, freed=self.freed, clock=self.clock
        )
        self.arena.at(self.clock.mono())
        self.arena.grow()
        self.kv = self.arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        self.agent = self.arena.pool.holder("agent")

    def freed(self) -> None:
        self.rounds += 1

    def lay(self, pages: int) -> list[Block]:
        laid = []
        for _ in range(pages):
            with self.arena.prepare(self.kv, 1, self.agent) as filling:
                filling.commit()
            laid.append(filling.block)
        self.upkeep.allocated()
        return laid

    @property
    def used(self) -> int:
        return self.arena.pool.used_pages


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    with made.arena:
        yield made


async def test_from_the_high_watermark_on_blocks_go_down_to_the_low_one(kept: Kept) -> None:
    blocks = kept.lay(18)
    shares = []
    while share := kept.upkeep.evict():
        shares.append(share)
    assert shares == [1, 1]
    assert [block for block in blocks if not block.is_live] == blocks[:2]
    assert kept.arena.pool.stats().evicted_ahead_pages == 2
    kept.lay(1)
    assert kept.upkeep.evict() == 0, "nothing goes below 90 %"


async def test_a_full_arena_takes_the_whole_excess_in_one_round(kept: Kept) -> None:
    kept.lay(PAGES)
    assert kept.upkeep.evict() == 4


async def test_an_arena_that_may_grow_keeps_everything(kept: Kept) -> None:
    kept.is_limited = False
    kept.lay(PAGES)
    assert kept.upkeep.evict() == 0
    assert kept.used == PAGES


async def test_what_is_pinned_or_waits_for_the_disk_stays(kept: Kept) -> None:
    blocks = kept.lay(PAGES)
    for block in blocks[:10]:
        kept.agent.hold(block).pin()
    for block in blocks[10:19]:
        kept.arena.pool.mark_dirty(block)
    assert kept.upkeep.evict() == 1
    assert not blocks[19].is_live
    assert kept.upkeep.evict() == 0
    kept.arena.pool.mark_clean(blocks[10])
    assert kept.upkeep.evict() == 1


async def test_an_owner_chooses_which_of_its_blocks_goes(kept: Kept) -> None:
    blocks = kept.lay(PAGES)
    asked = []

    def youngest(most_bytes: int) -> int:
        asked.append(most_bytes // kept.arena.config.page_bytes)
        kept.arena.pool.free(blocks.pop())
        return kept.arena.config.page_bytes

    kept.upkeep.makes_way[kept.kv] = youngest
    assert kept.upkeep.evict() == 4
    assert asked == [4, 3, 2, 1]
    assert all(block.is_live for block in blocks)


async def test_no_block_goes_that_is_larger_than_the_excess(kept: Kept) -> None:
    with kept.arena.prepare(kept.kv, 10 * kept.arena.config.page_bytes, kept.agent) as filling:
        filling.commit()
    kept.clock.advance(60)
    kept.arena.at(kept.clock.mono())
    kept.lay(10)
    assert kept.upkeep.evict() == 0
    assert filling.block.is_live


async def test_an_allocation_wakes_it_and_it_rests_when_enough_is_free(kept: Kept) -> None:
    tending = asyncio.ensure_future(kept.upkeep.tend())
    await asyncio.sleep(0)
    kept.lay(19)
    await kept.clock.sleep(1.0)
    assert kept.used == 16
    kept.lay(1)
    await kept.clock.sleep(1.0)
    assert kept.used == 17
    assert kept.rounds == 1
    tending.cancel()


async def test_a_sweep_reports_a_pin_that_outlived_its_scope_once(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    (leaked,) = kept.lay(1)
    kept.agent.hold(leaked).pin()
    tending = asyncio.ensure_future(kept.upkeep.tend())
    with caplog.at_level(logging.WARNING):
        await kept.clock.sleep(6 * SWEEP_S)
    tending.cancel()
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "a pin outlived its scope" in line]) == 1
    assert kept.arena.snapshot().overdue_pins == 1
