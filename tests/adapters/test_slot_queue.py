"""The queue for one model's slots: which adapter yields, for how long, and which requests wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kakeya.adapters import slot_queue
from kakeya.adapters.batch import AGE_S
from kakeya.adapters.files.store import AdapterRecord, AdapterStore
from kakeya.adapters.lease import AdapterUse
from kakeya.adapters.tiers import Adapter, TierRules
from kakeya.core.errors import CapacityExhausted, KakeyaError, LoadFailed, QueueFull
from tests.adapters.world import World, waiting, world
from tests.fakes import SettableClock
from tests.waiting import until


@asynccontextmanager
async def moved_by_hand(folder: Path, slots: int) -> AsyncIterator[tuple[World, SettableClock]]:
    clock = SettableClock()
    async with world(folder, slots=slots, clock=clock) as node:
        yield node, clock


class SlowDisk:
    """Reading one adapter ends when it is told to, and then as it would have anyway."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self._load = AdapterStore.load
        self._asked = threading.Event()
        self._goes_on = threading.Event()

    def load(self, store: AdapterStore, record: AdapterRecord) -> bytes:
        if record.model_id == self._model_id:
            self._asked.set()
            self._goes_on.wait()
        return self._load(store, record)

    async def asked(self) -> None:
        await until(self._asked.is_set)

    def go_on(self) -> None:
        self._goes_on.set()


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch, model_id: str) -> Iterator[SlowDisk]:
    disk = SlowDisk(model_id)
    with monkeypatch.context() as patch:
        patch.setattr(AdapterStore, "load", lambda store, record: disk.load(store, record))
        try:
            yield disk
        finally:
            disk.go_on()


def adapter_of(node: World, model_id: str) -> Adapter:
    return node.adapters._table.get(node.adapters.find(model_id).version)


async def waiting_long(
    node: World, clock: SettableClock, model_id: str, then: Adapter
) -> asyncio.Task[AdapterUse]:
    """Somebody who waits until another adapter yields."""
    task = asyncio.create_task(node.adapters.acquire(model_id))
    await until(lambda: waiting(node) == 1)
    clock.advance(AGE_S)
    await until(lambda: then.is_yielding)
    return task


async def test_an_adapter_yields_no_longer_than_somebody_waits_for_its_slot(
    tmp_path: Path,
) -> None:
    async with moved_by_hand(tmp_path, slots=1) as (node, clock):
        busy, rare = await node.add(1), await node.add(2)
        running = await node.adapters.acquire(busy)
        rarely = await waiting_long(node, clock, rare, adapter_of(node, busy))
        held_up = asyncio.create_task(node.adapters.acquire(busy))
        await until(lambda: waiting(node) == 2)
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


async def test_a_refused_request_is_told_when_a_slot_is_expected_by_those_that_came_free(
    tmp_path: Path,
) -> None:
    async with moved_by_hand(tmp_path, slots=1) as (node, clock):
        held, late, *wanted = [await node.add(seed) for seed in range(1, 6)]
        use = await node.adapters.acquire(held)
        asks = {asyncio.create_task(node.adapters.acquire(one)) for one in wanted}
        await until(lambda: waiting(node) == len(wanted))
        for _ in range(2):
            clock.advance(10)
            use.release()
            granted, asks = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
            (use,) = [await one for one in granted]
        for _ in range(2):
            with pytest.raises(CapacityExhausted, match="no slot within") as refused:
                await node.adapters.acquire(late, patience_s=0.05)
            assert refused.value.retry_after_s is not None
            assert refused.value.retry_after_s >= 10
        use.release()
        for one in asks:
            (await one).release()
        use = await node.adapters.acquire(held)
        clock.advance(1000)
        with pytest.raises(CapacityExhausted, match="no slot within") as refused:
            await node.adapters.acquire(late, patience_s=0.05)
        assert refused.value.retry_after_s == 1, "of a time at which none waited"
        use.release()


async def test_one_adapter_that_comes_slowly_from_disk_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, slots=2) as node:
        slow, first, second = [await node.add(seed) for seed in (1, 2, 3)]
        with slow_disk(monkeypatch, slow) as disk:
            asks = [asyncio.create_task(node.adapters.acquire(slow)) for _ in range(2)]
            await until(lambda: waiting(node) == 2)
            for model_id in (first, second, first):
                with await node.adapters.acquire(model_id, patience_s=10):
                    assert not any(ask.done() for ask in asks)
            await until(lambda: node.engine.lent == 2)  # it is not given away meanwhile
            disk.go_on()
            for ask in asks:
                (await ask).release()
        assert node.engine.loads.count(adapter_of(node, slow).adapter_id) == 1
        await until(lambda: not (node.engine.lent or waiting(node)))


async def test_a_request_that_waits_for_a_disk_has_the_age_of_its_whole_wait_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with moved_by_hand(tmp_path, slots=1) as (node, clock):
        slow, held, busy = [await node.add(seed) for seed in (1, 2, 3)]
        (await node.adapters.acquire(busy)).release()
        running = await node.adapters.acquire(held)
        with slow_disk(monkeypatch, slow) as disk:
            first = asyncio.create_task(node.adapters.acquire(slow))
            await until(lambda: waiting(node) == 1)
            clock.advance(AGE_S)
            others = [asyncio.create_task(node.adapters.acquire(busy)) for _ in range(3)]
            await until(lambda: waiting(node) == 4)
            disk.go_on()
            await until(lambda: adapter_of(node, slow).is_warm)
        running.release()
        (await first).release()
        for other in others:
            (await other).release()
        order = [adapter_of(node, model_id).adapter_id for model_id in (slow, busy)]
        assert node.engine.loads[-2:] == order


async def test_who_waits_for_a_disk_waits_no_longer_than_told_and_counts_as_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_queue, "MAX_WAITING", 1)
    async with world(tmp_path) as node:
        slow = await node.add(1)
        with slow_disk(monkeypatch, slow) as disk:
            ask = asyncio.create_task(node.adapters.acquire(slow, patience_s=0.1))
            await until(lambda: waiting(node) == 1)
            with pytest.raises(QueueFull, match="1 requests wait"):
                await node.adapters.acquire(slow)
            with pytest.raises(CapacityExhausted, match="no slot within"):
                await ask
            assert waiting(node) == 0
            disk.go_on()
        (await node.adapters.acquire(slow)).release()


async def test_all_who_wait_for_a_damaged_one_hear_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as node:
        damaged = await node.add(1)
        (path,) = node.folder.glob("*.klora")
        path.write_bytes(path.read_bytes()[:-9])
        with slow_disk(monkeypatch, damaged) as disk:
            asks = [asyncio.create_task(node.adapters.acquire(damaged)) for _ in range(3)]
            await until(lambda: waiting(node) == 3)
            disk.go_on()
            told = await asyncio.gather(*asks, return_exceptions=True)
        assert isinstance(told[0], LoadFailed)
        for one in told:
            assert isinstance(one, KakeyaError)
            assert "damaged on disk" in one.message
        await until(lambda: not node.adapters.status()["retired"])


async def test_nobody_is_brought_from_disk_while_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rebalance reads a deserving adapter beside the queue; it comes in afterwards."""
    async with world(tmp_path, rules=TierRules(hot_uses=3)) as node:
        popular, other = await node.add(1), await node.add(2)
        for _ in range(3):
            (await node.adapters.acquire(popular)).release()
        node.engine.restart(node.adapters)
        node.adapters.cool(popular)
        with slow_disk(monkeypatch, popular) as disk:
            balance = asyncio.create_task(node.adapters.rebalance())
            await disk.asked()
            (await node.adapters.acquire(other, patience_s=10)).release()
            disk.go_on()
            await balance
        await node.adapters.rebalance()
        await until(lambda: adapter_of(node, popular).is_hot)
