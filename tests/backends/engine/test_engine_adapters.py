"""Adapters in a real engine child, over its real socket, from real pages in shared memory."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from kakeya.adapters.files.base import base_fingerprint
from kakeya.adapters.files.packed import Precision, pack
from kakeya.backends.engine.backend import EngineBackend
from kakeya.core.errors import Conflict, KakeyaError, MemoryRefused, NotFound
from kakeya.generation.frames import Tokens
from kakeya.generation.kv import PageRef
from kakeya.generation.request import DecodeRequest
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.pins import Block
from kakeya.memory.pages.shared_arena import PageArena
from tests import findings
from tests.backends.engine.test_engine_limits import PATIENT
from tests.engine.adapter_rig import FOLDERS, NAMES, TINY

CONFIG = PageConfig(page_bytes=512 << 10, slab_pages=4, total_pages=4)
PROMPT = tuple(range(5, 25))
SLOTS = 2
pytestmark = pytest.mark.asyncio(loop_scope="module")
FINGERPRINT, OTHER = base_fingerprint(TINY), "0" * 64
PACKED = {
    (name, base): pack(folder, Precision.EXACT, base=base)
    for name, folder in list(zip(NAMES, FOLDERS, strict=True))[:3]
    for base in ("", FINGERPRINT, OTHER)
}


class Pages:
    """Where a node lays adapters for its engines."""

    def __init__(self, arena: PageArena) -> None:
        self.arena = arena
        self.agent = arena.pool.holder("agent")
        self.tenant = arena.pool.tenant(ContentType.LORA_WEIGHT, "adapters")

    def lay(self, name: str, base: str = "") -> tuple[PageRef, Block]:
        packed = PACKED[name, base]
        with self.arena.prepare(self.tenant, len(packed), self.agent) as filling:
            filling.view[:] = packed
            filling.commit()
            return filling.ref, filling.block


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    with PageArena(CONFIG, folder=tmp_path, rng=random.Random(str(tmp_path))) as arena:
        arena.grow()
        yield Pages(arena)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[EngineBackend]:
    def command(socket: Path) -> Sequence[str]:
        child = (sys.executable, "-m", "kakeya.node.engine_main", "--socket", str(socket))
        slots = ("--adapter-slots", str(SLOTS), "--adapter-rank", "8")
        return (*child, "--model", str(TINY), "--model-id", "tiny", *slots, *findings.flags())

    async with EngineBackend("tiny", command, options=PATIENT) as started:
        await started.ready(120.0)
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: EngineBackend) -> AsyncIterator[EngineBackend]:
    """One engine for the file, that has no adapter when a test begins."""
    assert await started.adapters() == ()
    yield started
    for name in await started.adapters():
        await started.unload_adapter(name)
    assert started.restarts == 0


async def decode(engine: EngineBackend, adapter_id: str, tokens: int = 12) -> list[int]:
    asked = DecodeRequest(token_ids=PROMPT, max_tokens=tokens, adapter_id=adapter_id)
    made: list[int] = []
    async with aclosing(engine.decode(asked)) as frames:
        async for frame in frames:
            made += frame.token_ids if isinstance(frame, Tokens) else ()
    return made


async def test_it_decodes_with_each_adapter_that_was_loaded_and_with_none(
    engine: EngineBackend, pages: Pages
) -> None:
    plain = await decode(engine, "")
    for name in NAMES[:SLOTS]:
        ref, _ = pages.lay(name)
        assert await engine.load_adapter(name, ref, 30.0) > 0
    answers = [await decode(engine, name) for name in NAMES[:SLOTS]]
    assert len({tuple(answer) for answer in (plain, *answers)}) == SLOTS + 1
    assert await decode(engine, "") == plain
    assert await engine.unload_adapter(NAMES[0])
    assert not await engine.unload_adapter(NAMES[0])
    with pytest.raises(NotFound, match="not loaded in this engine"):
        await decode(engine, NAMES[0])
    assert await decode(engine, NAMES[1]) == answers[1]


async def test_what_is_asked_behind_a_load_computes_with_what_it_brings(
    engine: EngineBackend, pages: Pages
) -> None:
    """Asked for the moment that the load was sent, each time in the slot of the one before; with
    loads that come later than what was asked behind them, too."""
    refs = {name: pages.lay(name)[0] for name in NAMES[:3]}
    expected, out = {}, ""
    for name, ref in refs.items():
        await engine.load_adapter(name, ref, 30.0, out)
        expected[name], out = await decode(engine, name), name
    call = engine._serving_now().client._loads._open._call
    write = call.write

    async def late(message: object) -> None:
        await asyncio.sleep(0.03)
        await write(message)

    for turn in range(12):
        call.write = write if turn < 6 else late
        name = NAMES[turn % 3]
        behind: list[asyncio.Task[list[int]]] = []

        def follow(name: str = name, behind: list[asyncio.Task[list[int]]] = behind) -> None:
            behind.append(asyncio.create_task(decode(engine, name)))

        await engine.load_adapter(name, refs[name], 30.0, out, follow)
        assert await behind[0] == expected[name]
        out = name
    call.write = write


async def test_what_is_asked_behind_a_load_that_fails_is_told_that_it_is_not_there(
    engine: EngineBackend, pages: Pages
) -> None:
    ref, block = pages.lay(NAMES[0])
    pages.arena.pool.free(block)
    behind: list[asyncio.Task[list[int]]] = []

    def follow() -> None:
        behind.append(asyncio.create_task(decode(engine, NAMES[0])))

    with pytest.raises(Conflict, match="the block was freed"):
        await engine.load_adapter(NAMES[0], ref, 30.0, "", follow)
    with pytest.raises(NotFound, match="not loaded in this engine"):
        await behind[0]


async def test_one_call_takes_the_slot_of_another_and_only_where_that_is_idle(
    engine: EngineBackend, pages: Pages
) -> None:
    refs = {name: pages.lay(name)[0] for name in NAMES[:3]}
    for name in NAMES[:2]:
        await engine.load_adapter(name, refs[name], 30.0)
    with pytest.raises(MemoryRefused, match="no slot"):
        await engine.load_adapter(NAMES[2], refs[NAMES[2]], 30.0)
    asked = DecodeRequest(token_ids=PROMPT, max_tokens=8192, adapter_id=NAMES[0])
    async with aclosing(engine.decode(asked)) as frames:
        async for frame in frames:
            if isinstance(frame, Tokens):
                break
        with pytest.raises(Conflict, match="generations compute with"):
            await engine.load_adapter(NAMES[2], refs[NAMES[2]], 30.0, NAMES[0])
        assert set(await engine.adapters()) == set(NAMES[:2])
        await engine.load_adapter(NAMES[2], refs[NAMES[2]], 30.0, NAMES[1])
    assert set(await engine.adapters()) == {NAMES[0], NAMES[2]}
    kept = await decode(engine, NAMES[2])
    await engine.load_adapter(NAMES[1], refs[NAMES[1]], 30.0, NAMES[0])
    assert await decode(engine, NAMES[2]) == kept


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc for what is mapped")
async def test_it_maps_no_slab_for_longer_than_a_moment(
    engine: EngineBackend, pages: Pages
) -> None:
    """Memory that the owner of the slabs gives back would stay taken."""
    refs = {name: pages.lay(name)[0] for name in NAMES[:3]}
    for name in NAMES[:2]:
        await engine.load_adapter(name, refs[name], 30.0)
    with pytest.raises(MemoryRefused, match="no slot"):
        await engine.load_adapter(NAMES[2], refs[NAMES[2]], 30.0)
    assert refs[NAMES[0]].slab.startswith("/kk-")
    maps = Path(f"/proc/{engine.pid}/maps")
    async with asyncio.timeout(60):
        while "/kk-" in await asyncio.to_thread(maps.read_text):
            await asyncio.sleep(0.01)


async def test_pages_that_hold_something_else_are_refused_and_nothing_changes(
    engine: EngineBackend, pages: Pages
) -> None:
    ref, block = pages.lay(NAMES[0])
    await engine.load_adapter(NAMES[0], ref, 30.0)
    before = await decode(engine, NAMES[0])
    with pytest.raises(Conflict, match="the block was freed or is not committed"):
        await engine.load_adapter(NAMES[1], replace(ref, stamp=ref.stamp + 1), 30.0, NAMES[0])
    pages.arena.pool.free(block)
    with pytest.raises(Conflict, match="the block was freed or is not committed"):
        await engine.load_adapter(NAMES[1], ref, 30.0, NAMES[0])
    with pytest.raises(KakeyaError, match="slab"):
        await engine.load_adapter(NAMES[1], replace(ref, slab=f"{ref.slab}gone"), 30.0, NAMES[0])
    assert await engine.adapters() == (NAMES[0],)
    assert await decode(engine, NAMES[0]) == before
    assert engine.restarts == 0


async def test_it_says_which_weights_it_has_and_refuses_adapters_of_others(
    engine: EngineBackend, pages: Pages
) -> None:
    assert engine.facts is not None
    assert engine.facts.base_fingerprint == FINGERPRINT
    ours, _ = pages.lay(NAMES[0], FINGERPRINT)
    others, _ = pages.lay(NAMES[1], OTHER)
    await engine.load_adapter(NAMES[0], ours, 30.0)
    with pytest.raises(KakeyaError, match="made for the base 0000"):
        await engine.load_adapter(NAMES[1], others, 30.0)
    assert await engine.adapters() == (NAMES[0],)
