"""Conversations that outlive their llama-server: saved when it ends, restored into the next one."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.llama.archive import SlotArchive
from kakeya.core.clock import SystemClock
from kakeya.generation.frames import Done, Tokens
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.names.naming import PrefixNames
from tests.backends.llama.server import llama, toy_gguf
from tests.prefix.disk.world import opened

TOKENS = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@asynccontextmanager
async def kept(folder: Path, named_after_s: float = 0.0) -> AsyncIterator[SlotArchive]:
    names = PrefixNames(lambda _: "")

    async def weights(path: Path, state: str) -> str:
        await asyncio.sleep(named_after_s)
        return await names.weights(path, state)

    async with opened(folder, clock=SystemClock()) as store:
        archive = SlotArchive()
        archive.open(store, weights)
        yield archive
        await archive.aclose(5.0)
        await names.aclose()


def conversation(first: int, tokens: int = TOKENS) -> DecodeRequest:
    """A prompt that no other shares a token with."""
    ids = [first, *(10 + (7 * first + 3 * at * at) % 300 for at in range(tokens - 1))]
    return DecodeRequest(token_ids=ids, max_tokens=4)


async def ask(backend: EngineBackend, request: DecodeRequest) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were not computed."""
    ids: list[int] = []
    async for frame in backend.decode(request):
        if isinstance(frame, Tokens):
            ids += frame.token_ids
    assert isinstance(frame, Done)
    return ids, frame.usage.cached_tokens


def store_of(archive: SlotArchive) -> BlockStore:
    assert archive.store is not None
    return archive.store


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_conversation_is_warm_in_the_next_server_and_after_a_restart(
    llama_server: Path, model: Path, tmp_path: Path
) -> None:
    asked = conversation(20)
    async with kept(tmp_path) as archive:
        async with llama(llama_server, model, archive=archive) as backend:
            await backend.ready(60)
            answer, cached = await ask(backend, asked)
            assert cached == 0
        async with llama(llama_server, model, archive=archive) as backend:
            await backend.ready(60)
            assert await ask(backend, asked) == (answer, TOKENS - 1)
    async with kept(tmp_path) as archive, llama(llama_server, model, archive=archive) as backend:
        await backend.ready(60)
        longer = replace(asked, token_ids=[*asked.token_ids, *answer, 30, 31])
        assert (await ask(backend, longer))[1] >= TOKENS + len(answer) - 1
        assert (await ask(backend, conversation(21)))[1] == 0


async def test_what_is_saved_is_private_and_no_plain_file_stays(
    llama_server: Path, model: Path, tmp_path: Path
) -> None:
    async with kept(tmp_path) as archive:
        async with llama(llama_server, model, archive=archive) as backend:
            await backend.ready(60)
            await ask(backend, conversation(20))
            assert backend.engine is not None
            client: Any = backend.engine.client
            folder: Path = client._child.socket.parent
            await client.keep(5.0)
            await store_of(archive).flush()
            left = await asyncio.to_thread(os.listdir, folder)
            assert left == [client._child.socket.name]
            assert stat.S_IMODE((await asyncio.to_thread(folder.stat)).st_mode) == 0o700
        (saved,) = [
            path for path in await asyncio.to_thread(files, tmp_path) if ".kvb" in path.name
        ]
        found = await asyncio.to_thread(saved.stat)
        assert stat.S_IMODE(found.st_mode) == 0o600
        entries = store_of(archive).entries()
        assert [entry.block.tokens for entry in entries] == [TOKENS + 3]


async def test_a_damaged_file_is_set_aside_and_costs_a_cold_prompt(
    llama_server: Path, model: Path, tmp_path: Path
) -> None:
    asked = conversation(20)

    def damage() -> None:
        (saved,) = [path for path in files(tmp_path) if ".kvb" in path.name]
        data = bytearray(saved.read_bytes())
        data[-200] ^= 1
        saved.write_bytes(data)

    async with kept(tmp_path) as archive:
        async with llama(llama_server, model, archive=archive) as backend:
            await backend.ready(60)
            answer, _ = await ask(backend, asked)
    await asyncio.to_thread(damage)
    async with kept(tmp_path) as archive, llama(llama_server, model, archive=archive) as backend:
        await backend.ready(60)
        assert await ask(backend, asked) == (answer, 0)
        await store_of(archive).sweep()
        counts = store_of(archive).stats().counts
        assert (counts.damaged, counts.quarantined) == (1, 1)


async def test_only_what_may_lie_on_a_disk_and_is_worth_it_is_saved(
    llama_server: Path, model: Path, tmp_path: Path
) -> None:
    asked = conversation(20)
    async with kept(tmp_path) as archive:
        async with llama(llama_server, model, archive=archive) as backend:
            await backend.ready(60)
            await ask(backend, replace(asked, kv_retention=Retention.IN_MEMORY))
            await ask(backend, replace(conversation(21), priority=GenerationPriority.BATCH))
            await ask(backend, conversation(22, tokens=100))
        assert store_of(archive).entries() == ()
        assert store_of(archive).stats().queued == 0


@pytest.mark.parametrize("named_after_s", [0.0, 0.5])
async def test_more_conversations_than_fit_stay_warm(
    llama_server: Path, model: Path, tmp_path: Path, named_after_s: float
) -> None:
    """Two slots, and room for three histories of so many tokens; the digest of large weights is
    there only after the first prompts."""
    asked = [conversation(20 + one) for one in range(4)]
    async with (
        kept(tmp_path, named_after_s) as archive,
        llama(llama_server, model, archive=archive, parallel=2, ctx_size=2048) as backend,
    ):
        await backend.ready(60)
        cold = [await ask(backend, one) for one in asked]
        warm = [await ask(backend, one) for one in asked]
        assert [cached for _, cached in cold] == [0] * 4
        assert [cached for _, cached in warm] == [TOKENS - 1] * 4
        assert [ids for ids, _ in warm] == [ids for ids, _ in cold]


async def test_conversations_at_once_have_slots_of_their_own(
    llama_server: Path, model: Path, tmp_path: Path
) -> None:
    asked = [conversation(20 + one, tokens=300) for one in range(6)]
    options = EngineOptions(max_running=3)  # as a node bounds it
    async with kept(tmp_path) as archive:
        for cached in (0, 299):
            async with llama(
                llama_server, model, archive=archive, options=options, parallel=3
            ) as backend:
                await backend.ready(60)
                found = await asyncio.gather(*(ask(backend, one) for one in asked))
                assert [count for _, count in found] == [cached] * 6


async def test_what_was_wiped_comes_back_from_nowhere(
    llama_server: Path, model: Path, tmp_path: Path
) -> None:
    asked = conversation(20)
    async with kept(tmp_path) as archive, llama(llama_server, model, archive=archive) as backend:
        await backend.ready(60)
        answer, _ = await ask(backend, asked)
        assert backend.engine is not None
        await backend.engine.client.keep(5.0)
        await archive.forget()
        await store_of(archive).wipe()
        assert await ask(backend, asked) == (answer, 0)


async def test_a_caller_that_leaves_while_its_history_is_restored(
    llama_server: Path, model: Path, tmp_path: Path
) -> None:
    asked = conversation(20)
    async with kept(tmp_path) as archive:
        async with llama(llama_server, model, archive=archive) as backend:
            await backend.ready(60)
            answer, _ = await ask(backend, asked)
        async with llama(llama_server, model, archive=archive) as backend:
            await backend.ready(60)
            left = asyncio.create_task(ask(backend, asked))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            assert await ask(backend, asked) == (answer, TOKENS - 1)
