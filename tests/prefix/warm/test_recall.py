"""What is done when an engine is ready, so that its first requests find it done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.errors import Unsupported
from kakeya.generation.facts import ModelFacts
from kakeya.memory.pages.node_arena import PAGE_BYTES
from kakeya.memory.pages.pins import PinHolder
from kakeya.memory.pages.shared_arena import Filling
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.pages.counts import Source
from kakeya.prefix.tree.node import BlockClass
from kakeya.prefix.warm.recall import UNREADY_S, PrefixStart
from tests.fakes import FakeClock
from tests.prefix.test_prefixes import World, world, written

FIRST, SECOND, THIRD = ([start + place for place in range(10)] for start in (100, 200, 300))
"""Two blocks and a tail of one token each, all but the last token of a prompt."""


async def stored(folder: Path) -> None:
    """Have three prompts on disk that were used in this order."""
    async with world(folder, disk=True) as here:
        for prompt in (FIRST, SECOND, THIRD):
            await here.ask(prompt)
            await written(here)


async def started(here: World) -> None:
    async with PrefixStart(here.prefixes, clock=SystemClock()) as start:
        start.ready(here.engine)
        start.ready(here.engine)
        await start.at_rest.wait()
        assert [(one.failures, one.running) for one in start.health()] == [(0, True)]


async def test_a_node_puts_off_that_it_is_ready_until_all_is_back_and_for_a_moment_at_most(
    tmp_path: Path,
) -> None:
    await stored(tmp_path)
    clock = FakeClock()
    async with world(tmp_path, disk=True) as here:
        async with PrefixStart(here.prefixes, clock=clock) as start:
            assert start.unready() == ""  # there is no engine
            start.ready(here.engine)
            assert "from disk" in start.unready()
            await start.at_rest.wait()
            assert start.unready() == ""
            start.ready(here.engine)  # said again
            assert start.unready() == ""
        async with PrefixStart(here.prefixes, clock=clock) as start:
            start.ready(here.engine)
            clock.advance(UNREADY_S)
            assert start.unready() == ""
            assert not start.at_rest.is_set()


async def sources(here: World, prompt: list[int]) -> tuple[int, int]:
    """Tokens of a request that were found in pages, and on disk."""
    tokens = here.prefixes.counts.tokens
    before = tokens[Source.PAGES], tokens[Source.DISK]
    await here.ask(prompt)
    return tokens[Source.PAGES] - before[0], tokens[Source.DISK] - before[1]


async def test_what_was_used_last_is_in_pages_before_it_is_asked_for(tmp_path: Path) -> None:
    await stored(tmp_path)
    async with world(tmp_path, disk=True) as here:
        await started(here)
        for prompt in (FIRST, SECOND, THIRD):
            assert await sources(here, prompt) == (9, 0)
        await written(here)
        here.check()


async def test_who_turns_text_into_tokens_hears_of_what_came_back(tmp_path: Path) -> None:
    await stored(tmp_path)
    told: list[tuple[str, list[list[int]]]] = []

    async def recalled(facts: ModelFacts, histories: Sequence[Sequence[int]]) -> None:
        told.append((facts.model_id, [list(history) for history in histories]))
        raise Unsupported("a model without a tokenizer")  # which is nobody's fault

    async with world(tmp_path, disk=True) as here:
        async with PrefixStart(here.prefixes, clock=SystemClock()) as start:
            start.recalled = recalled
            start.ready(here.engine)
            await start.at_rest.wait()
            assert [(one.failures, one.running) for one in start.health()] == [(0, True)]
    assert told == [("toy", [THIRD[:-1], SECOND[:-1], FIRST[:-1]])]


async def test_as_much_comes_as_fits_half_of_the_free_pages_the_last_used_whole(
    tmp_path: Path,
) -> None:
    await stored(tmp_path)
    async with world(tmp_path, disk=True, budget=8) as here:
        await started(here)
        assert here.prefixes.pages.used_bytes == 3 * PAGE_BYTES
        assert await sources(here, THIRD) == (9, 0)
        assert await sources(here, SECOND) == (0, 9)
        here.check()


async def test_nobody_leaves_for_what_nobody_asked_for(tmp_path: Path) -> None:
    await stored(tmp_path)
    async with world(tmp_path, disk=True, budget=8) as here:
        await here.ask([7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
        await started(here)
        (shelf,) = here.prefixes.pages.shelves()
        classes = sorted(node.block_class for node in shelf.tree if node.in_ram)
        assert classes == [BlockClass.USER] * 3
        assert here.prefixes.counts.evicted == 0


async def test_requests_that_come_meanwhile_find_their_prompts(tmp_path: Path) -> None:
    await stored(tmp_path)
    async with world(tmp_path, disk=True) as here:
        found = asyncio.gather(*(here.ask(prompt) for prompt in (FIRST, SECOND, THIRD, FIRST)))
        await started(here)
        assert await found == [9, 9, 9, 9]
        await written(here)
        here.check()


async def test_none_is_brought_back_while_a_request_waits_for_the_disk(tmp_path: Path) -> None:
    await stored(tmp_path)
    async with world(tmp_path, disk=True) as here:
        disk = here.prefixes._disk.reading
        asked = asyncio.ensure_future(here.ask(FIRST))
        while not disk._asking:
            await asyncio.sleep(0)
        naming = here.prefixes.names.known("toy", "")
        recalled = asyncio.ensure_future(here.prefixes.recall(naming, 1 << 30))
        while disk._asking:
            assert here.prefixes.pages.filling_bytes <= 3 * PAGE_BYTES  # those of the request
            await asyncio.sleep(0)
        assert await asked == 9
        assert (await recalled).histories == [THIRD[:-1], SECOND[:-1]]


async def test_a_node_with_nothing_stored_takes_no_memory(tmp_path: Path) -> None:
    async with world(tmp_path, disk=True) as here:
        await started(here)
        assert here.arena.snapshot().pool.total_pages == 0
    async with world(tmp_path) as here:  # nor one that stores nothing
        await started(here)
        assert here.arena.snapshot().pool.total_pages == 0


async def test_a_damaged_block_ends_it_and_costs_its_own_prompt_alone(tmp_path: Path) -> None:
    await stored(tmp_path)
    files = sorted((tmp_path / "precache").rglob("*.kvb"), key=lambda path: path.stat().st_mtime)
    for path in files[-1:]:
        data = bytearray(path.read_bytes())
        data[-33] ^= 1  # the last byte of the payload, in front of its SHA-256
        path.write_bytes(data)
    async with world(tmp_path, disk=True) as here:
        await started(here)
        assert [await sources(here, prompt) for prompt in (FIRST, SECOND)] == [(9, 0)] * 2
        assert await here.ask(THIRD) < 9
        await written(here)
        here.check()


async def test_what_did_not_come_in_a_bad_moment_comes_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(tmp_path)
    async with world(tmp_path, disk=True) as here:
        pages, refused = here.prefixes.pages, iter([True, True])
        prepare = pages.prepare

        async def prepare_later(
            naming: Naming,
            length: int,
            holder: PinHolder,
            block_class: BlockClass = BlockClass.USER,
        ) -> Filling | None:
            return (
                None if next(refused, False) else await prepare(naming, length, holder, block_class)
            )

        monkeypatch.setattr(pages, "prepare", prepare_later)
        await started(here)
        assert [await sources(here, one) for one in (FIRST, SECOND, THIRD)] == [(9, 0)] * 3
        here.check()


async def test_a_slow_disk_is_waited_for_where_nobody_waits(tmp_path: Path) -> None:
    await stored(tmp_path)
    async with world(tmp_path, disk=True) as here:
        facts = here.engine.facts
        assert facts is not None
        here.engine.facts = replace(facts, prefill_tokens_per_second=1e6)
        here.prefixes._disk.reading._rate = 1.0  # as measured: computing is sooner by far
        await started(here)
        naming = here.prefixes.names.known("toy", "")
        assert naming is not None
        assert naming.compute_s(9) > 0
        assert [await sources(here, one) for one in (FIRST, SECOND, THIRD)] == [(9, 0)] * 3
        here.check()
