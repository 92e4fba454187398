"""Ten thousand adapters on a real disk and in real pages under a Zipf load. Figures are printed."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from kakeya.memory.adapters import Tier, TierRules
from tests.memory.adapter_folders import write_adapter
from tests.node.adapter_world import TINY, world

REGISTERED = 10_000
USES = 20_000
CLIENTS = 32
SLOTS = 100


@pytest.mark.slow
async def test_ten_thousand_adapters_are_registered_used_and_found_again(tmp_path: Path) -> None:
    path = "model.layers.0.self_attn.k_proj"
    rng = np.random.default_rng(3)
    arrays = {
        f"{path}.lora_a": rng.normal(size=(256, 1)).astype(np.float32),
        f"{path}.lora_b": rng.normal(size=(1, 128)).astype(np.float32),
    }
    source = await asyncio.to_thread(write_adapter, tmp_path / "one", arrays, rank=1)
    weights = 1.0 / np.arange(1, REGISTERED + 1) ** 1.3
    drawn = iter(rng.choice(REGISTERED, size=USES, p=weights / weights.sum()).tolist())
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
            for number in drawn:
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
        best = weights[:SLOTS].sum() / weights.sum()
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
