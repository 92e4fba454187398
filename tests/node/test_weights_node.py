"""Models that go from node to node: real nodes, killed in the middle of a pull, and gone on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import httpx

from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.weights.manifest import PIECE_BYTES
from kakeya.weights.pull import STREAMS
from tests.node.nodes import QUICK, NodeProcess, model_state, run_cli, seen_by
from tests.waiting import eventually
from tests.weights.world import content, make_model

NAME = "org/smol"
RATE = "KAKEYA_WEIGHTS_PULL_MB_PER_S"


async def cli(*arguments: str) -> Any:
    """What a command prints as JSON, the last line of it."""
    done = await asyncio.to_thread(run_cli, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def data(folder: Path) -> str:
    return str(folder / "data")


async def begin_pull(folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kakeya.cli.main", "models", "pull", NAME),
        *("--data-dir", data(folder), "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def kill(node: NodeProcess) -> None:
    node.send(signal.SIGKILL)
    await node.wait()


async def some_came(node: NodeProcess) -> None:
    def is_under_way() -> bool:
        pulls = node.api.get("/api/v1/status")["weights"]["pulls"]
        least = (STREAMS + 1) * PIECE_BYTES  # pieces on their way are among them
        return any(least < pull["done_bytes"] < pull["bytes"] - (5 << 20) for pull in pulls)

    await eventually("a part of the model is here", is_under_way)


async def test_kills_of_both_sides_cost_a_pull_nothing_that_it_had(
    tmp_path: Path, monkeypatch: Any
) -> None:
    source, sink = tmp_path / "source", tmp_path / "sink"
    models = source / "data" / "models"
    await asyncio.to_thread(make_model, models, NAME, mib=48)
    monkeypatch.setenv(RATE, "6")
    drafts = ("--proposer", "ngram", *QUICK)
    async with NodeProcess(source, "--node-id", "source", *drafts) as first:
        peers = ("--node-id", "sink", "--peer", first.grpc, *drafts)
        async with NodeProcess(sink, *peers) as puller:
            await eventually("the nodes know each other", lambda: "source" in seen_by(puller))
            pull = await begin_pull(sink)
            await some_came(puller)
            await kill(puller)
            _, said = await pull.communicate()
            assert pull.returncode == 1
            assert b"does not answer" in said
        async with NodeProcess(sink, *peers) as puller:
            await eventually("the nodes know each other", lambda: "source" in seen_by(puller))
            pull = await begin_pull(sink)
            await some_came(puller)
            await kill(first)
            own = ("--node-id", "source", "--peer", puller.grpc, *drafts, "--bind", first.grpc)
            async with NodeProcess(source, *own):
                printed, _ = await pull.communicate()
                last = json.loads(printed.splitlines()[-1])
                assert last["phase"] == "done"
                assert last["resumed_bytes"] > 4 << 20
                assert content(Path(last["path"])) == content(models / NAME)


def served(node: NodeProcess) -> set[str]:
    return {one["id"] for one in node.api.get("/v1/models")["data"]}


async def answer(node: NodeProcess, model: str, **more: Any) -> list[Any]:
    body = {"model": model, "prompt": "def ", "max_tokens": 3, "temperature": 0, "stream": True}
    body |= more
    return [*await asyncio.to_thread(list, node.api.stream("/v1/completions", body))]


def endless(folder: Path) -> dict[str, int]:
    """A bias with which no answer of a model ends by itself."""
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return {str(one): -100 for one in ends}


async def test_a_pulled_model_is_served_until_it_is_removed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """At once, by any node, after a restart, and not after its removal, which waits for its
    requests."""
    monkeypatch.setenv("KAKEYA_WEIGHTS_PULL_ON_DEMAND", "false")
    source, sink = tmp_path / "source", tmp_path / "sink"
    copied = source / "data" / "models" / "copy"
    await asyncio.to_thread(shutil.copytree, EMBEDDED_FOLDER / "kakeya-tiny", copied)
    drafts = ("--proposer", "ngram", *QUICK)
    async with NodeProcess(source, "--node-id", "source", *drafts) as first:
        peers = ("--node-id", "sink", "--peer", first.grpc, *drafts)
        async with NodeProcess(sink, *peers) as puller:
            await eventually("the nodes know each other", lambda: "source" in seen_by(puller))
            assert "copy" not in await asyncio.to_thread(served, puller)
            last = await cli("models", "pull", "copy", "--data-dir", data(sink))
            assert last["phase"] == "done"
            (where,) = (await cli("models", "where", "copy", "--data-dir", data(source)))["models"]
            assert where["peers"] == ["sink"]
            assert "copy" in await asyncio.to_thread(served, puller)
            assert (await asyncio.to_thread(model_state, puller, "copy"))["state"] == "unloaded"
            await eventually("the fleet has it", lambda: "copy" in served(first))
            said = await answer(first, "copy")
            assert "".join(one["choices"][0]["text"] for one in said if one["choices"])
            assert (await asyncio.to_thread(model_state, puller, "copy"))["state"] == "ready"
        async with NodeProcess(sink, *peers) as again:
            assert (await asyncio.to_thread(model_state, again, "copy"))["state"] == "unloaded"
            removing = ("models", "rm", "copy", "--data-dir", data(sink))
            stream = asyncio.create_task(
                answer(again, "copy", max_tokens=800, logit_bias=endless(copied))
            )
            await eventually("it answers", lambda: model_state(again, "copy")["running"])
            engine = model_state(again, "copy")["pid"]
            os.kill(engine, signal.SIGSTOP)  # the answer is not over before the removal is refused
            refused = await asyncio.to_thread(run_cli, *removing)
            os.kill(engine, signal.SIGCONT)
            assert refused.returncode == 1
            assert "copy is in use on this node" in refused.stderr
            assert any(one["choices"][0]["finish_reason"] for one in await stream)
            removed = await cli(*removing)
            assert not await asyncio.to_thread(Path(removed["path"]).exists)
            assert "copy" not in await asyncio.to_thread(served, again)


async def test_a_pulled_model_may_be_configured_or_left_alone(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("KAKEYA_WEIGHTS_PULL_ON_DEMAND", "false")
    source, sink = tmp_path / "source", tmp_path / "sink"
    copied = source / "data" / "models" / "copy"
    await asyncio.to_thread(shutil.copytree, EMBEDDED_FOLDER / "kakeya-tiny", copied)
    async with NodeProcess(source, "--node-id", "source", "--proposer", "ngram", *QUICK) as first:
        own = ("--node-id", "sink", "--peer", first.grpc, *QUICK)
        monkeypatch.setenv("KAKEYA_WEIGHTS_SERVE", "false")
        async with NodeProcess(sink, *own, "--proposer", "ngram") as puller:
            await eventually("the nodes know each other", lambda: "source" in seen_by(puller))
            await cli("models", "pull", "copy", "--data-dir", data(sink))
            assert "copy" not in await asyncio.to_thread(served, puller)
        monkeypatch.delenv("KAKEYA_WEIGHTS_SERVE")
        async with NodeProcess(sink, *own, "--model", "other=copy") as node:
            assert await asyncio.to_thread(served, node) == {"other"}
            refused = await asyncio.to_thread(
                run_cli, "models", "rm", "copy", "--data-dir", data(sink)
            )
            assert refused.returncode == 1
            assert "the node serves it as other" in refused.stderr
            removed = await cli("models", "rm", "copy", "--force", "--data-dir", data(sink))
            assert not await asyncio.to_thread(Path(removed["path"]).exists)


async def test_a_request_has_a_model_pulled_that_no_node_can_load(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Its only holder has no memory for it. Its client hears how far the pull is."""
    source, sink = tmp_path / "source", tmp_path / "sink"
    copied = source / "data" / "models" / "copy"
    await asyncio.to_thread(shutil.copytree, EMBEDDED_FOLDER / "kakeya-tiny", copied)
    drafts = ("--proposer", "ngram", *QUICK)
    small = ("--node-id", "source", "--memory-budget", "16", *drafts)
    async with NodeProcess(source, *small) as first:
        peers = ("--node-id", "sink", "--peer", first.grpc, *drafts)
        monkeypatch.setenv(RATE, "2")
        async with NodeProcess(sink, *peers) as node:
            await eventually("the model may be asked for", lambda: "copy" in served(node))
            body = {"model": "copy", "prompt": "def ", "max_tokens": 3, "stream": True}
            async with httpx.AsyncClient(timeout=100.0) as client:
                url = f"http://{node.http}/v1/completions"
                async with client.stream("POST", url, json=body) as got:
                    lines = [line async for line in got.aiter_lines()]
            assert got.status_code == 200
            assert any("bringing copy here, from " in line for line in lines), lines
            assert lines[-2:] == ["data: [DONE]", ""]
            assert (await asyncio.to_thread(model_state, node, "copy"))["state"] == "ready"
            await eventually("the fleet has it", lambda: "copy" in served(first))
            said = await answer(first, "copy")
            assert "".join(one["choices"][0]["text"] for one in said if one["choices"])
