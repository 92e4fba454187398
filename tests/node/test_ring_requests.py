"""Requests for a ring group at its node: as for one process, or refused in plain words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.sessions.client import Client
from tests.mlx.ring.rig import LAUNCH, group
from tests.node.nodes import VERIFIER, NodeProcess, model_state, run_cli
from tests.waiting import eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.skipif(not LAUNCH.exists(), reason="mlx.launch is not installed"),
]
MODEL = EMBEDDED_FOLDER / VERIFIER
TRAINED = Path(__file__).parents[1] / "adapters" / "trained"
BIG = "big"
PROMPT = "The harbour was quiet, and the boats came back one after another. " * 12
LIMIT_S = 240.0
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Asked:
    node: NodeProcess
    folder: Path

    async def post(self, path: str, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://{self.node.http}", timeout=LIMIT_S) as one:
            return await one.post(path, json=body)

    async def text(self, model: str, prompt: str = PROMPT, **more: Any) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
        answer = await self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asked]:
    folder = tmp_path_factory.mktemp("ring")
    link, settings = folder / "group.sock", folder / "kakeya.toml"
    settings.write_text(
        f'[models.{BIG}]\npath = "{MODEL}"\nsize_mb = 100\noptions = {{ group = "{link}" }}\n'
    )
    flags = ("--config", str(settings), "--model", VERIFIER, "--no-mdns")
    with group(2, MODEL, "--ring", "tensor") as served:
        link.symlink_to(served.socket)
        async with NodeProcess(folder, *flags) as node:
            for model_id in (VERIFIER, BIG):
                await eventually(
                    f"{model_id} serves",
                    lambda name=model_id: model_state(node, name)["state"] == "ready",
                    limit_s=LIMIT_S,
                )
            assert model_state(node, BIG)["canary"]["state"] == "verified"
            yield Asked(node, folder)


async def test_answers_alone_and_together_are_those_of_one_process(asked: Asked) -> None:
    prompts = [PROMPT, "Take two eggs", "Dear Ann"]
    wanted = [await asked.text(VERIFIER, prompt) for prompt in prompts]
    assert [await asked.text(BIG, prompt) for prompt in prompts] == wanted
    assert await asyncio.gather(*(asked.text(BIG, prompt) for prompt in prompts)) == wanted
    seeded = {"temperature": 0.7, "seed": 5}
    assert await asked.text(BIG, **seeded) == await asked.text(VERIFIER, **seeded)


async def test_a_grammar_and_a_conversation_are_those_of_one_process(asked: Asked) -> None:
    said: dict[str, list[str]] = {}
    for model in (VERIFIER, BIG):
        messages = [{"role": "user", "content": PROMPT}]
        chat = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
        for _ in range(2):
            answer = await asked.post("/v1/chat/completions", **chat)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And then?"},
            ]
            said.setdefault(model, []).append(text)
        formed = await asked.post("/v1/chat/completions", **chat, response_format=SCHEMA)
        text = formed.json()["choices"][0]["message"]["content"]
        assert list(json.loads(text)) == ["ok"]
        said[model].append(text)
    assert said[BIG] == said[VERIFIER]


async def test_a_session_goes_on_in_the_group(asked: Asked) -> None:
    said: dict[str, list[int]] = {}
    async with Client(asked.node.grpc) as client:
        for model in (VERIFIER, BIG):
            async with await client.create_session(model_id=model) as session:
                for turn in ([40, 50, 60] * 30, [70, 80]):
                    await session.append(turn)
                    said.setdefault(model, []).extend([t async for t in session.generate(12)])
    assert said[BIG] == said[VERIFIER]


async def test_a_prompt_that_comes_back_is_computed_again_and_says_the_same(asked: Asked) -> None:
    """A group keeps KV for conversations by their keys, and none by content."""
    first, second = [await asked.text(BIG) for _ in range(2)]
    assert first == second
    warm = await asked.post("/v1/precache", model=BIG, prompt=PROMPT)
    assert warm.json()["status"].startswith("skipped"), warm.text
    assert "cannot be kept in blocks" in warm.json()["reason"]


async def test_what_a_group_cannot_do_is_refused_in_plain_words(asked: Asked) -> None:
    made = await asked.post("/v1/embeddings", model=BIG, input="one")
    assert made.status_code == 400
    assert "makes no embeddings" in made.text
    data = ("--data-dir", str(asked.folder / "data"))
    words = ("adapters", "add", "recipe", "--base", BIG, "--path", str(TRAINED / "recipe"), *data)
    added = await asyncio.to_thread(run_cli, *words)
    assert added.returncode != 0
    assert "ring groups take none" in added.stderr
    body = {"prompt": "one", "max_tokens": 4}
    named = await asked.post("/v1/completions", model=f"{BIG}:recipe", **body)
    assert named.status_code == 404
    assert f"{BIG}:recipe" in named.text
    inner = await asked.post("/v1/completions", model=f"{BIG} in one process", **body)
    assert inner.status_code == 404
