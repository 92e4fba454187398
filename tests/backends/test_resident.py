"""A model of the node, in memory or not, as its callers wait for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from kakeya.backends.resident import TEXT, ResidentModel
from kakeya.generation.request import GenerationPriority
from kakeya.generation.spec import ModelSpec, parse_model
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.resident import TEXT_TARGET
from tests.memory.toy import Toy, capability
from tests.memory.worlds import ManualClock
from tests.waiting import until

FIRST, SECOND = (parse_model(f"{name}=kakeya-tiny") for name in ("first", "second"))


async def test_a_first_load_waits_at_the_urgency_of_its_request() -> None:
    clock = ManualClock()
    async with AsyncExitStack() as stack:
        memory = await stack.enter_async_context(MemoryArbiter(budget=150, clock=clock))
        memory.register(capability(TEXT, TEXT_TARGET, Toy()))
        await stack.enter_async_context(memory.acquire(TEXT, "held"))

        def wait(spec: ModelSpec, priority: GenerationPriority) -> asyncio.Task[object]:
            model = ResidentModel(spec, memory, clock=clock, on_change=lambda _: None)
            return asyncio.create_task(model.ready(9.0, priority))

        waits = [wait(FIRST, GenerationPriority.BATCH), wait(SECOND, GenerationPriority.URGENT)]
        await until(lambda: len(memory.status().waiting) == 2)
        assert memory.place_of(TEXT, "second") == 1
        assert memory.place_of(TEXT, "first") == 2
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
