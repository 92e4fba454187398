"""Ten thousand adapters on a real disk and in real pages under a Zipf load. Figures are printed.

Once with a toy engine, which only reads the pages, so that there are many uses and slots; and once
with a real engine in a process of its own, which answers requests with trained adapters.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.adapter_acquire import record
from kakeya.adapters.files.packed import pack
from kakeya.adapters.files.store import AdapterStore
from kakeya.adapters.tiers import Tier, TierRules
from kakeya.backends.adapted import AdaptedModel
from kakeya.backends.resident import ResidentModel
from kakeya.generation.frames import Done, Tokens
from kakeya.generation.request import DecodeRequest
from kakeya.memory.pages.content import ContentType
from kakeya.node.adapters import ADAPTER_FOLDER, NodeAdapters
from tests.adapters.adapter_folders import write_adapter
from tests.adapters.world import TINY, world
from tests.node.test_adapters_node import NAMES, TRAINED, in_process

REGISTERED = 10_000
USES = 20_000
CLIENTS = 32
SLOTS = 100
ANSWERED = 2_000
"""Requests to the real engine, each of some tokens."""
PROMPTS = ((40, 50, 60), (7, 300, 12, 99), (500, 21))


def drawn(count: int) -> Iterator[int]:
    """Numbers of adapters, the first ones the most often."""
    weights = 1.0 / np.arange(1, REGISTERED + 1) ** 1.3
    rng = np.random.default_rng(3)
    return iter(rng.choice(REGISTERED, size=count, p=weights / weights.sum()).tolist())


@pytest.mark.slow
async def test_ten_thousand_adapters_are_registered_used_and_found_again(tmp_path: Path) -> None:
    path = "model.layers.0.self_attn.k_proj"
    rng = np.random.default_rng(3)
    arrays = {
        f"{path}.lora_a": rng.normal(size=(256, 1)).astype(np.float32),
        f"{path}.lora_b": rng.normal(size=(1, 128)).astype(np.float32),
    }
    source = await asyncio.to_thread(write_adapter, tmp_path / "one", arrays, rank=1)
    uses = drawn(USES)
    rules = TierRules(hot_uses=3)
    async with world(tmp_path, slots=SLOTS, pages=512, rules=rules) as node:
        began = time.perf_counter()
        for number in range(REGISTERED):
            await node.adapters.register(f"a{number}", TINY, source)
        register_s = time.perf_counter() - began
        disk = await asyncio.to_thread(
            lambda: sum(file.stat().st_size for file in node.folder.iterdir())
        )

        async def client() -> None:
            for number in uses:
                with await node.adapters.acquire(f"{TINY}:a{number}") as lease:
                    assert lease.adapter_id in node.engine.held
                    await asyncio.sleep(0)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        load_s = time.perf_counter() - began
        times = node.adapters.times
        assert sum(taken.total for taken in times.values()) == USES
        assert node.engine.most <= SLOTS
        pool = node.arena.snapshot().pool
        assert pool.pinned_pages == 0
        assert pool.total_pages <= 512
        hot = times[Tier.HOT].total / USES
        best = sum(number < SLOTS for number in drawn(USES)) / USES
        print(
            f"registered {REGISTERED} in {register_s:.0f} s ({disk / 1e6:.0f} MB), {USES} uses in "
            f"{load_s:.0f} s: hot {hot:.3f} (the first {SLOTS} draw {best:.3f}), "
            f"warm {times[Tier.WARM].total}, cold {times[Tier.COLD].total}, "
            f"{pool.evicted_pages} pages evicted"
        )
        assert hot > 0.8 * best
        assert not any(health.failures for health in node.adapters.health())
    began = time.perf_counter()
    async with world(tmp_path, slots=SLOTS, pages=512) as node:
        print(f"found again in {time.perf_counter() - began:.2f} s")
        assert len(node.adapters.records()) == REGISTERED


def fill(folder: Path) -> None:
    """Write what registering would: adapter `number` has the bytes of one of the trained ones."""
    store, trained = AdapterStore(folder), [pack(TRAINED / name) for name in NAMES]
    for number in range(REGISTERED):
        packed = trained[number % len(NAMES)]
        store.save(record(f"a{number}", packed), packed)


class Asking:
    """Requests with adapters to a real engine."""

    def __init__(self, base: ResidentModel, adapters: NodeAdapters) -> None:
        self._base = base
        self._manager = adapters.manager

    async def said(self, number: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens of one request."""
        name = f"{TINY}:a{number}"
        model = AdaptedModel(self._base, name, "", self._manager)
        request = DecodeRequest(token_ids=prompt, max_tokens=8)
        frames = [frame async for frame in model.decode(request)]
        assert isinstance(frames[-1], Done)
        return tuple(i for frame in frames if isinstance(frame, Tokens) for i in frame.token_ids)


@pytest.mark.slow
async def test_a_real_engine_answers_with_ten_thousand_adapters_as_with_each_alone(
    tmp_path: Path,
) -> None:
    await asyncio.to_thread(fill, tmp_path / ADAPTER_FOLDER)
    began = time.perf_counter()
    async with in_process(tmp_path) as (memory, adapters):
        start_s = time.perf_counter() - began
        manager, engine = adapters.manager, memory.engines.get(TINY)
        assert len(manager.records()) == REGISTERED
        asking = Asking(engine, adapters)
        alone = {
            (kind, prompt): await asking.said(kind, prompt)
            for kind in range(len(NAMES))
            for prompt in PROMPTS
        }
        assert len({tuple(alone[kind, one] for one in PROMPTS) for kind in range(len(NAMES))}) == 8
        uses = enumerate(drawn(ANSWERED))

        async def client() -> None:
            for turn, number in uses:
                prompt = PROMPTS[turn % len(PROMPTS)]
                said = await asking.said(number, prompt)
                assert said == alone[number % len(NAMES), prompt], f"a{number}"

        began = time.perf_counter()
        async with asyncio.timeout(600):
            await asyncio.gather(*(client() for _ in range(CLIENTS)))
        load_s = time.perf_counter() - began
        totals = {tier: taken.total for tier, taken in manager.times.items()}
        print(
            f"{REGISTERED} found in {start_s:.1f} s, {ANSWERED} answers in {load_s:.0f} s: "
            + ", ".join(f"{tier.name.lower()} {total}" for tier, total in totals.items())
        )
        assert totals[Tier.COLD] > len(NAMES)
        assert sum(manager.describe(record).leases for record in manager.records()) == 0
        line = manager.status()["models"][TINY]
        assert line["waiting"] == 0
        held = await engine.backend.adapters()
        assert sorted(held) == sorted(one["adapter"] for one in line["hot"])
        assert len(held) <= line["slots"]
        pool = adapters.arena.snapshot().pool
        assert pool.pinned_pages == 0
        assert pool.free_pages + sum(pages for _, pages in pool.by_content) == pool.total_pages
        blocks = adapters.arena._arena.pool.blocks()
        packed = [one for one in blocks if one.tenant.content is ContentType.LORA_WEIGHT]
        assert len(packed) == manager.status()["warm"]
        assert not any(health.failures for health in manager.health())
