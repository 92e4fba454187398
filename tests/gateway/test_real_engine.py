"""The gateway over a real engine child with the embedded model."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engine.watch import EngineWatch
from kakeya.core.clock import SystemClock
from kakeya.core.process import resident_bytes
from kakeya.generation.facts import ModelState
from kakeya.memory.api import MemoryArbiter
from tests import findings
from tests.dispatch.peers.world import ToyPrecache
from tests.gateway.toy import serving
from tests.waiting import until

TINY = Path(__file__).parents[2] / "kakeya" / "models" / "kakeya-tiny"
pytestmark = pytest.mark.skipif(not TINY.is_dir(), reason="the embedded model is not built yet")

ENDLESS = {"0": -100, "2": -100}
"""A bias with which no answer ends by itself."""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "def hello(x):"}]}


def command(socket: Path) -> list[str]:
    module = [sys.executable, "-m", "kakeya.node.engine_main", "--socket", str(socket)]
    return [*module, "--model", str(TINY), "--model-id", "tiny", *findings.flags()]


async def test_texts_seeds_and_departures_over_a_real_engine():
    async with (
        EngineBackend("tiny", command) as model,
        serving(model, precache=ToyPrecache()) as served,
    ):
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


async def test_an_engine_that_runs_away_before_the_first_token_is_a_503_and_comes_back_with_care(
    tmp_path: Path,
):
    """A request goes on in the next engine, unless it has lost too many: here, one."""
    taken, clock = tmp_path / "taken", SystemClock()

    def greedy(socket: Path) -> list[str]:
        module = [sys.executable, "-m", "tests.node.child_greedy", "once", str(taken), "900"]
        return [*module, *command(socket)[3:]]

    options = EngineOptions(max_losses_in_a_row=1, resume_timeout_s=120.0)
    async with (
        MemoryArbiter(budget=1 << 40, clock=clock) as arbiter,
        EngineBackend("tiny", greedy, options=options) as model,
        EngineWatch(arbiter, clock) as watch,
        serving(model) as served,
    ):
        await model.ready(120)
        size = await asyncio.to_thread(resident_bytes, model.pid)
        arbiter.set_budget(size + (300 << 20))
        watch.attach("tiny", model, size + (100 << 20))
        for is_stream in (False, True):
            body = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": 8, "stream": is_stream}
            refused = await served.http.post("/v1/completions", json=body, timeout=120)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "unavailable"
            again = await served.http.post("/v1/completions", json=body, timeout=120)
            assert again.status_code == 200
            told = watch.status()["tiny"]
            assert (told["max_running"], told["steps"]["kill"]) == (1, 1 + is_stream)
            # By the guard, or by the watch where that looks first.
            assert "lease" in told["last_reason"]
            taken.unlink()


async def leaves(served, model, prompt, max_tokens, is_stream) -> None:
    """Ask, wait until the engine works, leave, and see it stop long before the end of the work."""
    name = f"{max_tokens}-{is_stream}"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": is_stream}
    body |= {"logit_bias": ENDLESS, "conversation_id": name}
    asked = asyncio.create_task(served.http.post("/v1/completions", json=body))
    async with asyncio.timeout(60):
        while (await model.stats()).running == 0:
            await asyncio.sleep(0.01)
    assert not asked.done()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    kept: list[int] = []
    async with asyncio.timeout(60):
        while not kept:  # a sequence that ends leaves the KV that it has, under its key
            stats = await model.stats()
            kept = [size for key, size in stats.kv_bytes_by_key.items() if key.endswith(name)]
            await asyncio.sleep(0.01)
    assert not stats.running
    assert kept[0] < model.facts.kv_bytes_per_token * (len(prompt) + max_tokens) / 2
    await until(lambda: model.running == 0)
