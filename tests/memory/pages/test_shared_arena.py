"""The arena: blocks in shared memory, and references that never show half of one."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kakeya.core.errors import Conflict, InvalidArgument, OutOfPages, PageFreed
from kakeya.core.units import KIB
from kakeya.generation.kv import PageRef
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.pins import Block, PinHolder
from kakeya.memory.pages.pool import PageOwner
from kakeya.memory.pages.reader import PageReader
from kakeya.memory.pages.shared_arena import PageArena, layout

PAGE = 512 * KIB
CONFIG = PageConfig(page_bytes=PAGE, slab_pages=4, total_pages=12)


class Rig:
    """An arena of one slab, a reader that shares nothing with it but memory, and two holders."""

    def __init__(self, folder: Path, timer: Callable[[], float]) -> None:
        self.evicted: list[Block] = []
        self.arena = PageArena(
            CONFIG,
            folder=folder,
            rng=random.Random(str(folder)),
            evicted=self.evicted.append,
            timer=timer,
        )
        self.arena.at(10.0)
        self.arena.grow()
        self.reader = PageReader()
        self.kv: PageOwner = self.arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        self.agent: PinHolder = self.arena.pool.holder("agent")
        self.engine: PinHolder = self.arena.pool.holder("engine")

    def put(self, content: bytes) -> PageRef:
        with self.arena.prepare(self.kv, len(content), self.agent) as filling:
            filling.view[:] = content
            filling.commit()
            return filling.ref


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    ticks = iter(range(1_000_000))
    made = Rig(tmp_path, lambda: next(ticks) * 4e-7)
    with made.arena, made.reader:
        yield made


def test_what_was_committed_is_read_elsewhere(rig: Rig) -> None:
    ref = rig.put(b"x" * PAGE + b"tail")
    assert (ref.pages, ref.length) == (2, PAGE + 4)
    assert rig.reader.read(ref) == b"x" * PAGE + b"tail"
    assert bytes(rig.reader.view(ref)[-4:]) == b"tail"
    assert rig.reader.view(ref).readonly


def test_nothing_of_a_block_is_seen_before_commit(rig: Rig) -> None:
    filling = rig.arena.prepare(rig.kv, 8, rig.engine)
    with pytest.raises(PageFreed, match="has stamp 0"):
        rig.reader.view(filling.ref)
    with pytest.raises(PageFreed):
        rig.arena.hold(filling.ref, rig.agent)
    with rig.reader.fill(filling.ref) as view:  # as an engine does
        view[:] = b"computed"
    filling.commit()
    ref = filling.ref
    assert rig.reader.read(ref) == b"computed"
    with pytest.raises(Conflict, match="is committed"):
        rig.reader.fill(ref)


def test_leaving_without_commit_rolls_back(rig: Rig) -> None:
    with pytest.raises(ZeroDivisionError), rig.arena.prepare(rig.kv, 8, rig.agent) as filling:
        filling.view[0] = 1 // 0
    filling.rollback()
    assert rig.arena.snapshot().pool.free_pages == 4
    with pytest.raises(PageFreed):
        rig.reader.view(filling.ref)


def test_an_old_reference_never_shows_what_came_later(rig: Rig) -> None:
    old = rig.put(b"first")
    rig.arena.pool.free(rig.arena.hold(old, rig.agent).block)
    with pytest.raises(PageFreed):
        rig.reader.read(old)
    new = rig.put(b"other")
    assert (new.first, new.slab) == (old.first, old.slab)
    for use in (rig.reader.read, rig.reader.view):
        with pytest.raises(PageFreed):
            use(old)
    with pytest.raises(PageFreed):
        rig.arena.hold(old, rig.agent)
    assert rig.reader.read(new) == b"other"
    snapshot = rig.arena.snapshot()
    assert (snapshot.holds_asked, snapshot.holds_stale) == (2, 1)


def test_a_copy_that_was_overtaken_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block goes between the two looks at its stamp."""
    ref = rig.put(b"first")
    block = rig.arena.hold(ref, rig.agent).block
    slab = rig.reader._slab(ref, writable=False)
    looks = iter((lambda: None, lambda: rig.arena.pool.free(block)))

    class Overtaken:
        def stamp(self, first: int) -> int:
            next(looks)()
            return slab.stamp(first)

        def bytes_of(self, first: int, length: int) -> memoryview:
            return slab.bytes_of(first, length)

    monkeypatch.setitem(rig.reader._read, ref.slab, Overtaken())
    with pytest.raises(PageFreed):
        rig.reader.read(ref)
    monkeypatch.undo()


def test_eviction_hides_a_block_and_tells_its_tenant(rig: Rig) -> None:
    refs = [rig.put(bytes([i])) for i in range(4)]
    held = rig.arena.hold(refs[0], rig.engine)
    held.pin()
    rig.put(b"new")
    gone = {block.stamp for block in rig.evicted}
    assert len(gone) == 2
    assert refs[0].stamp not in gone
    for ref in refs:
        if ref.stamp in gone:
            with pytest.raises(PageFreed):
                rig.reader.view(ref)
        else:
            assert rig.reader.read(ref) == bytes([refs.index(ref)])


def test_the_end_of_an_engine_takes_its_pins_and_what_it_was_filling(rig: Rig) -> None:
    ref = rig.put(b"kept")
    rig.arena.hold(ref, rig.engine).pin()
    rig.arena.hold(ref, rig.agent).pin()
    filling = rig.arena.prepare(rig.kv, 8, rig.engine)
    assert rig.arena.close_holder(rig.engine) == 1
    assert rig.arena.hold(ref, rig.agent).block.pins == 1
    with pytest.raises(PageFreed):
        filling.commit()
    assert rig.arena.snapshot().rolled_back == 1
    assert rig.arena.snapshot().pool.free_pages == 3


def test_a_slab_that_went_is_gone_for_readers_too(rig: Rig) -> None:
    ref = rig.put(b"kept")
    rig.reader.view(ref).release()
    assert rig.arena.shrink().slabs == (0,)
    with pytest.raises(PageFreed):
        rig.reader.view(ref)
    with pytest.raises(PageFreed, match="is not one of this arena"):
        rig.arena.hold(ref, rig.agent)
    rig.reader.forget(ref.slab)
    with pytest.raises(PageFreed, match="is gone"):
        rig.reader.view(ref)
    assert rig.arena.snapshot().slab_bytes == 0
    rig.arena.grow(2)
    assert rig.arena.snapshot().slab_bytes == 2 * rig.arena.slab_bytes
    assert rig.reader.read(rig.put(b"again")) == b"again"


def test_growth_beyond_the_total_is_refused_and_changes_nothing(rig: Rig) -> None:
    rig.arena.grow(2)
    before = rig.arena.snapshot()
    with pytest.raises(OutOfPages):
        rig.arena.grow()
    assert rig.arena.snapshot() == before


async def test_slabs_come_and_go_while_the_loop_runs(rig: Rig) -> None:
    await rig.arena.grow_async(2)
    ref = rig.put(b"kept")
    rig.arena.hold(ref, rig.engine).pin()
    with pytest.raises(OutOfPages):
        await rig.arena.grow_async()
    plan = await rig.arena.shrink_async(3)
    assert (len(plan.slabs), plan.short) == (2, 1)
    assert rig.arena.snapshot().slab_bytes == rig.arena.slab_bytes
    assert rig.reader.read(ref) == b"kept"


async def test_two_growths_at_once_do_not_pass_the_total(rig: Rig) -> None:
    results = await asyncio.gather(
        *(rig.arena.grow_async() for _ in range(4)), return_exceptions=True
    )
    assert sum(isinstance(result, OutOfPages) for result in results) == 2
    assert rig.arena.snapshot().pool.slabs == 3
    assert len(rig.arena._store._slabs) == 3


async def test_a_growth_that_is_cancelled_leaves_no_slab_behind(rig: Rig) -> None:
    growing = asyncio.create_task(rig.arena.grow_async())
    await asyncio.sleep(0)
    growing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await growing
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    assert len(rig.arena._store._slabs) == 1
    assert rig.arena.snapshot().pool.slabs == 1


def test_a_length_that_no_slab_holds_is_refused(rig: Rig) -> None:
    for length in (0, 4 * PAGE + 1):
        with pytest.raises(InvalidArgument, match="a block has 1"):
            rig.arena.prepare(rig.kv, length, rig.agent)


def test_a_freed_block_has_neither_view_nor_reference(rig: Rig) -> None:
    block = rig.arena.hold(rig.put(b"kept"), rig.agent).block
    assert bytes(rig.arena.view(block, 4)) == b"kept"
    assert rig.arena.ref(block).length == PAGE
    rig.arena.pool.free(block)
    for use in (rig.arena.view, rig.arena.ref):
        with pytest.raises(PageFreed):
            use(block)


def test_pins_without_an_owner_end_as_time_goes_on(rig: Rig) -> None:
    rig.arena.hold(rig.put(b"kept"), rig.arena.pool.ownerless).pin()
    assert rig.arena.at(39.0) == 0
    assert rig.arena.at(41.0) == 1


def test_the_latency_of_allocations_is_counted_in_its_bounds(rig: Rig) -> None:
    for _ in range(3):
        rig.put(b"x")
    snapshot = rig.arena.snapshot()
    assert snapshot.latency.counts == [0, 3, 0, 0, 0, 0]
    assert snapshot.latency.sum_s == pytest.approx(2.4e-6)


def test_a_reference_is_a_plain_value_that_travels(rig: Rig) -> None:
    ref = rig.put(b"kept")
    fields = dataclasses.asdict(ref)
    assert all(isinstance(value, (str, int)) for value in fields.values())
    assert rig.reader.read(PageRef(**fields)) == b"kept"


def test_arrays_in_one_block_are_aligned_and_do_not_overlap() -> None:
    offsets, total = layout((100, 256, 1, 300), 256)
    assert offsets == (0, 256, 512, 768)
    assert total == 1280
    assert layout((), 256) == ((), 0)
