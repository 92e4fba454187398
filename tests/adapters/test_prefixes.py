"""KV of prompts belongs to what is in an adapter: with a real engine and real LoRA folders, the
words are those of each alone and cold, and what is reused is told, never across."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from kakeya.adapters.tiers import TierRules
from kakeya.backends.adapted import AdaptedModel
from kakeya.generation.request import DecodeRequest
from kakeya.generation.retention import Retention
from tests.adapters.adapter_folders import tiny_adapter
from tests.prefix.world import TINY, Answer, Node, node, take, text

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = text(7, 150)
LEFT = len(PROMPT) - 1
"""What is reused at the most: the last token is computed, for its logits."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    environ = {"KAKEYA_PAGES_PAGE_KB": "2048", "KAKEYA_PAGES_FIT": "first_fit"}
    async with node(tmp_path_factory.mktemp("node"), environ=environ) as made:
        yield made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Adapters that differ in their values alone."""
    place = tmp_path_factory.mktemp("made")
    return {seed: tiny_adapter(place / str(seed), seed, size=0.05) for seed in range(3)}


async def put(world: Node, name: str, folder: Path) -> str:
    """Register an adapter, or replace it; what engines know it by."""
    manager = world.pages.adapters.manager
    return (await manager.register(name, TINY, folder, is_replacing=True)).version


async def say(world: Node, name: str) -> Answer:
    """Decode with an adapter, "" = the model alone."""
    manager, answer = world.pages.adapters.manager, Answer(len(PROMPT))
    known = f"{TINY}:{name}"
    adapted = AdaptedModel(world.model, known, "", manager)
    model = adapted if name else world.model
    request = DecodeRequest(token_ids=PROMPT, max_tokens=8)
    async with aclosing(model.decode(request)) as frames:
        async for frame in frames:
            take(answer, frame)
    return answer


async def cold(world: Node, name: str) -> list[int]:
    """What is said with nothing to reuse."""
    await world.prefixes.wipe()
    answer = await say(world, name)
    assert answer.cached == 0
    return answer.tokens


async def test_kv_is_reused_under_the_same_adapter_alone_also_after_it_was_replaced(
    world: Node, folders: dict[int, Path]
) -> None:
    await put(world, "b", folders[1])
    alone = {}
    for content in (2, 0):
        await put(world, "a", folders[content])
        alone[f"a with {content}"] = await cold(world, "a")
    for name in ("", "b"):
        alone[name] = await cold(world, name)
    assert len({tuple(tokens) for tokens in alone.values()}) == 4, alone

    async def check(name: str, said: str, cached: int) -> None:
        answer = await say(world, name)
        assert (answer.tokens, answer.cached) == (alone[said], cached), (name, said)

    await world.prefixes.wipe()
    for cached in (0, LEFT):
        await check("", "", cached)
        await check("a", "a with 0", cached)
        await check("b", "b", cached)
    await put(world, "a", folders[2])
    for cached in (0, LEFT):
        await check("a", "a with 2", cached)
    await check("b", "b", LEFT)
    await check("", "", LEFT)
    await put(world, "a", folders[0])
    await check("a", "a with 0", LEFT)  # its content is what it was
    await put(world, "twin", folders[0])
    await check("twin", "a with 0", LEFT)  # so is that of another name
    await check_conserved(world)


async def test_all_at_once_say_what_each_says_alone(world: Node, folders: dict[int, Path]) -> None:
    names = ("", "a", "b", "c")
    for name, content in zip(names[1:], range(3), strict=True):
        await put(world, name, folders[content])
    alone = {name: await cold(world, name) for name in names}
    await world.prefixes.wipe()
    asked = names * 2
    for _ in range(2):
        answers = await asyncio.gather(*(say(world, name) for name in asked))
        assert [one.tokens for one in answers] == [alone[name] for name in asked]
    assert [one.cached for one in answers] == [LEFT] * len(asked)
    await check_conserved(world)


async def test_what_is_pinned_for_an_adapter_ends_with_it(
    world: Node, folders: dict[int, Path]
) -> None:
    """Replaced, removed; not when the same is put in its place."""
    manager, prefixes = world.pages.adapters.manager, world.prefixes

    async def pin(content: int) -> str:
        version = await put(world, "pinned", folders[content])
        await say(world, "pinned")
        kept = prefixes.keep(TINY, version, PROMPT, Retention.LONG, pin="p")
        assert kept == LEFT
        assert pinned(world) > 0
        return version

    await prefixes.wipe()
    version = await pin(0)
    before = pinned(world)
    assert await put(world, "pinned", folders[0]) == version
    assert pinned(world) == before
    await put(world, "pinned", folders[1])
    assert pinned(world) == 0
    await pin(1)
    await manager.remove("pinned")
    assert pinned(world) == 0
    await check_conserved(world)


async def test_pages_of_the_size_that_was_set_are_what_is_counted(
    world: Node, folders: dict[int, Path]
) -> None:
    await put(world, "a", folders[0])
    await say(world, "a")
    arena, kept = world.pages.arena, world.prefixes.pages
    assert arena.status()["page_bytes"] == 2 << 20
    assert arena.snapshot().page_bytes == 2 << 20
    assert kept.used_bytes == ram_blocks(world) * (2 << 20) > 0
    assert kept.free_bytes == kept.budget_bytes - kept.used_bytes
    assert {block.pages for block in arena._arena.pool.blocks()} == {1}


async def test_what_is_set_of_tiers_and_pages_is_what_they_go_by(tmp_path: Path) -> None:
    environ = {
        "KAKEYA_ADAPTERS_WINDOW_S": "600",
        "KAKEYA_ADAPTERS_HOT_USES": "3",
        "KAKEYA_ADAPTERS_WARM_PLACES": "5",
        "KAKEYA_PAGES_HEADROOM": "0.5",
        "KAKEYA_PAGES_HIGH_WATERMARK": "0.85",
        "KAKEYA_PAGES_LOW_WATERMARK": "0.75",
    }
    async with node(tmp_path, environ=environ) as here:
        rules = here.pages.adapters.manager._table.rules
        assert rules == TierRules(window_s=600.0, hot_uses=3, warm_places=5)
        pages = here.pages.arena._arena.config
        assert (pages.headroom, pages.high_watermark, pages.low_watermark) == (0.5, 0.85, 0.75)


@pytest.mark.slow
@pytest.mark.parametrize("page_kb", [512, 1024, 4096])
async def test_every_page_size_serves_adapters_and_prefixes(
    page_kb: int, tmp_path: Path, folders: dict[int, Path]
) -> None:
    async with node(tmp_path, environ={"KAKEYA_PAGES_PAGE_KB": str(page_kb)}) as here:
        for name, content in (("a", 0), ("b", 1)):
            await put(here, name, folders[content])
            first, second = await say(here, name), await say(here, name)
            assert (first.cached, second.cached) == (0, LEFT)
            assert first.tokens == second.tokens
        kept = here.prefixes.pages
        assert here.pages.arena.status()["page_bytes"] == page_kb << 10
        assert kept.used_bytes % (page_kb << 10) == 0 < kept.used_bytes
        await check_conserved(here)


async def check_conserved(world: Node) -> None:
    """Nothing is held when nobody asks; what lies in pages beside KV are adapters."""
    async with asyncio.timeout(60):
        while world.pages.arena.snapshot().pool.pinned_pages:  # what is on its way to disk is held
            await asyncio.sleep(0.01)
    pool, pages = world.pages.arena.snapshot().pool, world.prefixes.pages
    adapters = world.pages.adapters.manager.status()["warm"]
    assert pool.pinned_pages == 0
    assert pinned(world) == 0
    pages.check_integrity()
    assert ram_blocks(world) + adapters == pool.blocks


def ram_blocks(world: Node) -> int:
    return sum(shelf.tree.stats().ram_blocks for shelf in world.prefixes.pages.shelves())


def pinned(world: Node) -> int:
    return sum(shelf.tree.stats().pinned_blocks for shelf in world.prefixes.pages.shelves())
