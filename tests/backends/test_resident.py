"""A model of the node, in memory or not, as its callers wait for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kakeya.backends.model_life import TEXT
from kakeya.backends.resident import ResidentModel
from kakeya.core.errors import ModelLoading
from kakeya.generation.frames import Usage
from kakeya.generation.request import DecodeRequest, GenerationPriority
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
        told = [memory.wait_of(TEXT, model_id) for model_id in ("second", "first")]
        assert [wait and wait.describe() for wait in told] == [
            "1st for memory, second",
            "2nd for memory, first",
        ]
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def test_a_deadline_counts_the_load_and_the_slowest_answers_of_its_length() -> None:
    clock = ManualClock()
    toy = Toy()
    async with MemoryArbiter(budget=150, clock=clock) as memory:
        memory.register(capability(TEXT, TEXT_TARGET, toy))
        model = ResidentModel(FIRST, memory, clock=clock, on_change=lambda _: None)
        toy.load_gate.clear()
        load = asyncio.create_task(model.ready(99.0))
        await until(lambda: toy.loads)
        clock.advance(20)
        toy.load_gate.set()
        await asyncio.gather(load, return_exceptions=True)
        memory.unload(TEXT, "first")
        await until(lambda: not memory.status().residents)

        request = DecodeRequest(token_ids=[1], max_tokens=1, deadline_s=21.0)
        used = {
            3.0: request,
            4.0: replace(request, token_ids=[1, 2], max_tokens=2),
            30.0: replace(request, token_ids=[1, 2, 3]),
            31.0: replace(request, max_tokens=3),
            32.0: replace(request, priority=GenerationPriority.SPECULATIVE),
        }
        for seconds, earlier in used.items():
            model.used(earlier, Usage(total_s=seconds))
        with pytest.raises(ModelLoading, match=r"20 s to load and 4 s to answer.*is 21 s") as late:
            async with model.lend_for(request):
                pass
        assert late.value.retry_after_s == 20
        await until(lambda: toy.loads == ["first", "first"])
