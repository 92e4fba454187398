"""Waiting for pages: in order, for a while, and with nothing lost when somebody leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.core.errors import InvalidArgument, OutOfPages, PageFreed
from kakeya.core.units import KIB
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.pins import PinHolder
from kakeya.memory.pages.pool import PageOwner
from kakeya.memory.pages.queue import PageQueue
from kakeya.memory.pages.shared_arena import Filling, PageArena

PAGE = 512 * KIB
LONG_S = 20.0


class Rig:
    """A full arena of four pages, each in preparation, and a line in front of it."""

    def __init__(self, folder: Path) -> None:
        self.arena = PageArena(
            PageConfig(page_bytes=PAGE, slab_pages=4, total_pages=4),
            folder=folder,
            rng=random.Random(str(folder)),
        )
        self.arena.at(1.0)
        self.arena.grow()
        self.queue = PageQueue(self.arena)
        self.kv = self.arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        self.agent = self.arena.pool.holder("agent")
        self.engine = self.arena.pool.holder("engine")
        self.taken = [self.arena.prepare(self.kv, 1, self.agent) for _ in range(4)]
        self.served: list[str] = []

    async def wait(self, name: str, pages: int, wait_s: float = LONG_S) -> Filling:
        filling = await self.queue.prepare(self.kv, pages * PAGE, self.engine, wait_s=wait_s)
        self.served.append(name)
        return filling

    async def begin(self, **pages: int) -> list[asyncio.Task[Filling]]:
        """Start waiters in order; they stand in line when this returns."""
        tasks = []
        for name, count in pages.items():
            tasks.append(asyncio.create_task(self.wait(name, count)))
            await asyncio.sleep(0)
        return tasks

    def give(self, *which: int) -> None:
        for number in which:
            self.taken[number].rollback()
        self.queue.serve()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    with made.arena:
        yield made


async def test_who_comes_first_is_served_first_also_when_he_wants_more(rig: Rig) -> None:
    many, one = await rig.begin(many=3, one=1)
    rig.give(0)
    await asyncio.sleep(0)
    assert rig.served == []
    rig.give(1, 2)
    assert (await many).block.pages == 3
    assert len(rig.queue) == 1
    rig.give(3)
    await one
    assert rig.served == ["many", "one"]


async def test_an_unpin_is_seen_at_the_next_look(rig: Rig) -> None:
    for filling in rig.taken:
        filling.commit()
    holds = [rig.agent.hold(filling.block) for filling in rig.taken]
    for hold in holds:
        hold.pin()
    (one,) = await rig.begin(one=1)
    rig.queue.serve()
    assert len(rig.queue) == 1
    holds[0].unpin()
    rig.queue.serve()
    await one
    assert not rig.taken[0].block.is_live


async def test_who_stands_first_sees_an_unpin_that_nobody_tells_of(rig: Rig) -> None:
    for filling in rig.taken:
        filling.commit()
    holds = [rig.agent.hold(filling.block) for filling in rig.taken]
    for hold in holds:
        hold.pin()
    first, second = await rig.begin(first=1, second=1)
    holds[0].unpin()
    await first
    assert not second.done()
    holds[1].unpin()
    await second
    assert rig.served == ["first", "second"]


async def test_the_last_try_is_at_the_end_of_the_wait_also_behind_others(rig: Rig) -> None:
    rig.taken[0].commit()
    hold = rig.agent.hold(rig.taken[0].block)
    hold.pin()
    many = asyncio.create_task(rig.wait("many", 3))
    await asyncio.sleep(0)
    one = asyncio.create_task(rig.wait("one", 1, wait_s=0.001))
    await asyncio.sleep(0)
    for number in (1, 2, 3):
        rig.taken[number].rollback()
    hold.unpin()
    assert (await one).block.is_live
    assert (await many).block.pages == 3


async def test_who_is_not_served_in_time_is_refused_and_the_next_gets_a_try(rig: Rig) -> None:
    first = asyncio.create_task(rig.wait("many", 3, wait_s=0.05))
    await asyncio.sleep(0)
    (one,) = await rig.begin(one=1)
    rig.give(0)
    with pytest.raises(OutOfPages, match="3 pages cannot be had"):
        await first
    await one
    assert rig.served == ["one"]


async def test_the_configured_limit_holds_when_none_is_given(rig: Rig) -> None:
    with pytest.raises(OutOfPages):
        await rig.queue.prepare(rig.kv, 1, rig.engine)
    assert len(rig.queue) == 0


async def test_who_leaves_makes_way(rig: Rig) -> None:
    many, one = await rig.begin(many=3, one=1)
    rig.give(0)
    many.cancel()
    with pytest.raises(asyncio.CancelledError):
        await many
    await one
    assert len(rig.queue) == 0


async def test_what_was_served_to_one_who_left_in_the_same_moment_goes_to_the_next(
    rig: Rig,
) -> None:
    first, second = await rig.begin(first=1, second=1)
    rig.give(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert rig.served == ["second"]


async def test_a_holder_that_ends_ends_its_waiting_and_not_that_of_others(rig: Rig) -> None:
    (mine,) = await rig.begin(mine=1)
    other = asyncio.create_task(rig.queue.prepare(rig.kv, 1, rig.agent, wait_s=LONG_S))
    await asyncio.sleep(0)
    rig.arena.close_holder(rig.engine)
    rig.give(0)
    with pytest.raises(PageFreed, match="engine has ended"):
        await mine
    assert (await other).block.is_live


async def test_nobody_waits_for_what_can_never_be(rig: Rig) -> None:
    with pytest.raises(InvalidArgument):
        await rig.queue.prepare(rig.kv, 5 * PAGE, rig.engine, wait_s=LONG_S)
    assert len(rig.queue) == 0


async def test_many_waiters_are_all_served_in_order_and_nothing_is_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = [rig.arena.pool.holder(str(number)) for number in range(50)]
    prepare, given = rig.arena.prepare, list[PinHolder]()

    def prepare_noted(tenant: PageOwner, length: int, holder: PinHolder) -> Filling:
        filling = prepare(tenant, length, holder)
        given.append(holder)
        return filling

    async def use(holder: PinHolder) -> None:
        filling = await rig.queue.prepare(rig.kv, PAGE, holder, wait_s=LONG_S)
        await asyncio.sleep(0)
        filling.rollback()
        rig.queue.serve()

    monkeypatch.setattr(rig.arena, "prepare", prepare_noted)
    tasks = [asyncio.create_task(use(holder)) for holder in holders]
    await asyncio.sleep(0)
    rig.give(0, 1, 2, 3)
    await asyncio.gather(*tasks)
    # Of those with a page at the same time, the one that goes on first is not always the first.
    assert given == holders
    assert rig.arena.pool.free_pages == 4
