"""Pages, budget, disk and pins of prefixes, with an engine that is a few lines of this file."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kakeya.backends.engine.engine import EngineOptions
from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import NotFound, PeerUnavailable
from kakeya.core.units import pack_ids
from kakeya.engine.kv.blocks import plan_take
from kakeya.engine.steps.pieces import Pieces
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Done, Frame, Progress, StopReason, Tokens, Usage
from kakeya.generation.kv import KvOffer
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.memory.pages.node_arena import PAGE_BYTES, NodeArena, page_config
from kakeya.memory.pages.reader import PageReader
from kakeya.prefix.disk.store import FOLDER
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.pages.counts import Source
from kakeya.prefix.peers.source import NodeSources
from kakeya.prefix.prefixes import SWEEP_S, TEND_S, NodePrefixes
from kakeya.prefix.request.exchange import PrefixExchange
from tests.adapters.world import Plenty
from tests.backends.fake_model import FakeEngine, FakeModel
from tests.engine.child_engine import ToyModel
from tests.fakes import FakeClock, SettableClock

BLOCK = 4
FACTS = ModelFacts(
    model_id="toy",
    model_path="",
    vocab_size=1000,
    context_tokens=4096,
    eos_token_ids=(),
    base_fingerprint="weights",
    prefill_tokens_per_second=10.0,
    kv_block_tokens=BLOCK,
    kv_block_bytes=4 * BLOCK,
    kv_layout="[]",
    kv_exactness="{}",
)
ON_A_GRID = replace(FACTS, prefill_grid=((0, BLOCK),))
LARGE_STATE = replace(ON_A_GRID, kv_state_bytes=16 * BLOCK)
SEED_TEXT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


class Miser(Plenty):
    """A ledger that gives so many slabs and no more."""

    def __init__(self, slabs: int) -> None:
        self.slabs = slabs

    def may_grow(self, name: str, size: int) -> bool:
        self.slabs -= 1
        return self.slabs >= 0


@dataclass(eq=False)
class Engine:
    """The KV of a token is the token, and the logits behind a text are the text."""

    pid: int | None = 1
    facts: ModelFacts | None = FACTS
    model_id: str = "toy"
    is_busy: bool = False
    computed: list[tuple[int, ...]] = field(default_factory=list)
    says_logits: bool = False
    known: list[bool] = field(default_factory=list)

    async def is_past(self, pid: int) -> bool:
        return pid == self.pid and not self.is_busy

    def taken(self, offer: KvOffer, kv: PrefixExchange) -> int:
        """How many tokens of what it is offered a real engine takes."""
        assert self.facts is not None
        facts = replace(
            ToyModel("", Path()).facts,
            kv_block_tokens=BLOCK,
            kv_block_bytes=self.facts.kv_block_bytes,
            kv_state_bytes=self.facts.kv_state_bytes,
            prefill_grid=self.facts.prefill_grid,
        )
        request = kv._request
        pieces = Pieces(facts, len(request.token_ids) - 1, request.cuts)
        return plan_take(offer.blocks, facts, pieces).tokens

    def prefill(self, offer: KvOffer, prompt: Sequence[int], kv: PrefixExchange) -> int:
        """Import, compute the rest, export what there are pages for; tokens that were imported."""
        have = 0
        with PageReader() as reader:
            for block in offer.blocks:
                tokens = block.tokens or BLOCK
                found = bytes(reader.view(block.pages)[: 4 * tokens])
                assert found == pack_ids(prompt[have : have + tokens])
                have += tokens
        assert have == self.taken(offer, kv), "all that is offered can be taken"
        kv.imported(have)
        self.computed.append(tuple(prompt[have:]))
        for pages in offer.exports:
            start = pages.index * BLOCK
            with PageReader() as reader:
                filled = reader.fill(pages.pages)
                packed = pack_ids(prompt[start : start + (pages.tokens or BLOCK)])
                filled[: len(packed)] = packed
                filled.release()
            kv.exported(pages.index, pages.tokens)
        if self.says_logits:
            assert offer.logits in (b"", pack_ids(prompt))
            self.known.append(bool(offer.logits))
            if offer.wants_logits:
                assert not offer.logits
                kv.history_logits(pack_ids(prompt))
        return have


@dataclass(eq=False)
class World:
    prefixes: NodePrefixes
    arena: NodeArena
    engine: Engine

    def exchange(self, prompt: Sequence[int], **more: object) -> PrefixExchange:
        request = DecodeRequest(token_ids=prompt, **{"max_tokens": 1, **more})  # type: ignore[arg-type]
        found = self.prefixes.exchange(self.engine, request)
        assert found is not None
        return found

    async def ask(self, prompt: Sequence[int], **more: object) -> int:
        """A whole request; how many tokens were found."""
        found = 0

        async def decode(request: DecodeRequest, offer: KvOffer) -> AsyncIterator[Tokens | Done]:
            nonlocal found
            pid = model.engine.pid
            await asyncio.sleep(0)
            if self.engine.pid != pid:
                raise PeerUnavailable("it died")
            found = self.engine.prefill(offer, prompt, request.kv)
            if request.max_tokens:
                yield Tokens(token_ids=(1,))
            yield Done(reason=StopReason.MAX_TOKENS, usage=Usage(cached_tokens=found))

        def reborn() -> FakeEngine:
            return FakeEngine(decode, self.engine.pid or 0)

        model = FakeModel(decode, pid=self.engine.pid or 0)
        model.next_engine = reborn
        model.options = EngineOptions(max_losses_in_a_row=1000)
        async with aclosing(self.decoded(model, prompt, **more)) as frames:
            async for _ in frames:
                pass
        return found

    def decoded(
        self, model: FakeModel, prompt: Sequence[int], **more: object
    ) -> AsyncGenerator[Frame, None]:
        """A request to a model, in its turn."""
        request = DecodeRequest(token_ids=prompt, **{"max_tokens": 1, **more})  # type: ignore[arg-type]
        exchange = partial(self.prefixes.exchange, self.engine)
        return model.decode(request, exchange=exchange)

    def check(self) -> None:
        pages, pool = self.prefixes.pages, self.arena.snapshot().pool
        self.prefixes.check_integrity()
        assert pages.is_at_rest
        assert pool.pinned_pages == 0
        shelves = pages.shelves()
        assert sum(shelf.tree.stats().ram_blocks for shelf in shelves) == pool.blocks
        assert pages.used_bytes == pool.blocks * PAGE_BYTES <= pages.budget_bytes
        assert len(self.prefixes.turns.flights) == 0


@asynccontextmanager
async def world(
    folder: Path,
    *,
    pages: int = 64,
    slab: int = 8,
    budget: int | None = None,
    disk: bool = False,
    disk_bytes: int = 1 << 30,
    adapters: Sequence[str] = (),
    clock: Clock | None = None,
    ledger: Plenty | None = None,
) -> AsyncIterator[World]:
    clock = clock or SystemClock()
    arena = await asyncio.to_thread(
        lambda: NodeArena(
            folder / "arena",
            page_config(slab * PAGE_BYTES, pages * PAGE_BYTES),
            ledger=ledger or Plenty(),
            clock=clock,
            rng=random.Random(),
        )
    )

    def digest(adapter_id: str) -> str:
        if adapter_id == "gone":
            raise NotFound("no such adapter")
        return f"digest of {adapter_id.partition('#')[0]}"

    try:
        async with NodePrefixes(
            arena,
            memory_bytes=(budget if budget is not None else pages) * PAGE_BYTES,
            disk_bytes=disk_bytes if disk else 0,
            data_dir=folder,
            served=lambda: ["toy"],
            adapters=lambda: [digest(one) for one in adapters],
            adapter_digest=digest,
            clock=clock,
            rng=random.Random(1),
        ) as prefixes:
            yield World(prefixes, arena, Engine())
    finally:
        await asyncio.to_thread(arena.__exit__, None, None, None)


async def test_what_one_computed_is_found_by_the_next(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        assert await here.ask(SEED_TEXT) == 0
        assert await here.ask(SEED_TEXT) == 9
        assert await here.ask([*SEED_TEXT[:6], 99, 98, 97]) == 6
        here.check()
        tokens = here.prefixes.counts.tokens
        assert tokens[Source.PAGES] == 15
        assert tokens[Source.COMPUTED] == 10 + 1 + 3
        assert here.prefixes.status()["hit_tokens"] == 15


async def test_an_adapter_has_blocks_of_its_own_by_what_is_in_it(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        assert await here.ask(SEED_TEXT, adapter_id="one#name") == 0
        assert await here.ask(SEED_TEXT) == 0
        assert await here.ask(SEED_TEXT, adapter_id="two#name") == 0
        assert await here.ask(SEED_TEXT, adapter_id="one#other") == 9
        assert await here.ask(SEED_TEXT, adapter_id="gone") == 0
        assert await here.ask(SEED_TEXT, adapter_id="gone") == 0
        here.check()


@pytest.mark.parametrize(
    "other",
    [
        {"kv_layout": "[1]"},
        {"kv_exactness": '{"mlx":"2"}'},
        {"base_fingerprint": "others"},
        {"vocabulary_digest": "v"},
        {"quantization": "4"},
        {"dtype": "bf16"},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_an_engine_of_another_fingerprint_finds_nothing(
    tmp_path: Path, other: dict[str, str]
) -> None:
    async with world(tmp_path) as here:
        await here.ask(SEED_TEXT)
        here.engine.facts = replace(FACTS, **other)
        here.engine.pid = 2
        here.arena.engine_changed("toy", 2)
        assert await here.ask(SEED_TEXT) == 0
        here.engine.facts, here.engine.pid = FACTS, 3
        assert await here.ask(SEED_TEXT) == 9


async def test_a_model_without_blocks_or_a_name_is_served_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as here:
        for facts in (replace(FACTS, kv_block_tokens=0), replace(FACTS, base_fingerprint="")):
            here.engine.facts = facts
            assert await here.ask(SEED_TEXT) == 0
            assert await here.ask(SEED_TEXT) == 0
        assert sum("no safe name" in record.message for record in caplog.records) == 1
        here.check()


async def test_blocks_larger_than_pages_allow_are_not_kept_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path, slab=1, pages=4) as here:
        here.engine.facts = replace(FACTS, kv_block_bytes=2 * PAGE_BYTES)
        for _ in range(2):
            assert await here.ask([1, 2, 3, 4, 5]) == 0
        assert sum("larger than pages allow" in record.message for record in caplog.records) == 1
        here.check()


async def test_beyond_the_budget_the_ends_of_old_prompts_go_first(tmp_path: Path) -> None:
    clock = FakeClock()
    async with world(tmp_path, budget=4, clock=clock) as here:
        await here.ask([1, 1, 1, 1, 2, 2, 2, 2, 0])
        clock.advance(1)
        await here.ask([3, 3, 3, 3, 4, 4, 4, 4, 0])
        clock.advance(1)
        await here.ask([5, 5, 5, 5, 0])
        assert here.prefixes.counts.evicted == 1
        here.check()
        assert await here.ask([3, 3, 3, 3, 4, 4, 4, 4, 0]) == 8
        assert await here.ask([1, 1, 1, 1, 0]) == 4  # its beginning is there yet
        here.check()


async def test_a_prompt_larger_than_the_budget_is_kept_as_far_as_that_goes(tmp_path: Path) -> None:
    async with world(tmp_path, budget=3) as here:
        prompt = list(range(20))
        await here.ask(prompt)
        assert await here.ask(prompt) == 12
        here.check()


async def test_a_long_prompt_takes_half_of_the_budget_from_others_at_most(tmp_path: Path) -> None:
    async with world(tmp_path, budget=8) as here:
        for number in range(8):
            await here.ask([number] * 4 + [0])
        await here.ask([*range(100, 130)])
        assert here.prefixes.counts.evicted == 4
        assert await here.ask([*range(100, 130)]) == 4 * BLOCK
        here.check()


async def test_batch_prompts_take_room_of_batch_prompts_only(tmp_path: Path) -> None:
    batch, conversation = GenerationPriority.BATCH, [*range(3 * BLOCK), 0]
    async with world(tmp_path, budget=5) as here:
        await here.ask(conversation)
        for number in range(100, 106):
            await here.ask([number] * 4 + [0], priority=batch)
        assert here.prefixes.counts.evicted == 4
        assert await here.ask(conversation) == 3 * BLOCK
        assert await here.ask([105] * 4 + [0], priority=batch) == BLOCK
        await here.ask([*range(50, 50 + 2 * BLOCK), 0])
        await here.ask([107] * 4 + [0], priority=batch)
        assert here.prefixes.counts.evicted == 6
        assert await here.ask([*range(50, 50 + 2 * BLOCK), 0]) == 2 * BLOCK
        here.check()


@pytest.mark.parametrize("older", ["slow", "fast"])
async def test_what_is_cheap_to_have_again_goes_first_whatever_model_it_is_of(
    tmp_path: Path, older: str
) -> None:
    """A second of prefill is worth the same of any model, and age counts for all alike."""
    rates = {"slow": 10.0, "fast": 1000.0}
    first, then = older, "fast" if older == "slow" else "slow"
    clock = FakeClock()
    async with world(tmp_path, budget=8, clock=clock) as here:

        async def ask(model: str, prompt: Sequence[int]) -> int:
            here.engine.facts = replace(
                FACTS, base_fingerprint=model, prefill_tokens_per_second=rates[model]
            )
            return await here.ask(prompt)

        for model in (first, then):
            for number in range(4):
                await ask(model, [number] * 4 + [0])
                clock.advance(1)
        for number in range(4):
            await ask("fast", [100 + number] * 4 + [0])
        assert [await ask("slow", [number] * 4 + [0]) for number in range(4)] == [4] * 4
        here.check()


async def test_before_its_first_request_a_model_is_counted_as_it_says_itself(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, budget=4) as here:
        assert here.prefixes.names.known("toy", "") is None
        assert here.prefixes.bytes_of(FACTS, 3 * BLOCK) == 3 * PAGE_BYTES
        assert here.prefixes.bytes_of(FACTS, 3 * BLOCK + 1) == 4 * PAGE_BYTES
        stateful = replace(FACTS, kv_state_bytes=PAGE_BYTES)
        assert here.prefixes.bytes_of(stateful, 3 * BLOCK) == 6 * PAGE_BYTES
        assert here.prefixes.bytes_of(replace(FACTS, kv_block_tokens=0), 99) == 0


async def test_where_the_budget_holds_a_single_block_the_last_prompt_has_it(tmp_path: Path) -> None:
    async with world(tmp_path, budget=1) as here:
        for number in range(3):
            prompt = [number] * 10
            assert await here.ask(prompt) == 0
            assert await here.ask(prompt) == BLOCK
        here.check()


async def test_what_nobody_waits_for_takes_the_place_of_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, budget=8) as here:
        for number in range(7):
            await here.ask([number] * 4 + [0])
        await here.ask([*range(100, 130)], max_tokens=0, priority=GenerationPriority.SPECULATIVE)
        assert here.prefixes.counts.evicted == 0
        assert await here.ask([*range(100, 130)]) == BLOCK
        here.check()


async def test_without_pages_everybody_computes_and_nobody_waits(tmp_path: Path) -> None:
    async with world(tmp_path, ledger=Miser(0)) as here:
        assert await asyncio.gather(*(here.ask(SEED_TEXT) for _ in range(3))) == [0, 0, 0]
        assert here.prefixes.status()["pages"]["problem"]
        here.check()


async def test_what_the_arena_takes_is_no_longer_offered(tmp_path: Path) -> None:
    async with world(tmp_path, slab=8) as here:
        await here.ask(SEED_TEXT)
        await here.arena.shrink(1)
        await asyncio.sleep(0)
        here.check()
        assert here.prefixes.counts.evicted > 0
        assert await here.ask(SEED_TEXT) == 0
        assert await here.ask(SEED_TEXT) == 9
        here.check()


async def test_when_the_beginning_is_taken_what_needed_it_is_given_back(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.ask(list(range(100, 120)))
        (shelf,) = here.prefixes.pages.shelves()
        root = next(node for node in shelf.tree if node.index == 0)
        block = root.payload.block
        # As the arena does it, in the middle of its work.
        here.arena._arena.pool._evict(block)
        assert not here.prefixes.pages.is_at_rest
        await asyncio.sleep(0)
        assert here.arena.snapshot().pool.blocks == 0
        here.check()


async def test_the_end_of_an_engine_gives_back_what_it_held_and_filled(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.ask(SEED_TEXT)
        with here.exchange([*SEED_TEXT, *range(20, 40)]) as kv:
            offer = await kv.offer([*SEED_TEXT, *range(20, 40)], 1)
            assert len(offer.blocks) == 3
            assert offer.exports
            assert here.arena.snapshot().pool.pinned_pages == len(offer.blocks) + len(offer.exports)
            here.engine.pid = None
            here.arena.engine_changed("toy", None)
            assert here.arena.snapshot().pool.pinned_pages == 0
            for pages in offer.exports:
                kv.exported(pages.index, pages.tokens)  # said, but too late
            kv.ended()
            here.engine.pid = 2
            again = await kv.offer([*SEED_TEXT, *range(20, 40)], 2)
            assert len(again.blocks) == 3
            here.engine.prefill(again, [*SEED_TEXT, *range(20, 40)], kv)
            kv.ended()
        assert await here.ask([*SEED_TEXT, *range(20, 40)]) == 29
        here.check()


async def test_pages_of_a_call_that_was_cut_off_stay_until_its_engine_is_past_it(
    tmp_path: Path,
) -> None:
    """It may be writing to them still."""
    clock = FakeClock()
    async with world(tmp_path, clock=clock) as here:
        here.engine.is_busy = True
        with here.exchange(SEED_TEXT) as kv:
            offer = await kv.offer(SEED_TEXT, 1)
        for _ in range(5):
            await clock.sleep(1.0)
            assert here.arena.snapshot().pool.pinned_pages == len(offer.exports) == 3
        here.engine.is_busy = False
        await clock.sleep(1.0)
        here.check()
        assert here.prefixes.counts.rolled_back == 3


async def test_a_late_word_of_a_call_that_ended_changes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, clock=FakeClock()) as here:
        kv = here.exchange(SEED_TEXT)
        kv.imported(3)
        kv.exported(0, 0)
        kv.ended()
        with kv:
            await kv.offer(SEED_TEXT, 1)
            kv.exported(77, 0)
        kv.exported(0, 0)
        kv.imported(1)
        assert here.prefixes.counts.committed == 0


async def test_an_offer_for_an_engine_that_is_gone_is_empty(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.ask(SEED_TEXT)
        holder = here.arena.engine("toy", 1)
        with here.exchange(SEED_TEXT) as kv:
            assert await kv.offer(SEED_TEXT, 99) == KvOffer()
        assert holder.is_open
        here.check()


async def test_what_lay_only_on_disk_is_read_back_and_only_once(tmp_path: Path) -> None:
    async with world(tmp_path, disk=True) as here:
        prompt = await only_on_disk(here)
        assert await asyncio.gather(*(here.ask(prompt) for _ in range(4))) == [29] * 4
        assert here.prefixes.store.stats().counts.hits == 8
        assert here.prefixes.counts.tokens[Source.DISK] == 29
        assert here.prefixes.counts.tokens[Source.PAGES] == 3 * 29
        here.check()


async def test_what_is_wiped_from_disk_while_it_is_read_leaves_no_pages_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, disk=True) as here:
        prompt = await only_on_disk(here)
        store, (shelf,) = here.prefixes.store, here.prefixes.pages.shelves()
        read_into = store.read_into

        async def read_and_lose(block_id: BlockId, view: memoryview) -> bool:
            node = shelf.tree.node(block_id)
            found = await read_into(block_id, view)
            if node is not None and node.index == 2:
                here.prefixes.pages.unstored(shelf, block_id)
            return found

        monkeypatch.setattr(store, "read_into", read_and_lose)
        assert await here.ask(prompt) == 2 * BLOCK
        await written(here)
        here.check()


async def test_blocks_last_as_their_request_said_also_across_a_restart(tmp_path: Path) -> None:
    texts = {one: [*range(100 * one, 100 * one + 9)] for one in Retention}
    async with world(tmp_path, disk=True) as here:
        for retention, prompt in texts.items():
            await here.ask(prompt, kv_retention=retention)
        await written(here)
        assert here.prefixes.store.stats().by_retention == {"short": 2, "long": 2, "extended": 2}
    async with world(tmp_path, disk=True) as here:
        for retention, prompt in texts.items():
            assert await here.ask(prompt, kv_retention=retention) == 8 * retention.is_on_disk
        await written(here)
        assert here.prefixes.store.stats().by_retention == {"short": 2, "long": 2, "extended": 2}


async def test_what_is_for_memory_alone_goes_nowhere_else_until_it_is_asked_for_otherwise(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, disk=True) as here:
        await here.ask(SEED_TEXT, kv_retention=Retention.IN_MEMORY)
        await written(here)
        assert here.prefixes.store.ids() == ()
        (shelf,) = here.prefixes.pages.shelves()
        source = NodeSources(here.prefixes.pages, here.prefixes.store).source(shelf.seed)
        ids = here.prefixes.names.known("toy", "").chain.ids(SEED_TEXT)
        assert source.leading(ids) == ()
        assert list(source.resident()) == []
        assert await here.ask(SEED_TEXT[:5]) == 4
        await written(here)
        assert here.prefixes.store.ids() == ids[:1]
        assert source.leading(ids) == (16,)
        assert list(source.resident()) == list(ids[:1])


async def test_a_wipe_takes_everything_and_what_comes_is_kept_again(tmp_path: Path) -> None:
    prompts = [[*range(100 * one, 100 * one + 18)] for one in range(3)]
    async with world(tmp_path, disk=True) as here:
        for prompt in prompts:
            await here.ask(prompt)
        here.prefixes.keep("toy", "", prompts[0], Retention.LONG, pin="p")
        wiped = await here.prefixes.wipe()
        assert wiped.blocks == 15
        assert wiped.has_disk
        await written(here)
        here.check()
        assert here.arena.snapshot().pool.blocks == 0
        assert not [path for path in (tmp_path / FOLDER).rglob("*") if path.is_file()]
        assert await asyncio.gather(*map(here.ask, prompts)) == [0] * 3
        await written(here)
        assert len(here.prefixes.store.ids()) == 15
        assert await asyncio.gather(*map(here.ask, prompts)) == [17] * 3
    async with world(tmp_path, disk=True) as here:
        assert await here.ask(prompts[0]) == 17


async def test_a_wipe_that_leaves_files_says_so_and_their_kv_is_not_used_meanwhile(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, disk=True) as here:
        await here.ask(SEED_TEXT)
        await written(here)
        *_, last = sorted((tmp_path / FOLDER).rglob("*.kvb"))
        await asyncio.to_thread(last.unlink)
        await asyncio.to_thread(last.mkdir)
        wiped = await here.prefixes.wipe()
        assert (wiped.files, len(wiped.kept)) == (2, 1)
        assert wiped.kept[0].startswith(f"{last}: ")
        assert here.prefixes.store.ids() == ()
        assert await here.ask(SEED_TEXT) == 0
        await asyncio.to_thread(last.rmdir)
        assert (await here.prefixes.wipe()).kept == ()


async def test_what_an_engine_uses_during_a_wipe_goes_once_it_is_done(tmp_path: Path) -> None:
    prompt = [*range(100, 118)]
    async with world(tmp_path, disk=True) as here:
        await here.ask(prompt[:9])
        with here.exchange(prompt) as kv:
            offer = await kv.offer(prompt, 1)
            assert len(offer.blocks) == 2
            await here.prefixes.wipe()
            assert here.engine.prefill(offer, prompt, kv) == 8  # it reads what it was lent
        await written(here)
        here.check()
        assert await here.ask(prompt) == 0
        await written(here)
        here.check()


async def test_what_one_life_of_a_node_computed_the_next_one_reads(tmp_path: Path) -> None:
    prompt = list(range(50, 80))
    async with world(tmp_path, disk=True) as here:
        await here.ask(prompt)
    async with world(tmp_path, disk=True) as here:
        # The first request waits for the folder to be looked through.
        assert await here.ask(prompt) == 29
        assert here.prefixes.counts.tokens[Source.DISK] == 29
        assert await here.ask([*prompt[:17], 1, 2]) == 17
        await written(here)
        here.check()


async def test_under_a_smaller_cap_a_start_keeps_what_the_served_weights_can_use(
    tmp_path: Path,
) -> None:
    """Also where that was used longest ago; who it is of is known once an engine is there."""
    prompt = [*range(20, 38)]
    async with world(tmp_path, disk=True) as here:
        for weights in ("weights", "OLD WEIGHTS"):
            here.engine.facts = replace(FACTS, base_fingerprint=weights)
            await here.ask(prompt)
            await written(here)
        used_bytes = here.prefixes.store.stats().used_bytes
    async with world(tmp_path, disk=True, disk_bytes=used_bytes * 2 // 3) as here:
        store = here.prefixes.store
        await store.ready()
        await asyncio.sleep(0.05)
        assert await here.ask(prompt) == 17
        await here.prefixes._look_after()
        assert store.stats().used_bytes <= used_bytes * 2 // 3
    async with world(tmp_path, disk=True) as here:
        assert await here.ask(prompt) == 17
        uses = here.prefixes.store.stats().by_fingerprint
        assert sum(use.blocks for use in uses if use.is_usable) >= 5
        assert sum(use.blocks for use in uses) < 10


async def test_a_start_holds_the_cap_after_a_minute_though_no_engine_came(tmp_path: Path) -> None:
    async with world(tmp_path, disk=True) as here:
        await here.ask(SEED_TEXT)
    clock = FakeClock()
    async with world(tmp_path, disk=True, disk_bytes=1, clock=clock) as here:
        store = here.prefixes.store
        await store.ready()
        assert len(store.ids()) == 3
        await clock.sleep(SWEEP_S + 2 * TEND_S)
        async with asyncio.timeout(60):
            while store.ids():
                await asyncio.sleep(0.01)


async def test_blocks_of_an_adapter_can_be_used_while_the_node_has_it(tmp_path: Path) -> None:
    """Whether or not it was asked for since the start."""
    async with world(tmp_path, disk=True) as here:
        here.engine.says_logits = True
        for adapter_id in ("", "one#name", "two#name"):
            await here.ask(SEED_TEXT, adapter_id=adapter_id)
        await written(here)
    async with world(tmp_path, disk=True, adapters=["two"]) as here:
        await here.ask([1, 2])
        found = {entry.block.fingerprint: entry.block for entry in here.prefixes.store.entries()}
        usable = {
            (found[bytes.fromhex(use.fingerprint)].facts["adapter"], use.model_id)
            for use in here.prefixes.store.stats().by_fingerprint
            if use.is_usable
        }
        names = ("toy", "toy (logits)")
        assert usable == {(one, name) for one in ("", "digest of two") for name in names}


async def test_a_block_that_is_damaged_on_disk_is_computed_with_all_behind_it(
    tmp_path: Path,
) -> None:
    prompt = list(range(50, 80))
    async with world(tmp_path, disk=True) as here:
        await here.ask(prompt)
        await written(here)
    (shelf,) = here.prefixes.pages.shelves()
    third = next(node for node in shelf.tree if node.index == 2)
    (file,) = [file for file in (tmp_path / FOLDER).rglob("*.kvb") if third.id.hex() in file.name]
    broken = bytearray(file.read_bytes())
    broken[-40] ^= 1
    file.write_bytes(broken)
    async with world(tmp_path, disk=True) as here:
        await here.prefixes.store.ready()
        assert await here.ask(prompt) == 2 * BLOCK
        assert await here.ask(prompt) == 29
        await written(here)
        here.check()


async def test_prompts_that_nobody_used_in_their_time_leave_the_pages(tmp_path: Path) -> None:
    clock = FakeClock()
    async with world(tmp_path, clock=clock) as here:
        await here.ask(SEED_TEXT)
        clock.advance(Retention.LONG.seconds + 1)
        await clock.sleep(200)
        assert here.prefixes.counts.expired == 3
        here.check()


async def test_a_pinned_prefix_makes_room_for_nobody_until_it_is_released(tmp_path: Path) -> None:
    async with world(tmp_path, budget=3) as here:
        stable = [1, 1, 1, 1, 2, 2, 2, 2, 0]
        assert here.prefixes.keep("toy", "", stable, Retention.LONG, pin="p") == 0
        await here.ask(stable)
        assert here.prefixes.keep("toy", "", stable, Retention.LONG, pin="p") == 8
        assert here.prefixes.keep("toy", "", stable, Retention.LONG, pin="p") == 8
        assert here.prefixes.free_bytes() == PAGE_BYTES
        await here.ask([3, 3, 3, 3, 4, 4, 4, 4, 0])
        assert await here.ask(stable) == 8
        here.prefixes.release("p")
        here.prefixes.release("p")
        for number in range(10, 30):
            await here.ask([number] * 4 + [0])
        assert await here.ask(stable) < 8
        here.check()


async def test_pinned_blocks_are_counted_once_and_with_what_a_pin_would_add(tmp_path: Path) -> None:
    async with world(tmp_path, budget=8) as here:
        prefixes, stable = here.prefixes, [1, 1, 1, 1, 2, 2, 2, 2, 0]
        assert prefixes.pinned_bytes("toy", "", stable, "one") == 0
        await here.ask(stable)
        await here.ask([*stable[:4], 3, 3, 3, 3, 0])
        for name in ("one", "other"):
            prefixes.keep("toy", "", stable, Retention.LONG, pin=name)
        assert prefixes.pinned_bytes("toy", "", stable, "one") == 2 * PAGE_BYTES
        assert prefixes.pinned_bytes("toy", "", [*stable[:4], 3, 3, 3, 3, 0], "") == 3 * PAGE_BYTES
        prefixes.release("other")
        assert prefixes.pinned_bytes("toy", "", [9, 9, 9, 9, 0], "one") == 0
        assert prefixes.most_pinned_bytes == 4 * PAGE_BYTES


async def test_who_pins_what_another_one_pinned_has_a_pin_of_its_own(tmp_path: Path) -> None:
    async with world(tmp_path, budget=3) as here:
        stable = [1, 1, 1, 1, 2, 2, 2, 2, 0]
        await here.ask(stable)
        for name in ("one", "other"):
            here.prefixes.keep("toy", "", stable, Retention.LONG, pin=name)
        here.prefixes.release("one")
        for number in range(10, 30):
            await here.ask([number] * 4 + [0])
        assert await here.ask(stable) == 8
        here.check()


async def test_what_is_looked_after_stays_on_disk_while_there_is_no_room_in_pages(
    tmp_path: Path,
) -> None:
    clock = StillClock()
    stable = [1, 1, 1, 1, 2, 2, 2, 2, 0]
    async with world(tmp_path, disk=True, budget=2, clock=clock) as here:
        await here.ask(stable, kv_retention=Retention.SHORT)
        clock.advance(1)
        await written(here)
        for number in (3, 4):
            await here.ask([number] * 4 + [0], kv_retention=Retention.EXTENDED)
        for _ in range(12):
            clock.advance(60)
            assert here.prefixes.keep("toy", "", stable, Retention.SHORT) == 0
            await here.prefixes.store.sweep()
        assert await here.ask(stable) == 8
        assert here.prefixes.counts.tokens[Source.DISK] == 8
        await written(here)
        here.check()


async def test_a_pin_can_be_ended_when_other_weights_have_the_name_of_its_model(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, budget=3) as here:
        stable = [1, 1, 1, 1, 2, 2, 2, 2, 0]
        await here.ask(stable)
        assert here.prefixes.keep("toy", "", stable, Retention.LONG, pin="p") == 8
        here.engine.facts, here.engine.pid = replace(FACTS, base_fingerprint="others"), 4
        await here.ask([9, 9, 9, 9, 0])
        here.prefixes.release("p")
        assert here.prefixes.free_bytes() == 0
        for number in range(10, 13):  # it makes place
            await here.ask([number] * 4 + [0])
            assert await here.ask([number] * 4 + [0]) == 4
        here.check()


async def test_a_wait_ends_with_the_time_of_the_request(tmp_path: Path) -> None:
    clock = FakeClock()
    async with world(tmp_path, clock=clock) as here:
        await here.ask([9, 9])  # its engine is known
        with here.exchange(SEED_TEXT) as leader:
            await leader.offer(SEED_TEXT, 1)
            began = clock.mono()
            with here.exchange(SEED_TEXT) as kv:
                await kv.approach(0.5)
            # The leader never ends; other sleepers may have moved the clock meanwhile.
            assert clock.mono() - began >= 0.5
            assert here.prefixes.waiting == 0


async def written(here: World) -> None:
    async with asyncio.timeout(60):
        while not here.prefixes.is_at_rest:
            await asyncio.sleep(0.01)
        await here.prefixes.store.flush()
        await asyncio.sleep(0.01)


async def test_blocks_are_dirty_until_the_disk_has_them(tmp_path: Path) -> None:
    async with world(tmp_path, disk=True) as here:
        await here.ask(SEED_TEXT)
        pool = here.arena.snapshot().pool
        assert (pool.dirty_pages, pool.blocks) == (3, 3)
        await written(here)
        assert here.arena.snapshot().pool.dirty_pages == 0
        await here.ask(SEED_TEXT)
        await here.ask([*range(20)], kv_retention=Retention.IN_MEMORY)
        await written(here)
        assert here.arena.snapshot().pool.dirty_pages == 0
        here.check()


async def test_without_a_disk_nothing_is_dirty(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.ask(SEED_TEXT)
        assert here.arena.snapshot().pool.dirty_pages == 0


async def test_a_wipe_leaves_nothing_dirty(tmp_path: Path) -> None:
    async with world(tmp_path, disk=True) as here:
        await here.ask(SEED_TEXT)
        assert here.arena.snapshot().pool.dirty_pages
        await here.prefixes.wipe()
        assert here.arena.snapshot().pool.dirty_pages == 0
        here.check()


async def test_a_full_arena_has_pages_free_before_the_next_prompt_needs_them(
    tmp_path: Path,
) -> None:
    """The oldest prompt goes, from its end, and a prompt that is kept by request stays."""
    clock = FakeClock()
    async with world(tmp_path, pages=20, slab=20, clock=clock) as here:
        tending = asyncio.ensure_future(here.arena.tend())
        prompts = [[first, *range(first, first + 16)] for first in range(100, 600, 100)]
        for prompt in prompts:
            await here.ask(prompt)
            if prompt is prompts[0]:
                here.prefixes.keep("toy", "", prompt, Retention.LONG, pin="kept")
            await clock.sleep(1)
        pool = here.arena.snapshot().pool
        assert pool.evicted_pages == 0, "no allocation had to evict"
        assert pool.evicted_ahead_pages > 0
        assert pool.free_pages == 4
        assert await here.ask(prompts[0]) == 16
        assert await here.ask(prompts[1]) < 16
        here.prefixes.release("kept")
        here.check()
        tending.cancel()


async def only_on_disk(here: World) -> list[int]:
    """A prompt whose blocks lie in no page."""
    prompt = list(range(50, 80))
    await here.ask(prompt)
    await written(here)
    await here.arena.shrink(8)
    await asyncio.sleep(0)
    assert here.arena.snapshot().pool.blocks == 0
    return prompt


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 100_000))
def test_everything_is_conserved_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Requests, cancellations, deaths and evictions in any order, with small budgets."""
    folder = tmp_path_factory.mktemp("w")
    logging.disable(logging.WARNING)
    try:
        asyncio.run(live(folder, random.Random(seed)))
    finally:
        logging.disable(logging.NOTSET)


async def live(folder: Path, rng: random.Random) -> None:
    stems = [[rng.randrange(1, 4) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    async with world(
        folder,
        pages=16,
        slab=4,
        budget=rng.choice((3, 8, 16)),
        disk=rng.random() < 0.5,
        ledger=Miser(rng.randrange(1, 5)),
    ) as here:
        here.engine.says_logits = True
        here.engine.facts = rng.choice((FACTS, LARGE_STATE))
        asks: list[asyncio.Task[int]] = []
        for _ in range(30):
            prompt = rng.choice(stems) + [rng.randrange(1, 4) for _ in range(rng.randrange(1, 8))]
            match rng.randrange(8):
                case 0 if asks:
                    rng.choice(asks).cancel()
                case 1:
                    here.engine.pid = (here.engine.pid or 0) + 1
                    here.arena.engine_changed("toy", here.engine.pid)
                case 2:
                    await here.arena.shrink(1)
                case 3:
                    here.prefixes.pages.expire()
                case _:
                    priority = rng.choice(
                        (GenerationPriority.NORMAL, GenerationPriority.SPECULATIVE)
                    )
                    most = 0 if priority is GenerationPriority.SPECULATIVE else 1
                    asked = here.ask(prompt, priority=priority, max_tokens=most)
                    asks.append(asyncio.create_task(asked))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        ends = await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), 30)
        for end in ends:
            assert not isinstance(end, Exception), repr(end)
        async with asyncio.timeout(60):
            while not here.prefixes.is_at_rest:
                await asyncio.sleep(0.01)
        if here.prefixes.store is not None:
            await written(here)
        here.check()


@pytest.mark.parametrize("facts", [ON_A_GRID, LARGE_STATE])
async def test_what_ends_at_a_cut_serves_all_who_have_it_also_from_disk(
    tmp_path: Path, facts: ModelFacts
) -> None:
    shared, cuts = list(range(20, 30)), (10,)
    async with world(tmp_path, disk=True) as here:
        here.engine.facts = facts
        assert await here.ask([*shared, 1, 2, 3], cuts=cuts) == 0
        found = [await here.ask([*shared, n, n, n], cuts=cuts) for n in (4, 5)]
        assert found == [10, 10]
        # Who was cut otherwise takes no more than what lies before that, once state lies there.
        whole = 0 if facts.kv_state_bytes else 8
        assert await here.ask([*shared, 6, 6], cuts=(9,)) == whole
        assert await here.ask([*shared, 7, 7]) == 8
        # And a history that ends there has all of it.
        assert await here.ask([*shared, 0]) == 10
        await here.prefixes.store.flush()
        here.check()
    async with world(tmp_path, disk=True) as here:
        here.engine.facts = facts
        await here.prefixes.store.ready()
        assert await here.ask([*shared, 8, 8], cuts=cuts) == 10


@pytest.mark.parametrize("facts", [ON_A_GRID, LARGE_STATE])
async def test_a_turn_goes_on_from_where_the_prompt_of_the_one_before_ended(
    tmp_path: Path, facts: ModelFacts
) -> None:
    async with world(tmp_path) as here:
        here.engine.facts = facts
        first = list(range(20, 33))
        cuts = (6, len(first) - 1)
        await here.ask(first, cuts=cuts)
        second = [*first, *range(50, 57)]
        assert await here.ask(second, cuts=cuts) == len(first) - 1
        assert await here.ask(second, cuts=cuts) == len(second) - 1
        assert await here.ask([*first[:6], 9, 9, 9], cuts=(6,)) == 6
        here.check()


async def test_where_a_prompt_parts_from_one_that_lies_on_disk_both_are_found_again(
    tmp_path: Path,
) -> None:
    """State lies behind the block in which they part from then on, in pages and on disk."""
    first, second = [*range(20, 38)], [*range(20, 28), 1, 2, 3]
    async with world(tmp_path, disk=True) as here:
        here.engine.facts = LARGE_STATE
        assert await here.ask(first) == 0
    for found in (0, 10):
        async with world(tmp_path, disk=True) as here:
            here.engine.facts = LARGE_STATE
            assert await here.ask(second) == found
            assert await here.ask(second) == 10
            assert await here.ask(first) == 17
            assert await here.ask([*second[:8], found, found]) == 8
            await written(here)
            here.check()


@pytest.mark.parametrize("cut", [8, 9])
async def test_a_prompt_that_ends_where_no_state_was_kept_is_found_from_then_on(
    tmp_path: Path, cut: int
) -> None:
    """Though all of its KV is in pages. What others use of that is not taken from them."""
    long = [*range(20, 38)]
    async with world(tmp_path, disk=True) as here:
        here.engine.facts = LARGE_STATE
        await here.ask(long)
        await written(here)
        short = long[: cut + 1]
        with here.exchange(long) as kv:
            offer = await kv.offer(long, 1)
            assert await here.ask(short) == 0
            assert await here.ask(short) == cut
            assert here.engine.prefill(offer, long, kv) == 17
        assert await here.ask([*short[:8], 1, 2, 3]) == 8
        await written(here)
        here.check()
    async with world(tmp_path, disk=True) as here:
        here.engine.facts = LARGE_STATE
        assert await here.ask(short) == cut
        assert await here.ask(long) == 17


async def test_a_prompt_is_counted_though_its_caller_leaves_before_the_end(tmp_path: Path) -> None:
    """As at a stop string."""
    prompt = list(range(20, 38))
    async with world(tmp_path) as here:
        for _ in range(2):

            async def decode(request: DecodeRequest, offer: KvOffer) -> AsyncIterator[Frame]:
                found = here.engine.prefill(offer, prompt, request.kv)
                yield Progress(computed_tokens=17, total_tokens=17, cached_tokens=found)
                yield Tokens(token_ids=(1,))
                yield Tokens(token_ids=(2,))

            decoded = here.decoded(FakeModel(decode), prompt, max_tokens=2)
            async with aclosing(decoded) as frames:
                while not isinstance(await anext(frames), Tokens):
                    pass
        found = here.prefixes.counts.tokens
        assert (found[Source.PAGES], found[Source.COMPUTED]) == (17, 19)
        here.check()


async def test_of_eight_who_share_up_to_a_cut_one_computes_it(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.engine.facts = ON_A_GRID
        shared = list(range(20, 30))
        asked = [here.ask([*shared, n, n, n], cuts=(10,)) for n in range(8)]
        assert sorted(await asyncio.gather(*asked)) == [0, *[10] * 7]
        here.check()


class StillClock(SettableClock):
    """Moved on by hand alone."""

    def mono(self) -> float:
        return 1000.0 + self._ahead_s


async def test_blocks_are_written_once_no_more_come_for_a_moment_and_soon_in_any_case(
    tmp_path: Path,
) -> None:
    clock = StillClock()
    async with world(tmp_path, disk=True, clock=clock) as here:
        store = here.prefixes.store
        for number in range(4):
            await here.ask([*range(100 * number, 100 * number + 9)])
            await passing(clock, 0.09)
            assert not store.ids(), "another one follows within a tenth of a second"
        await passing(clock, 0.02)
        await written(here)
        assert len(store.ids()) == 8
        for number in range(4, 10):
            await here.ask([*range(100 * number, 100 * number + 9)])
            await passing(clock, 0.09)
        await store.flush()
        assert len(store.ids()) > 8, "half a second is over"


async def test_what_waits_to_be_written_is_written_when_a_node_ends(tmp_path: Path) -> None:
    async with world(tmp_path, disk=True) as here:
        await here.ask(SEED_TEXT)
        assert not here.prefixes.is_at_rest
    async with world(tmp_path, disk=True) as here:
        assert await here.ask(SEED_TEXT) == 9


async def passing(clock: StillClock, seconds: float) -> None:
    """Let time pass for those that sleep."""
    clock.advance(seconds)
    await asyncio.sleep(0.05)
