"""A node with two models and tasks over them: chosen, told, read again, kept over a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from tests.node.nodes import VERIFIER, NodeProcess, model_state, run_cli, run_daemon
from tests.waiting import eventually

OTHER = "kakeya-tiny-tools"
FOLDER = Path(__file__).parents[2] / "kakeya" / "models" / OTHER
TASKS = """
[models]
serve = ["{verifier}", "{folder}"]

[tasks.titles]
candidates = ["{first}", "{second}"]
budget_s = 60
keep_alive_s = 9000
priority = "low"
"""


def written(file: Path, first: str, second: str) -> None:
    text = TASKS.format(verifier=VERIFIER, folder=FOLDER, first=first, second=second)
    file.write_text(text)


async def title(node: NodeProcess) -> tuple[str, str, str]:
    """The model that answers the task, the header that tells of it, and the request's id."""
    async with (
        httpx.AsyncClient(trust_env=False) as transport,
        AsyncOpenAI(
            base_url=f"http://{node.http}/v1", api_key="none", http_client=transport
        ) as client,
    ):
        answer = await client.chat.completions.with_raw_response.create(
            model="titles", messages=[{"role": "user", "content": "The sea"}], max_tokens=4
        )
    body = answer.parse()
    told = body.model_dump()["usage"]["kakeya"]["task"]
    assert told["model"] == body.model
    return body.model, answer.headers["x-kakeya-task"], answer.headers["x-request-id"]


async def put(node: NodeProcess, body: dict[str, object]) -> httpx.Response:
    async with httpx.AsyncClient(
        base_url=f"http://{node.http}", trust_env=False, timeout=60
    ) as client:
        return await client.put("/api/v1/config", json=body)


async def test_tasks_of_a_node_are_chosen_read_again_and_explained(tmp_path):
    file = tmp_path / "node.toml"
    await asyncio.to_thread(written, file, OTHER, VERIFIER)
    async with NodeProcess(tmp_path, "--config", str(file)) as node:
        for model in (VERIFIER, OTHER):
            await eventually(
                "both are loaded", lambda of=model: model_state(node, of)["state"] == "ready"
            )
        model, header, request_id = await title(node)
        assert model == OTHER
        assert header.startswith(f"titles; model={OTHER}; step=0; loaded=1; tokens_per_second=")
        explained = await asyncio.to_thread(run_cli, "explain", request_id, "--node", node.http)
        assert "titles: the first of the ladder, which is loaded" in explained.stdout
        residents = node.api.get("/api/v1/status")["memory"]["residents"]
        warm = {one["model"]: one["warm_s"] > 8000 for one in residents}
        assert warm == {VERIFIER: False, OTHER: True}

        await asyncio.to_thread(written, file, "kakeya-tinny", OTHER)
        refused = await put(node, {"reload": True})
        assert refused.status_code == 400
        assert "did you mean kakeya-tiny?" in refused.json()["error"]["message"]
        assert (await title(node))[0] == OTHER
        await asyncio.to_thread(written, file, VERIFIER, OTHER)
        assert (await put(node, {"reload": True})).status_code == 200
        assert (await title(node))[0] == VERIFIER
        assert (await put(node, {"allowCloudFallback": False})).status_code == 200
    async with NodeProcess(tmp_path, "--config", str(file)) as node:
        assert node.api.get("/api/v1/config")["allowCloudFallback"] is False


def test_a_candidate_that_is_not_served_ends_the_start(tmp_path):
    file = tmp_path / "node.toml"
    written(file, "kakeya-tinny", OTHER)
    ended = run_daemon("--config", str(file), "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == 2
    assert "[tasks.titles]: kakeya-tinny is none of the models" in ended.stderr
    assert "did you mean kakeya-tiny?" in ended.stderr
