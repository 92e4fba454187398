"""Leases as the arbiter is asked for them, on a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kakeya.core import errors
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.resident import TEXT_TARGET, RequestPriority, Warmth
from kakeya.memory.leases import rules
from kakeya.memory.leases.jobs import Jobs
from kakeya.memory.leases.lease import Book, LeaseState, Process, Wish
from kakeya.memory.leases.rules import MachineSight
from tests.fakes import FakeClock

USE_S = 25.0


class Sleeper:
    """A text model: a request says for how long it generates."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    async def load(self, model_key: str) -> Loaded:
        return Loaded(backend=model_key)

    async def unload(self, model_key: str, backend: object) -> None:
        del model_key, backend

    async def run(self, backend: object, payload: object) -> object:
        assert isinstance(payload, float)
        await self._clock.sleep(payload)
        return backend


@pytest.mark.parametrize("priority", [RequestPriority.URGENT, RequestPriority.BATCH])
async def test_a_lease_has_its_turn_though_a_model_is_never_idle(priority: RequestPriority) -> None:
    clock, book = FakeClock(), Book()
    asked = Wish(name="train", size_bytes=60, priority=priority)
    sight = MachineSight(boot="b", now_mono=clock.mono(), living={})
    book, _ = rules.ask(book, asked, "L", Process(1, "1", "s"), sight)
    granted = asyncio.Event()

    async def write(decide: Callable[[Book], Book], until: asyncio.Event) -> None:
        del until
        nonlocal book
        book = decide(book)
        if book.leases["L"].state is LeaseState.GRANTED:
            granted.set()

    async with MemoryArbiter(budget=100, clock=clock, grace_s=0) as arbiter:
        arbiter.register(
            Capability(
                name="text",
                role=TEXT_TARGET,
                handler=Sleeper(clock),
                estimate=lambda _: 60,
                warmth=Warmth(stay_warm_s=300),
                concurrency=8,
            )
        )
        jobs = Jobs(arbiter, clock=clock, write=write)

        async def client(begins_s: float) -> None:
            await clock.sleep(begins_s)
            while not granted.is_set():
                try:
                    await arbiter.request("text", "m", USE_S)
                except errors.MemoryRefused:  # the lease has the room by now
                    await clock.sleep(1)

        async def follow() -> None:
            await clock.sleep(USE_S)
            began_mono = clock.mono()
            while not granted.is_set():
                assert clock.mono() - began_mono < 3 * USE_S
                jobs.follow(book, is_granter=True)
                await clock.sleep(0.5)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(client(USE_S * number / 4))
            group.create_task(follow())
        await jobs.aclose()
