"""Logits behind whole prompts: for whom they are kept, for how long, and that a start has them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kakeya.cli.cache import models_of
from kakeya.core.clock import SystemClock
from kakeya.core.units import pack_ids
from kakeya.generation.request import GenerationPriority, Sampling
from kakeya.generation.retention import Retention
from kakeya.prefix.disk.files import BlockFolder
from kakeya.prefix.disk.store import FOLDER
from kakeya.prefix.names.endings import LIMIT_BYTES
from kakeya.prefix.peers.source import NodeSources
from kakeya.prefix.warm.recall import PrefixStart
from tests.prefix.test_prefixes import FACTS, SEED_TEXT, World, world, written
from tests.prefix.world import Answer, Node, ask, node, text

OTHER = [*SEED_TEXT[:-1], 99]


@asynccontextmanager
async def telling(folder: Path, *, is_back: bool = False) -> AsyncIterator[World]:
    """A node with a disk whose engine tells of logits; with what a start brings back, if so."""
    async with world(folder, disk=True) as here:
        here.engine.says_logits = True
        if is_back:
            async with PrefixStart(here.prefixes, clock=SystemClock()) as start:
                start.ready(here.engine)
                await start.at_rest.wait()
        yield here


async def known(here: World, prompt: Sequence[int], **more: object) -> bool:
    """Ask; whether the engine was given the logits."""
    await here.ask(prompt, **more)
    return here.engine.known[-1]


async def test_they_are_given_to_who_asks_the_very_same_again(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        assert not await known(here, SEED_TEXT)
        assert await known(here, SEED_TEXT)
        for other in (OTHER, SEED_TEXT[:-1], [*SEED_TEXT, 1], [8, *SEED_TEXT[1:]]):
            assert not await known(here, other)
        assert not await known(here, SEED_TEXT, cuts=(2,))
        assert not await known(here, SEED_TEXT, adapter_id="a#1")
        assert here.prefixes.status()["logits"] == {
            "prompts": 7,
            "bytes": here.prefixes.endings.held_bytes,
            "reused": 1,
        }
        reused = [one for one in here.prefixes.figures() if one.name.endswith("_logits_reused")]
        assert [one.values for one in reused] == [{(): 1}]
        assert here.engine.computed[1] == (SEED_TEXT[-1],), "its KV is given to it as ever"


async def test_what_is_only_warmed_has_none_and_wants_none(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        assert not await known(
            here, SEED_TEXT, max_tokens=0, priority=GenerationPriority.SPECULATIVE
        )
        assert here.prefixes.endings.count == 0
        assert not await known(here, SEED_TEXT)
        assert not await known(here, SEED_TEXT, max_tokens=0)


async def test_a_request_that_goes_on_after_its_engine_died_wants_none(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        with here.exchange(SEED_TEXT, max_tokens=4) as kv:
            assert (await kv.offer(SEED_TEXT, 1)).wants_logits
            kv._ending.answered()
            going_on = await kv.offer([*SEED_TEXT, 1], 1)
            assert (going_on.wants_logits, going_on.logits) == (False, b"")


async def test_a_late_or_second_word_changes_nothing(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        with here.exchange(SEED_TEXT) as kv:
            kv.history_logits(b"early")
            await kv.offer(SEED_TEXT, 1)
            kv.ended()
            kv.history_logits(b"late")
            await kv.offer(SEED_TEXT, 1)
            kv.history_logits(pack_ids(SEED_TEXT))
            kv.history_logits(b"twice")
        assert here.prefixes.endings.count == 1
        assert await known(here, SEED_TEXT)


async def test_a_start_brings_them_back_with_their_blocks(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        for prompt in (SEED_TEXT, OTHER):
            await here.ask(prompt)
        await written(here)
    async with telling(tmp_path) as here:
        assert not await known(here, SEED_TEXT), "no request waits for the disk"
    async with telling(tmp_path, is_back=True) as here:
        assert await known(here, SEED_TEXT)
        assert await known(here, OTHER)


async def test_those_that_were_used_last_come_back_within_the_bound(tmp_path: Path) -> None:
    prompts = [[*range(10 * one, 10 * one + 10)] for one in range(1, 5)]
    async with telling(tmp_path) as here:
        for prompt in prompts:
            await here.ask(prompt)
            await written(here)
    async with world(tmp_path, disk=True) as here:
        here.prefixes.endings._kept.limit_bytes = 2 * 40
        here.engine.says_logits = True
        await here.prefixes.store.ready()
        await here.prefixes.endings.recall()
        assert here.prefixes.endings.held_bytes == 2 * 40
        assert await known(here, prompts[2])
        assert await known(here, prompts[3])
        await here.prefixes.endings.recall()  # once
        assert not await known(here, prompts[1])


async def test_a_sweep_of_batch_documents_leaves_those_of_a_conversation(tmp_path: Path) -> None:
    documents = [[*range(10 * one, 10 * one + 10)] for one in range(1, 9)]
    async with telling(tmp_path) as here:
        here.prefixes.endings._kept.limit_bytes = 4 * 40
        here.engine.facts = replace(FACTS, vocab_size=40)
        await here.ask(SEED_TEXT)
        for document in documents:
            assert not await known(here, document, priority=GenerationPriority.BATCH)
        assert await known(here, SEED_TEXT)
        assert await known(here, documents[-1], priority=GenerationPriority.BATCH)
        await written(here)
    async with telling(tmp_path, is_back=True) as here:
        assert here.prefixes.endings.count == 1
        assert await known(here, SEED_TEXT)


async def test_what_is_for_memory_alone_is_on_no_disk(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        await here.ask(SEED_TEXT, kv_retention=Retention.IN_MEMORY)
        await written(here)
        assert here.prefixes.store.ids() == ()
        assert await known(here, SEED_TEXT, kv_retention=Retention.IN_MEMORY)


async def test_the_longest_that_anybody_asked_for_holds(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        for retention in (Retention.SHORT, Retention.EXTENDED, Retention.LONG):
            await here.ask(SEED_TEXT, kv_retention=retention)
            await written(here)
        assert here.prefixes.store.stats().by_retention == {"extended": 4}


async def test_a_wipe_takes_them_from_memory_and_disk_also_while_they_come_back(
    tmp_path: Path,
) -> None:
    async with telling(tmp_path) as here:
        await here.ask(SEED_TEXT)
        await here.prefixes.wipe()
        await written(here)
        assert here.prefixes.endings.count == 0
        assert not [path for path in (tmp_path / FOLDER).rglob("*") if path.is_file()]
        assert not await known(here, SEED_TEXT)
        await written(here)
    async with telling(tmp_path) as here:
        await here.prefixes.store.ready()
        coming = asyncio.create_task(here.prefixes.endings.recall())
        await asyncio.sleep(0)  # it reads
        await here.prefixes.wipe()
        await coming
        assert here.prefixes.endings.count == 0


async def test_a_damaged_file_costs_its_own_prompt_alone(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        for prompt in (SEED_TEXT, OTHER):
            await here.ask(prompt)
        await written(here)
        entries = here.prefixes.store.entries()
    bad = next(e for e in entries if e.block.facts.get("holds") and e.block.token_ids == (99,))
    (file,) = (tmp_path / FOLDER).rglob(bad.name)
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    async with telling(tmp_path, is_back=True) as here:
        assert await known(here, SEED_TEXT)
        assert not await known(here, OTHER)


async def test_they_are_shown_for_what_they_are_and_offered_to_no_peer(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        await here.ask(SEED_TEXT)
        await written(here)
        sources = NodeSources(here.prefixes.pages, here.prefixes.store)
        assert [one.model_id for one in sources.fingerprints()] == ["toy"]
        folder = BlockFolder(tmp_path / FOLDER, quarantine_bytes=0)
        contents = await asyncio.to_thread(folder.scan, sets_aside=False)
        shown = {use.model_id: (use.blocks, use.tokens) for use in models_of(contents, 0.0)}
        assert shown == {"toy": (3, 9), "toy (logits)": (1, 1)}
    async with world(tmp_path, disk=True) as here:
        sources = NodeSources(here.prefixes.pages, here.prefixes.store)
        await here.prefixes.store.ready()
        assert [one.model_id for one in sources.fingerprints()] == ["toy"]
        await here.ask([1, 2, 3])
        usable = {use.model_id: use.is_usable for use in here.prefixes.store.stats().by_fingerprint}
        assert usable == {"toy": True, "toy (logits)": True}
        assert here.prefixes.status()["models"] == [{"model_id": "toy", "blocks": 1, "on_disk": 3}]
        json.dumps(here.prefixes.status())


async def test_those_of_a_large_vocabulary_are_passed_over(tmp_path: Path) -> None:
    async with telling(tmp_path) as here:
        for size, is_wanted in ((LIMIT_BYTES // 4, True), (LIMIT_BYTES // 4 + 1, False)):
            here.engine.facts = replace(FACTS, vocab_size=size)
            with here.exchange(SEED_TEXT) as kv:
                assert (await kv.offer(SEED_TEXT, 1)).wants_logits == is_wanted
        here.engine.facts = FACTS
        with here.exchange(SEED_TEXT) as kv:
            await kv.offer(SEED_TEXT, 1)
            kv.history_logits(bytes(LIMIT_BYTES + 4))
        await written(here)
        assert here.prefixes.endings.count == 0
        assert not [e for e in here.prefixes.store.entries() if e.block.facts.get("holds")]


# With a real engine

WAYS = (
    Sampling(),
    Sampling(temperature=0.9, seed=5),
    Sampling(temperature=1.2, top_k=9, top_p=0.9, seed=6),
)


async def ways(here: Node, prompt: Sequence[int], count: int) -> list[Answer]:
    return [await ask(here, prompt, count, sampling=way) for way in WAYS]


async def test_an_answer_is_the_same_with_logits_that_outlived_engine_and_node(
    tmp_path: Path,
) -> None:
    prompt = text(1, 300)
    async with node(tmp_path) as first:
        await first.model.ready(60)
        cold = await ways(first, text(2, 300), 9) + await ways(first, prompt, 9)
        assert first.prefixes.counts.logits_reused == 4
        os.kill(first.model.pid, signal.SIGKILL)
        assert (await ask(first, prompt, 9)).tokens == cold[3].tokens
        assert first.prefixes.counts.logits_reused == 5
        await first.settled()
        first.check_conserved()
    async with node(tmp_path) as second:
        await second.model.ready(60)
        async with asyncio.timeout(60):
            while second.prefixes.endings.count < 2:
                await asyncio.sleep(0.02)
        warm = await ways(second, text(2, 300), 9) + await ways(second, prompt, 9)
        assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
        assert {answer.cached for answer in warm} == {299}
        assert second.prefixes.counts.logits_reused == 6
        (one,) = (await ask(second, prompt, 1)).tokens
        assert one == cold[3].tokens[0]
        await second.settled()
        second.check_conserved()
