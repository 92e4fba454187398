"""The gateway over a real engine child with the embedded model."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

import pytest

from kakeya.backends.engine.backend import EngineBackend
from kakeya.generation.facts import ModelState
from tests.gateway.toy import serving, until

TINY = Path(__file__).parents[2] / "kakeya" / "models" / "kakeya-tiny"
pytestmark = pytest.mark.skipif(not TINY.is_dir(), reason="the embedded model is not built yet")

STOPS_WITHIN_S = 2.0
"""The goal is 0.5 s on a quiet machine; finishing the work below would take many seconds."""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "def hello(x):"}]}


def command(socket: Path) -> list[str]:
    module = [sys.executable, "-m", "kakeya.node.engine_main", "--socket", str(socket)]
    return [*module, "--model", str(TINY), "--model-id", "tiny"]


async def test_texts_seeds_and_departures_over_a_real_engine():
    async with EngineBackend("tiny", command) as model, serving(model) as served:
        create = served.openai.chat.completions.create

        async def said(**fields) -> str:
            reply = await create(**CHAT, max_tokens=48, **fields)
            assert 0 < reply.usage.completion_tokens <= 48
            return reply.choices[0].message.content

        loading = await said(temperature=0)  # asked while it loads
        assert model.state is ModelState.READY
        assert await said(temperature=0) == loading
        seeded = await said(temperature=0.8, seed=7)
        assert seeded == await said(temperature=0.8, seed=7)
        undrafted = {"draft_policy": "off"}
        assert seeded == await said(temperature=0.8, seed=7, extra_body=undrafted)
        stream = await create(**CHAT, max_tokens=48, temperature=0.8, seed=7, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == seeded
        assert "<|" not in seeded

        facts = await model.ready(5)
        noise = random.Random(1)
        long = [noise.randrange(10, facts.vocab_size) for _ in range(facts.context_tokens - 20)]
        for is_stream in (False, True):
            for prompt, max_tokens in ((long, 10), (long[:3], facts.context_tokens - 100)):
                await leaves(served, model, prompt, max_tokens, is_stream)
        assert await said(temperature=0) == loading


async def leaves(served, model, prompt, max_tokens, is_stream) -> None:
    """Ask, wait until the engine works, leave, and see it stop."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": is_stream}
    asked = asyncio.create_task(served.http.post("/v1/completions", json=body))
    async with asyncio.timeout(60):
        while (await model.stats()).running == 0:
            await asyncio.sleep(0.01)
    assert not asked.done()
    asked.cancel()
    left_at = time.monotonic()
    await asyncio.gather(asked, return_exceptions=True)
    async with asyncio.timeout(60):
        while (await model.stats()).running:
            await asyncio.sleep(0.01)
    assert time.monotonic() - left_at < STOPS_WITHIN_S
    await until(lambda: model.running == 0)
