"""A node whose models have tables: pinned, sized and kept warm by them, and changed by a reload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tests.node.nodes import VERIFIER, NodeProcess, model_state, run_cli, run_daemon
from tests.node.test_tasks_node import FOLDER, put
from tests.waiting import eventually

TEMPLATE = "{% for one in messages %}[{{ one.role }}] {{ one.content }}{% endfor %}"
TABLES = """
[models]
serve = ["{verifier}"]

[models.{verifier}]
size_mb = 400
{more}

[models.agent]
path = "{folder}"
category = "vision"
template = "{template}"
max_tokens = 5

[profiles.coder]
agents = ["coder/"]
model = "agent"
"""


def written(file: Path, more: str) -> str:
    text = TABLES.format(verifier=VERIFIER, folder=FOLDER, template=TEMPLATE, more=more)
    file.write_text(text)
    return text


def residents(node: NodeProcess) -> dict[str, dict[str, Any]]:
    return {one["model"]: one for one in node.api.get("/api/v1/status")["memory"]["residents"]}


async def asked(node: NodeProcess, **body: object) -> Any:
    agent = {"user-agent": "coder/1"}
    async with AsyncOpenAI(
        base_url=f"http://{node.http}/v1", api_key="none", default_headers=agent
    ) as client:
        return await client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "The sea"}], extra_body=body
        )


async def test_tables_of_models_reach_memory_and_requests_and_are_read_again(tmp_path):
    file = tmp_path / "node.toml"
    await asyncio.to_thread(written, file, "pin = true\nthinking = 'off'")
    async with NodeProcess(tmp_path, "--config", str(file)) as node:
        for model in (VERIFIER, "agent"):
            await eventually(
                "both are loaded", lambda of=model: model_state(node, of)["state"] == "ready"
            )
        found = residents(node)
        assert {name: one["is_pinned"] for name, one in found.items()} == {
            VERIFIER: True,
            "agent": False,
        }
        assert found["agent"]["warm_s"] <= 60 < found[VERIFIER]["warm_s"]
        assert found[VERIFIER]["estimate_bytes"] >= 400 << 20
        assert model_state(node, VERIFIER)["manifest"]["thinking"] == "off"
        shown = await asyncio.to_thread(run_cli, "config", "--node", node.http)
        assert shown.stdout.splitlines() == [
            f"models.{VERIFIER}: pin True, size_mb 400, thinking off",
            f"models.agent: template {TEMPLATE}, max_tokens 5, category vision",
            "profiles.coder: agents coder/, model agent",
            "clouds as fallbacks: yes",
        ]
        answer = await asked(node)
        assert (answer.model, answer.usage.completion_tokens <= 5) == ("agent", True)

        await asyncio.to_thread(written, file, "stay_warm_s = 5000\noptions = {ctx = 1}")
        taken = await put(node, {"reload": True})
        assert taken.status_code == 200, taken.text
        assert taken.json()["needs_restart"] == [f"models.{VERIFIER}.options"]
        found = residents(node)
        assert not found[VERIFIER]["is_pinned"]
        assert found[VERIFIER]["warm_s"] > 4000
        await asyncio.to_thread(written, file, "pinn = true")
        refused = await asyncio.to_thread(run_cli, "config", "reload", "--node", node.http)
        assert refused.returncode == 1
        assert f"did you mean models.{VERIFIER}.pin?" in refused.stderr
        assert residents(node)[VERIFIER]["warm_s"] > 4000


def test_an_option_that_the_backend_lacks_ends_the_start(tmp_path):
    file = tmp_path / "node.toml"
    written(file, "options = {ctx_size = 4096}")
    own = ("--data-dir", str(tmp_path / "data"), "--http", "127.0.0.1:0", "--bind", "127.0.0.1:0")
    ended = run_daemon("--config", str(file), *own)
    assert ended.returncode == 2
    assert f"models.{VERIFIER}.options.ctx_size: mlx has the options group" in ended.stderr
