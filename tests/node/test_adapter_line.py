"""The line in front of one model's slots: who yields, for how long, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kakeya.memory.adapter_batch import AGE_S
from kakeya.memory.adapters import Adapter
from kakeya.node.adapter_lease import AdapterLease
from tests.fakes import SettableClock
from tests.node.adapter_world import TINY, World, settled, world


@asynccontextmanager
async def moved_by_hand(folder: Path, slots: int) -> AsyncIterator[tuple[World, SettableClock]]:
    clock = SettableClock()
    async with world(folder, slots=slots, clock=clock) as node:
        yield node, clock


def adapter_of(node: World, model_id: str) -> Adapter:
    return node.adapters._table.get(node.adapters.find(model_id).version)


async def waiting_long(
    node: World, clock: SettableClock, model_id: str, then: Adapter
) -> asyncio.Task[AdapterLease]:
    """Somebody who waits until another adapter yields."""
    task = asyncio.create_task(node.adapters.acquire(model_id))
    await settled(lambda: node.adapters.status()["models"][TINY]["waiting"] == 1)
    clock.advance(AGE_S)
    await settled(lambda: then.is_yielding)
    return task


async def test_an_adapter_yields_no_longer_than_somebody_waits_for_its_slot(
    tmp_path: Path,
) -> None:
    async with moved_by_hand(tmp_path, slots=1) as (node, clock):
        busy, rare = await node.add(1), await node.add(2)
        running = await node.adapters.acquire(busy)
        rarely = await waiting_long(node, clock, rare, adapter_of(node, busy))
        held_up = asyncio.create_task(node.adapters.acquire(busy))
        await settled(lambda: node.adapters.status()["models"][TINY]["waiting"] == 2)
        rarely.cancel()
        await asyncio.gather(rarely, return_exceptions=True)
        (await node.adapters.acquire(busy, patience_s=5)).release()
        (await held_up).release()
        running.release()


async def test_who_got_another_slot_needs_nobody_to_yield_any_more(tmp_path: Path) -> None:
    async with moved_by_hand(tmp_path, slots=2) as (node, clock):
        first, second, rare = [await node.add(seed) for seed in (1, 2, 3)]
        running = await node.adapters.acquire(first)
        others = [await node.adapters.acquire(second) for _ in range(2)]
        rarely = await waiting_long(node, clock, rare, adapter_of(node, first))
        for other in others:
            other.release()
        with await rarely, await node.adapters.acquire(first, patience_s=5):
            assert set(node.engine.held) >= {running.adapter_id, adapter_of(node, rare).adapter_id}
        running.release()
