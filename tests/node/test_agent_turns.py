"""The second turn of each agent program finds nearly all of its prompt in the cache."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from kakeya.cli.main import main
from tests.node.nodes import NodeProcess, verifier_node
from tests.node.recordings import Recording, claude_code, cn, codex, llm, opencode
from tests.waiting import eventually

BAR = 0.99
CONFIG = """
[precache]
memory_mb = 128
disk_mb = 0
"""
RECORDINGS = (claude_code(), codex(), opencode(), cn(), llm())


async def ask(
    http: httpx.AsyncClient, recording: Recording, body: Mapping[str, Any]
) -> tuple[dict[str, Any], httpx.Headers]:
    answer = await http.post(recording.path, json=body, headers=recording.headers, timeout=120)
    assert answer.status_code == 200, f"{recording.program}: {answer.text}"
    return answer.json(), answer.headers


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were cached, in any dialect."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached


def is_calm(node: NodeProcess) -> bool:
    status = node.api.get("/api/v1/status")["precache"]
    return not status["queued"] and not status["running"]


async def test_a_prompt_of_token_ids_is_found_to_the_token(tmp_path: Path) -> None:
    rng = random.Random(4)
    ids = [rng.randrange(5, 3000) for _ in range(692)]
    cached: dict[int, int] = {}
    async with (
        verifier_node(tmp_path / "node") as node,
        httpx.AsyncClient(base_url=f"http://{node.http}", trust_env=False) as http,
    ):
        body = {"model": "kakeya-tiny", "prompt": ids[:690]}
        warmed = await http.post("/v1/precache", json=body, timeout=60)
        assert warmed.json()["usage"]["computed_tokens"] == 689
        for stable in (0, 690):
            body = {"model": "kakeya-tiny", "prompt": ids, "stable_tokens": stable}
            answer = await http.post("/v1/completions", json={**body, "max_tokens": 1}, timeout=60)
            _, cached[stable] = counted(answer.json()["usage"])
    assert cached[0] < cached[690] == 689


@pytest.mark.slow
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.program)
async def test_two_turns_of_an_agent_program(recording: Recording, tmp_path: Path, capsys) -> None:
    config = tmp_path / "node.toml"
    config.write_text(CONFIG)
    async with (
        verifier_node(tmp_path / "node", "--config", str(config)) as node,
        httpx.AsyncClient(base_url=f"http://{node.http}", trust_env=False) as http,
    ):
        first = recording.first()
        answer, _ = await ask(http, recording, first)
        if recording.between is not None:
            await ask(http, recording, recording.between)
        await eventually("turns are warm", lambda: is_calm(node))
        second, headers = await ask(http, recording, recording.second(first, answer))
        prompt, cached = counted(second["usage"])
        told = tuple(second["usage"].get("kakeya", {}).get("moved", ()))
        assert told == recording.moved
        assert headers.get("x-kakeya-moved", "") == ", ".join(recording.moved)
        explain = ["explain", headers["x-request-id"], "--node", node.http, "--json"]
        assert await asyncio.to_thread(main, explain) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["prompt_tokens"], found["cached_tokens"]) == (prompt, cached)
        assert found["compared_with"]["is_same_conversation"]
    assert cached / prompt >= BAR
