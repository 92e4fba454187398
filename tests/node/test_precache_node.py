"""A real node and its engine: declared prompts, conversations and prefixes, through its doors."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import kakeya.models
from kakeya.cli.main import main
from kakeya.prefix.seam import WarmOutcome
from kakeya.sessions.client import Client
from tests.node.nodes import VERIFIER, NodeProcess, model_state, verifier_node
from tests.waiting import eventually

SYSTEM = " ".join(f"Rule {n}: the shelf has {n} small machines." for n in range(40))
BLOCK = 256
CONFIG = f"""
[precache]
memory_mb = 64
disk_mb = 64
parallel = 2
[[precache.prompts]]
system = "{SYSTEM}"
"""


def precache_of(node: NodeProcess) -> dict[str, Any]:
    return node.api.get("/api/v1/status")["precache"]


def is_calm(node: NodeProcess) -> bool:
    status = precache_of(node)
    return not status["queued"] and not status["running"]


async def ask(node: NodeProcess, path: str, body: Mapping[str, object]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=f"http://{node.http}", trust_env=False) as http:
        answer = await http.post(path, json={"model": VERIFIER, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(
    node: NodeProcess, messages: list[dict[str, str]], said: str, **more: object
) -> tuple[int, int]:
    """One turn; the messages grow by both sides of it. Returns tokens: prompt, cached."""
    messages.append({"role": "user", "content": said})
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, **more}
    answer = await ask(node, "/v1/chat/completions", body)
    messages.append(answer["choices"][0]["message"])
    messages[-1].pop("refusal")
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@pytest.mark.slow
async def test_a_node_warms_what_is_declared_said_and_sent(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(CONFIG)
    async with verifier_node(tmp_path / "node", "--config", str(config)) as node:
        await eventually("the prompt is warm", lambda: precache_of(node)["prewarms"]["warm"] == 1)
        declared = precache_of(node)["kept_tokens"]
        assert whole_blocks(declared) >= BLOCK

        # Two conversations that begin with it, and one that nobody named.
        system = {"role": "system", "content": SYSTEM}
        rooms: dict[str, list[dict[str, str]]] = {"one": [dict(system)], "two": [dict(system)]}
        for room, messages in rooms.items():
            prompt, cached = await chat(node, messages, f"hello {room}", conversation_id=room)
            assert cached >= whole_blocks(declared)
        _, cached = await chat(node, [dict(system)], "hello")
        assert cached >= whole_blocks(declared)
        await eventually("turns are warm", lambda: is_calm(node))
        (slots,) = precache_of(node)["slots"]
        assert (slots["loads"], slots["high_water"]) == ([1, 1], 2)

        # Their engine dies: what they said is in pages, and what is declared is warm again.
        pid = model_state(node, VERIFIER)["pid"]
        os.kill(pid, signal.SIGKILL)
        await eventually(
            "another engine is ready",
            lambda: (
                (state := model_state(node, VERIFIER))["state"] == "ready" and state["pid"] != pid
            ),
        )
        known, _ = await _known(node, rooms["one"])
        prompt, cached = await chat(node, rooms["one"], "and now?", conversation_id="one")
        assert prompt > known > BLOCK
        assert cached >= whole_blocks(known)

        # What is sent ahead is there when it is asked for, over both doors.
        ahead = [{"role": "system", "content": SYSTEM[::-1]}, {"role": "user", "content": "why?"}]
        answer = await ask(node, "/v1/precache", {"messages": ahead, "retention": "long"})
        assert answer["status"] == "warm"
        assert answer["usage"]["computed_tokens"] > BLOCK
        prompt, cached = await chat(node, ahead[:1], "why?")
        assert cached >= prompt - 8
        async with Client(node.grpc) as client:
            ids = _ids(whole_blocks(2 * BLOCK) + 5)
            report = await client.warm(ids, pin=True)
            assert (report.outcome, report.warmed.computed) == (WarmOutcome.WARM, len(ids) - 1)
            async with await client.create_session() as session:
                await session.append([*ids, 7])
                assert [t async for t in session.generate(2)]
                assert session.last_done is not None
                assert session.last_done.cached_tokens >= 2 * BLOCK
        status = precache_of(node)
        assert status["prewarms"]["failed"] == 0
        assert status["computed_tokens"] > 0
        await _wipe(node, tmp_path / "node" / "data")


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if loop.first and tools %}\nTools: {{ tools | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "description": SYSTEM[::-1]}}


@pytest.mark.slow
async def test_a_prompt_that_is_declared_with_tools_is_warm_for_chats_with_and_without_them(
    tmp_path: Path,
) -> None:
    folder, tools, config = tmp_path / "tiny", tmp_path / "tools.json", tmp_path / "node.toml"
    shutil.copytree(kakeya.models.__path__[0] + "/kakeya-tiny", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tools.write_text(json.dumps([TOOL]))
    config.write_text(f'{CONFIG}tools_file = "{tools}"\n')
    flags = ("--model", str(folder), "--config", str(config))
    async with NodeProcess(tmp_path / "node", *flags) as node:
        await eventually("the prompt is warm", lambda: precache_of(node)["prewarms"]["warm"] == 1)
        declared = precache_of(node)["kept_tokens"]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 4}
        answer = await ask(
            node, "/v1/chat/completions", {**body, "tools": [TOOL], "tool_choice": "none"}
        )
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= declared - 1 > 2 * BLOCK
        usage = (await ask(node, "/v1/chat/completions", body))["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= whole_blocks(usage["prompt_tokens"]) >= BLOCK


async def _wipe(node: NodeProcess, folder: Path) -> None:
    """By its owner: memory, disk and what the engine holds; then all is kept again."""
    messages = [{"role": "system", "content": SYSTEM[::-1]}]
    body = {"messages": [*messages, {"role": "user", "content": "why?"}], "conversation_id": "w"}

    async def cached() -> int:
        answer = await ask(node, "/v1/chat/completions", {**body, "max_tokens": 4})
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def kept() -> tuple[int, int, int]:
        prefixes = node.api.get("/api/v1/status")["prefixes"]
        files = len(list(folder.rglob("*.kvb")))
        return prefixes["pages"]["blocks"], prefixes["disk"]["blocks"], files

    def is_stored() -> bool:
        """All blocks, and beside them what prompts end in."""
        pages, stored, files = kept()
        return 0 < pages <= stored == files

    assert await cached() > BLOCK
    await eventually("turns are warm", lambda: is_calm(node))
    assert await asyncio.to_thread(main, ["cache", "wipe", "--data-dir", str(folder)]) == 0
    assert await asyncio.to_thread(kept) == (0, 0, 0)
    assert await cached() == 0
    await eventually("it is on disk", is_stored)
    assert await cached() > BLOCK


async def _known(node: NodeProcess, messages: Sequence[Mapping[str, str]]) -> tuple[int, int]:
    """How long the conversation is that was warmed after its last turn."""
    answer = await ask(node, "/v1/precache", {"messages": list(messages)})
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def _ids(count: int) -> list[int]:
    return [3 + (7 * n * n + n) % 200 for n in range(count)]
