"""The agent's arena: grows by leave of the ledger, shrinks when asked, ends what the dead held."""

import asyncio
import json
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.errors import MemoryRefused, OutOfPages, PageFreed
from kakeya.core.units import KIB, MIB
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.resident import COLD, TEXT_TARGET
from kakeya.memory.pages.content import ContentType
from kakeya.memory.pages.node_arena import NAME, PAGE_BYTES, NodeArena, page_config
from kakeya.memory.pages.pins import Block
from kakeya.memory.pages.pool import PageOwner
from tests.memory.toy import Toy, capability

SLAB = 8  # pages


async def refused(_size: int, _timeout_s: float) -> None:
    raise MemoryRefused("nothing idles")


class Room:
    """What the ledger says."""

    def __init__(self) -> None:
        self.slabs = 10**6
        self.asked: list[int] = []
        self.leave: Callable[[int], bool] = lambda _: True
        self.make: Callable[[int, float], Awaitable[None]] = refused

    def may_grow(self, name: str, size: int) -> bool:
        self.asked.append(size)
        self.slabs -= 1
        return self.slabs >= 0 and self.leave(size)

    async def make_room(self, name: str, size: int, timeout_s: float) -> None:
        await self.make(size, timeout_s)

    def grown(self, name: str) -> None:
        self.asked.append(0)


@pytest.fixture
def room() -> Room:
    return Room()


@pytest.fixture
def arena(tmp_path: Path, room: Room) -> Iterator[NodeArena]:
    config = page_config(SLAB * PAGE_BYTES, 3 * SLAB * PAGE_BYTES)
    with NodeArena(
        tmp_path / "arena",
        config,
        ledger=room,
        clock=SystemClock(),
        rng=random.Random(str(tmp_path)),
    ) as made:
        yield made


async def laid(arena: NodeArena, tenant: PageOwner, byte: int = 1, pages: int = 1) -> Block:
    holder = arena.holder("filler")
    with await arena.prepare(tenant, pages * PAGE_BYTES, holder) as filling:
        filling.view[:] = bytes([byte]) * len(filling.view)
        filling.commit()
    return filling.block


def tenant(arena: NodeArena, gone: list[Block]) -> PageOwner:
    return arena.tenant(ContentType.LORA_WEIGHT, "adapters", gone.append)


async def test_it_has_no_memory_until_pages_are_needed_and_grows_by_slabs(
    arena: NodeArena, room: Room
) -> None:
    assert arena.usage().held_bytes == 0
    ours = tenant(arena, [])
    await laid(arena, ours)
    one = arena.usage().held_bytes
    assert SLAB * PAGE_BYTES < one < SLAB * PAGE_BYTES + MIB
    assert room.asked == [one, 0]
    for _ in range(SLAB):
        await laid(arena, ours)
    assert arena.snapshot().slab_bytes == 2 * one


async def test_without_leave_it_evicts_and_tells_whose_block_went(
    arena: NodeArena, room: Room
) -> None:
    gone: list[Block] = []
    room.slabs = 1
    ours = tenant(arena, gone)
    blocks = [await laid(arena, ours) for _ in range(SLAB + 3)]
    assert arena.snapshot().pool.total_pages == SLAB
    assert gone
    assert set(gone) <= set(blocks)


async def test_pages_that_do_not_lie_in_a_row_let_it_grow_before_anybody_is_evicted(
    arena: NodeArena, room: Room
) -> None:
    gone: list[Block] = []
    ours = tenant(arena, gone)
    blocks = [await laid(arena, ours) for _ in range(SLAB)]
    for block in blocks[::2]:
        arena.free(block)
    await laid(arena, ours, pages=2)
    assert not gone
    assert arena.snapshot().pool.total_pages == 2 * SLAB
    await laid(arena, ours, pages=SLAB - 2)
    await laid(arena, ours)
    assert not gone
    assert arena.snapshot().pool.total_pages == 2 * SLAB, "what is free suffices"


async def test_with_no_leave_at_all_pages_are_refused(arena: NodeArena, room: Room) -> None:
    room.slabs = 0
    with pytest.raises(OutOfPages, match=r"no memory for pages now: .* no 4\.0 MiB .*budget"):
        await laid(arena, tenant(arena, []))


async def test_where_the_machine_makes_no_shared_memory_the_refusal_says_so(
    arena: NodeArena, room: Room
) -> None:
    async def make(_size: int, _timeout_s: float) -> None:
        return

    room.make = make
    ours, holder = tenant(arena, []), arena.holder("x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KIB, hard))
    try:
        for is_wanted in (False, True):
            with pytest.raises(OutOfPages, match=r"pages now: the machine has no .* too large"):
                await arena.prepare(ours, 10, holder, lambda is_so=is_wanted: is_so)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_for_a_request_that_waits_idle_models_go_and_for_nothing_else(
    arena: NodeArena, room: Room
) -> None:
    """With the real arbiter, whose budget an idle text model fills."""
    toy, ours, holder = Toy(), tenant(arena, []), arena.holder("filler")
    async with MemoryArbiter(budget=8 * MIB, clock=SystemClock(), grace_s=0) as ledger:
        ledger.add_tenant(arena)
        room.leave = lambda size: ledger.may_grow(NAME, size)
        room.make = lambda size, timeout_s: ledger.make_room(NAME, size, timeout_s)
        room.grown = ledger.grown  # type: ignore[method-assign]
        ledger.register(capability("text", TEXT_TARGET, toy, size=6 * MIB, warmth=COLD))
        await ledger.request("text", "m", 1)
        with pytest.raises(OutOfPages):
            await arena.prepare(ours, 10, holder)
        assert not toy.unloads
        async with ledger.acquire("text", "m"):
            asks = [arena.prepare(ours, 10, holder, lambda: True) for _ in range(3)]
            fillings = asyncio.gather(*asks)
            async with asyncio.timeout(60):
                while not ledger.status().waiting:
                    await asyncio.sleep(0.01)
            assert not fillings.done()
        assert len(await fillings) == 3
        assert toy.unloads == ["m"]
        assert ledger.status().committed_bytes == arena.snapshot().slab_bytes
        assert arena.snapshot().pool.total_pages == SLAB


async def test_a_request_gets_a_refusal_to_retry_when_no_room_can_be_made(
    arena: NodeArena, room: Room
) -> None:
    room.slabs, ours, holder = 0, tenant(arena, []), arena.holder("x")
    with pytest.raises(OutOfPages, match="no memory for pages now: nothing idles") as problem:
        await arena.prepare(ours, 10, holder, lambda: True)
    assert problem.value.retry_after_s
    room.slabs = 1
    await arena.prepare(ours, SLAB * PAGE_BYTES, holder)
    with pytest.raises(OutOfPages, match=r"8 are pinned.*; nothing idles") as problem:
        await arena.prepare(ours, 10, holder, lambda: True)
    assert problem.value.retry_after_s


async def test_pages_that_are_unpinned_while_room_is_made_in_vain_are_had(
    arena: NodeArena, room: Room
) -> None:
    room.slabs, ours = 1, tenant(arena, [])
    block = await laid(arena, ours, pages=SLAB)
    hold = arena.hold(block, arena.engine("m", 1))
    hold.pin()

    async def in_vain(_size: int, _timeout_s: float) -> None:
        hold.unpin()
        raise MemoryRefused("nothing idles")

    room.make = in_vain
    filling = await arena.prepare(ours, 10, arena.holder("x"), lambda: True)
    assert filling.block.is_live


async def test_for_pages_that_are_unpinned_a_moment_later_no_model_has_to_go(
    arena: NodeArena, room: Room
) -> None:
    room.slabs, ours = 1, tenant(arena, [])
    block = await laid(arena, ours, pages=SLAB)
    hold = arena.hold(block, arena.engine("m", 1))
    hold.pin()
    wanted: list[bool] = []
    waiting = asyncio.create_task(
        arena.prepare(ours, 10, arena.holder("x"), lambda: wanted.append(True) or True)
    )
    await asyncio.sleep(0)
    hold.unpin()
    assert (await waiting).block.is_live
    assert not wanted


async def test_two_who_need_pages_at_once_grow_it_once(arena: NodeArena, room: Room) -> None:
    ours = tenant(arena, [])
    await asyncio.gather(laid(arena, ours), laid(arena, ours), laid(arena, ours))
    assert arena.snapshot().pool.total_pages == SLAB


async def test_it_gives_back_what_is_not_pinned_when_the_ledger_asks(arena: NodeArena) -> None:
    gone: list[Block] = []
    ours = tenant(arena, gone)
    blocks = [await laid(arena, ours) for _ in range(2 * SLAB)]
    holder = arena.holder("reader")
    with arena.hold(blocks[0], holder):
        usage = arena.usage()
        assert (usage.expired_bytes, usage.spare_bytes * 2) == (0, usage.held_bytes)
        await arena.shrink(usage.held_bytes)
        assert arena.snapshot().pool.total_pages == SLAB
        assert set(gone) == {b for b in blocks if b.first // SLAB != blocks[0].first // SLAB}
    await arena.shrink(1)
    assert arena.usage().held_bytes == 0
    assert set(gone) == set(blocks)


async def test_empty_slabs_are_offered_first(arena: NodeArena) -> None:
    block = await laid(arena, tenant(arena, []))
    arena.free(block)
    await asyncio.sleep(0.3)  # older than what the ledger heard
    usage = arena.usage()
    assert usage.expired_bytes == usage.held_bytes > 0


async def test_the_ledger_counts_it_and_takes_it_back_for_others(
    arena: NodeArena, room: Room
) -> None:
    """With the real arbiter: what the arena holds is committed, and goes when room is asked."""
    async with MemoryArbiter(budget=64 * MIB, clock=SystemClock()) as ledger:
        ledger.add_tenant(arena)
        room.leave = lambda size: ledger.may_grow(NAME, size)
        room.grown = ledger.grown
        ours = tenant(arena, [])
        for _ in range(3 * SLAB):
            await laid(arena, ours)
        held = arena.snapshot().slab_bytes
        ledger.hold("a job", 10 * MIB)
        assert ledger.status().committed_bytes == held + 10 * MIB
        await asyncio.sleep(0.3)  # the ledger hears no older news than that
        ledger.hold("a job", 62 * MIB)
        async with asyncio.timeout(60):
            while arena.snapshot().slab_bytes:
                await asyncio.sleep(0.01)
        with pytest.raises(OutOfPages):
            await laid(arena, ours)


async def test_a_dead_engine_gives_its_pins_back_and_nobody_elses(arena: NodeArena) -> None:
    ours = tenant(arena, [])
    first, second = await laid(arena, ours), await laid(arena, ours)
    old = arena.engine("m", 100)
    assert arena.engine("m", 100) is old
    arena.hold(first, old).pin()
    other = arena.engine("n", 200)
    arena.hold(second, other).pin()
    half = await arena.prepare(ours, 10, old)
    arena.engine_changed("m", None)
    pool = arena.snapshot().pool
    assert (pool.pinned_pages, arena.snapshot().rolled_back) == (1, 1)
    assert not half.block.is_live
    with pytest.raises(PageFreed):
        arena.hold(first, old)
    assert arena.engine("m", 101) is not old
    arena.engine_changed("n", 200)  # the same one: nothing changes
    assert second.is_pinned


async def test_another_process_reads_what_lies_there_and_its_death_frees_it(
    arena: NodeArena,
) -> None:
    ours = tenant(arena, [])
    block = await laid(arena, ours, byte=7)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.memory.pages.child"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    hold = arena.hold(block, arena.engine("m", child.pid))
    hold.pin()
    assert await child.stdout.readline() == b'{"ready": true}\n'
    watched = {"do": "watch", "byte": 7, "ref": asdict(arena.ref(block, 100))}
    child.stdin.write(json.dumps(watched).encode() + b"\n")
    seen = {"whole": 0, "torn": 0}
    while not seen["whole"]:
        child.stdin.write(b'{"do": "report"}\n')
        seen = json.loads(await child.stdout.readline())
    assert seen["torn"] == 0
    child.send_signal(signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert arena.snapshot().pool.pinned_pages == 1
    arena.engine_changed("m", None)
    assert arena.snapshot().pool.pinned_pages == 0


def test_the_next_start_removes_the_slabs_of_a_killed_node(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, pathlib, random, signal
from kakeya.core.clock import SystemClock
from kakeya.memory.pages.content import ContentType
from kakeya.memory.pages.node_arena import NodeArena, page_config
from tests.memory.pages.test_node_arena import Room
async def main():
    arena = NodeArena(pathlib.Path({str(tmp_path)!r}), page_config(4 << 20, 8 << 20),
                      ledger=Room(), clock=SystemClock(),
                      rng=random.Random({str(tmp_path / "child")!r}))
    ours = arena.tenant(ContentType.LORA_WEIGHT, "x", lambda _: None)
    await arena.prepare(ours, 10, arena.holder("x"))
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False, cwd=Path.cwd())
    assert killed.returncode == -signal.SIGKILL
    with NodeArena(
        tmp_path,
        page_config(4 << 20, 8 << 20),
        ledger=Room(),
        clock=SystemClock(),
        rng=random.Random(str(tmp_path)),
    ) as arena:
        assert len(arena.leftovers) == 1


async def test_metrics_tell_of_the_pages(arena: NodeArena) -> None:
    await laid(arena, tenant(arena, []))
    names = {figure.name for figure in arena.figures()}
    assert any("utilization" in name for name in names)


async def test_metrics_count_blocks_that_were_opened_and_those_that_had_gone(
    arena: NodeArena,
) -> None:
    block = await laid(arena, tenant(arena, []))
    reader = arena.holder("reader")
    with arena.hold(block, reader):
        pass
    arena.free(block)
    with pytest.raises(PageFreed):
        arena.hold(block, reader)
    (holds,) = (figure for figure in arena.figures() if figure.name == "kakeya_page_holds")
    assert holds.values == {("opened",): 1, ("stale",): 1}


async def test_status_tells_which_pages_are_pinned_and_which_could_go(arena: NodeArena) -> None:
    ours = tenant(arena, [])
    blocks = [await laid(arena, ours, pages=2) for _ in range(3)]
    arena.free(blocks[1])
    with arena.hold(blocks[0], arena.holder("reader")):
        found = arena.status()
    assert found | {"fragmentation": 0.0} == {
        "page_bytes": PAGE_BYTES,
        "total": SLAB,
        "free": SLAB - 4,
        "pinned": 2,
        "dirty": 0,
        "evictable": 2,
        "fragmentation": 0.0,
    }
    assert found["fragmentation"] == 0.5
