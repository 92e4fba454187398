"""A real node with an encoder: loaded on demand, listed, told of, and there again after a crash."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from tests.mlx.encoder_reference import WORDS, reference, write_encoder
from tests.node.nodes import VERIFIER, NodeProcess, eventually, model_state, offers, seen_by

CLOSE = 1e-3
TEXT = "the capital of france is paris"
IDS = [2, *map(WORDS.index, TEXT.split()), 3]


@asynccontextmanager
async def node_of(
    folder: Path, *flags: str
) -> AsyncIterator[tuple[NodeProcess, AsyncOpenAI, Path]]:
    encoder = await asyncio.to_thread(write_encoder, folder / "encoder")
    async with NodeProcess(
        folder / "node", "--model", f"{encoder}:embedder", "--no-mdns", *flags
    ) as node:
        transport = httpx.AsyncClient(trust_env=False, timeout=120)
        base = f"http://{node.http}/v1"
        async with AsyncOpenAI(
            base_url=base, api_key="none", max_retries=0, http_client=transport
        ) as client:
            yield node, client, encoder


async def vectors(client: AsyncOpenAI, *texts: str | list[int]) -> np.ndarray:
    made = await client.embeddings.create(model="encoder", input=list(texts))  # type: ignore[arg-type]
    return np.array([one.embedding for one in made.data])


async def test_a_node_embeds_and_says_so(tmp_path: Path) -> None:
    async with node_of(tmp_path, "--model", VERIFIER) as (node, client, encoder):
        wanted = await asyncio.to_thread(reference, encoder, IDS)
        found = await vectors(client, TEXT, IDS, "bread")  # asked while it loads
        assert np.abs(found[:2] - wanted).max() < CLOSE
        many = await asyncio.gather(*(vectors(client, "bread", TEXT) for _ in range(12)))
        assert all(np.abs(one - found[[2, 0]]).max() < CLOSE for one in many)

        state = await asyncio.to_thread(model_state, node, "encoder")
        assert (state["role"], state["state"]) == ("embedder", "ready")
        residents = (await asyncio.to_thread(node.api.get, "/api/v1/status"))["memory"]["residents"]
        roles = {one["model"]: one["role"] for one in residents}
        assert roles["encoder"] == "embedding"
        card = await eventually(
            "the card offers it",
            lambda: next((one for one in seen_by(node).values() if "encoder" in offers(one)), None),
        )
        assert {one["model_id"]: one["role"] for one in card["models"]}["encoder"] == "embedder"

        with pytest.raises(Exception, match="writes no text; this node writes text with kakeya"):
            await client.chat.completions.create(
                model="encoder", messages=[{"role": "user", "content": "hi"}]
            )
        with pytest.raises(Exception, match="embeddings are made by encoder"):
            await client.embeddings.create(model=VERIFIER, input="a")


async def test_an_encoder_comes_back_after_a_crash_and_after_idleness(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text("[memory]\nstay_warm_s = 0\nunload_after_s = 1\n")
    async with node_of(tmp_path, "--config", str(config)) as (node, client, _):
        before = await vectors(client, TEXT)
        await eventually(
            "it left for idleness", lambda: model_state(node, "encoder")["state"] == "unloaded"
        )
        assert np.array_equal(await vectors(client, TEXT), before)
        is_killed = asyncio.Event()

        async def ask() -> None:
            while not is_killed.is_set():
                found = await vectors(client, *[TEXT] * 200)
                assert np.abs(found - before).max() < CLOSE

        crowd = asyncio.gather(*(ask() for _ in range(8)))
        pid = await eventually(
            "it is in use", lambda: (one := model_state(node, "encoder"))["running"] and one["pid"]
        )
        os.kill(pid, signal.SIGKILL)
        is_killed.set()
        await crowd
