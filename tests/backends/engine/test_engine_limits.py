"""What the agent asks of a real engine about memory, over the real socket."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.client import EngineMemoryLimits
from kakeya.core.errors import (
    InvalidArgument,
    MemoryRefused,
    PeerUnavailable,
    UnknownMethod,
)
from kakeya.core.process import resident_bytes
from kakeya.generation.frames import Done, Tokens
from kakeya.generation.kv import PageRef
from kakeya.generation.request import DecodeRequest
from tests import findings
from tests.backends.engine.test_backend import FAST, backend
from tests.mlx.random_models import write_model
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
MIB = 1 << 20
BLOCK_BYTES = 256 * 2 * 2 * 2 * 16 * 4
PATIENT = replace(FAST, start_timeout_s=120.0, resume_timeout_s=120.0, call_timeout_s=60.0)
"""Nothing here is about time: a busy machine may take its own."""
PROMPT = [3 + 7 * at % 90 for at in range(1000)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model") / "llama", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@asynccontextmanager
async def running(model: Path) -> AsyncIterator[EngineBackend]:
    def command(socket: Path) -> Sequence[str]:
        child = (sys.executable, "-m", "kakeya.node.engine_main", "--socket", str(socket))
        return (*child, "--model", str(model), "--model-id", "toy", *findings.flags())

    async with EngineBackend("toy", command, options=PATIENT) as started:
        await started.ready(120.0)
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def engine(model: Path) -> AsyncIterator[EngineBackend]:
    """One of its own, for a test that limits or ends it."""
    async with running(model) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(model: Path) -> AsyncIterator[EngineBackend]:
    async with running(model) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def unlimited(started: EngineBackend) -> AsyncIterator[EngineBackend]:
    """One for the file, that has no limit and no idle KV when a test begins."""
    await started.shrink(1 << 40)
    yield started
    assert started.limits == EngineMemoryLimits()
    assert started.restarts == 0


def request(length: int, max_tokens: int, kv_key: str = "") -> DecodeRequest:
    return DecodeRequest(token_ids=PROMPT[:length], max_tokens=max_tokens, kv_key=kv_key)


async def decode(engine: EngineBackend, asked: DecodeRequest) -> int:
    count = 0
    async with aclosing(engine.decode(asked)) as frames:
        async for frame in frames:
            count += len(frame.token_ids) if isinstance(frame, Tokens) else 0
    assert isinstance(frame, Done)
    return count


async def resident(engine: EngineBackend) -> int:
    size = await asyncio.to_thread(resident_bytes, engine.pid)
    assert size is not None
    return size


async def test_its_footprint_is_what_the_system_counts_now(unlimited: EngineBackend) -> None:
    footprint = await unlimited.footprint()
    assert footprint is not None
    assert abs(footprint.resident_bytes - await resident(unlimited)) < 8 * MIB
    assert 0 < footprint.mlx_active_bytes < footprint.resident_bytes
    assert footprint.idle_kv_bytes == footprint.limit_bytes == 0
    await decode(unlimited, request(1000, 4, "a"))
    kept = await unlimited.footprint()
    assert kept is not None
    assert kept.idle_kv_bytes == (await unlimited.stats()).kv_live_bytes == 4 * BLOCK_BYTES


async def test_it_shrinks_until_only_what_is_used_is_left(unlimited: EngineBackend) -> None:
    for key in "abcd":
        await decode(unlimited, request(1000, 4, key))
    before = await resident(unlimited)
    shrunk = await unlimited.shrink(1 << 40)
    assert (shrunk.idle_kv_bytes, shrunk.mlx_cache_bytes) == (0, 0)
    assert before - await resident(unlimited) > 4 * BLOCK_BYTES * 3


async def test_limits_hold_the_context_that_their_kv_allows_and_say_so(
    engine: EngineBackend,
) -> None:
    said = await engine.set_limits(memory_bytes=await resident(engine) + 50 * MIB)
    assert said.limit_bytes == engine.limits.memory_bytes
    await engine.set_limits(kv_bytes=3 * BLOCK_BYTES)
    assert engine.facts is not None
    assert engine.facts.longest_tokens == 768
    assert await engine.ready(1.0) == engine.facts
    assert engine.limits == EngineMemoryLimits(
        memory_bytes=said.limit_bytes, kv_bytes=3 * BLOCK_BYTES
    )
    assert await decode(engine, request(700, 68)) == 68
    with pytest.raises(MemoryRefused, match="prompt and answer together may have 768 tokens"):
        await decode(engine, request(700, 69))
    assert engine.running == 0


async def test_limits_that_cannot_be_kept_change_nothing(unlimited: EngineBackend) -> None:
    with pytest.raises(MemoryRefused, match="less than the model itself occupies"):
        await unlimited.set_limits(memory_bytes=MIB)
    with pytest.raises(InvalidArgument, match="holds no sequence"):
        await unlimited.set_limits(kv_bytes=1)
    assert unlimited.limits == EngineMemoryLimits()
    assert await decode(unlimited, request(700, 4)) == 4


async def test_a_generation_that_outgrows_the_memory_limit_is_refused_and_the_next_is_served(
    engine: EngineBackend,
) -> None:
    await engine.shrink(1 << 40)
    await engine.set_limits(memory_bytes=await resident(engine) + MIB)
    with pytest.raises(MemoryRefused, match="ask for fewer tokens"):
        await decode(engine, DecodeRequest(token_ids=PROMPT * 7, max_tokens=500))
    assert await decode(engine, request(200, 4)) == 4
    assert engine.restarts == 0


async def test_without_slots_it_takes_no_adapters_and_says_how_it_would(
    unlimited: EngineBackend,
) -> None:
    ref = PageRef(
        slab="none", slab_pages=1, page_bytes=1 << 21, first=0, pages=1, length=10, stamp=1
    )
    with pytest.raises(UnknownMethod, match="start it with --adapter-slots"):
        await unlimited.load_adapter("style", ref, 5.0)
    with pytest.raises(UnknownMethod, match="start it with --adapter-slots"):
        await unlimited.unload_adapter("style")
    assert await unlimited.adapters() == ()


async def test_one_that_is_asked_to_end_comes_back_at_once_and_counts_no_death() -> None:
    async with backend() as engine:
        await engine.ready(20.0)
        for count in range(1, 7):  # one more than the breaker takes
            before = engine.pid
            engine.end("is tried out")
            assert engine.pid == before
            await until(lambda before=before: engine.pid not in (None, before), limit_s=120.0)
            await engine.ready(20.0)
            assert engine.restarts == count


async def test_while_it_is_not_up_nothing_is_asked_of_it_and_limits_are_kept(
    engine: EngineBackend,
) -> None:
    engine.end("is tried out")
    with pytest.raises(PeerUnavailable):
        await engine.shrink(1)
    with pytest.raises(PeerUnavailable):
        await engine.set_limits(kv_bytes=8 * BLOCK_BYTES)
    assert await engine.footprint() is None
    await until(lambda: engine.restarts == 1, limit_s=120.0)
    assert (await engine.ready(120.0)).longest_tokens == 8 * 256
