"""Real nodes for the tests of this folder, and a way to wait for what they do."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import openai

from kakeya.cli import child
from kakeya.node.datadir import FINDINGS
from tests import findings
from tests.waiting import eventually

VERIFIER, DRAFTER = "kakeya-tiny", "kakeya-tiny-draft"
QUICK = ("--exchange-interval", "0.5")
PATIENT = (sys.executable, "-m", "tests.node.child_patient")
"""The program of a node that waits longer than others."""
FREE = ("--bind", "127.0.0.1:0", "--http", "127.0.0.1:0")


class NodeProcess(child.NodeProcess):
    """A node whose engines know the embedded models from an earlier load."""

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(findings.tell, self._findings)
        return await super().__aenter__()

    async def stop(self) -> int:
        status = await super().stop()
        await asyncio.to_thread(findings.learn, self._findings)
        return status

    @property
    def _findings(self) -> Path:
        return self.log_file.parent / "data" / FINDINGS


def run_daemon(*flags: str, limit_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """Run a daemon that is expected to refuse its start."""
    command = [sys.executable, "-m", "kakeya.node.daemon", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)


def run_cli(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kakeya.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, input=stdin, timeout=150, check=False
    )


def model_state(node: NodeProcess, model_id: str) -> dict[str, Any]:
    models = node.api.get("/api/v1/status")["models"]
    return next(model for model in models if model["model_id"] == model_id)


def metric(node: NodeProcess, name: str) -> float:
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def seen_by(node: NodeProcess) -> dict[str, dict[str, Any]]:
    """The fleet as a node sees it: cards by node id."""
    return {card["node_id"]: card for card in node.api.get("/api/v1/fleet")["nodes"]}


def offers(card: dict[str, Any]) -> set[str]:
    return {model["model_id"] for model in card["models"]}


@asynccontextmanager
async def verifier_node(folder: Path, *flags: str, **how: Any) -> AsyncIterator[NodeProcess]:
    """A node that decodes with the embedded model, ready to do so; `how` as in `NodeProcess`."""
    async with NodeProcess(
        folder, "--node-id", "verifier", "--model", VERIFIER, *QUICK, *flags, **how
    ) as node:
        await eventually(
            "the model is ready", lambda: model_state(node, VERIFIER)["state"] == "ready"
        )
        yield node


@asynccontextmanager
async def drafter_node(folder: Path, verifier: NodeProcess) -> AsyncIterator[NodeProcess]:
    """A node that drafts, and that the verifier's node would ask."""
    flags = ("--node-id", "drafter", "--proposer", DRAFTER, "--peer", verifier.grpc, *QUICK)
    async with NodeProcess(folder, *flags) as node:
        wanted = f"{DRAFTER}@{node.grpc}"
        await eventually(
            "the placement asks the drafter",
            lambda: wanted in str(verifier.api.get("/api/v1/fleet")["plan"]),
        )
        yield node


class Shelf:
    """A front node without the model, and two that serve it."""

    def __init__(self, front: NodeProcess, minis: dict[str, NodeProcess]) -> None:
        self.front = front
        self.minis = minis

    def routed(self) -> Counter[str]:
        """How many generations went to each node."""
        return Counter(self.front.api.get("/api/v1/status")["routes"]["by_node"])

    def has_killed(self, request_id: str, before: Counter[str]) -> bool:
        """Kill the node that gives an answer, by what was `routed` before it; False where the front
        has all of the answer already."""
        for node in self.minis.values():
            node.send(signal.SIGSTOP)
        try:
            told = self.front.api.get(f"/api/v1/requests/{request_id}")
            if is_under_way := told.get("state") == "answering":
                (serving,) = self.routed() - before
                self.minis[serving].send(signal.SIGKILL)
            return is_under_way
        finally:
            for node in self.minis.values():
                node.send(signal.SIGCONT)

    async def says_over_a_kill(self, client: openai.AsyncOpenAI, text: str, **asked: Any) -> None:
        """A completion is this text though its node is killed in the middle of it."""
        for _ in range(20):
            said, is_killed, before = "", False, await asyncio.to_thread(self.routed)
            stream = await client.completions.create(stream=True, **asked)
            async for chunk in stream:
                if not (said or is_killed):
                    is_killed = await asyncio.to_thread(self.has_killed, chunk.id, before)
                said += chunk.choices[0].text if chunk.choices else ""
            assert said == text
            if is_killed:
                break
        assert self.front.api.get("/api/v1/status")["routes"]["moved"] == 1


@asynccontextmanager
async def shelf_of(folder: Path, model: str, *flags: str) -> AsyncIterator[Shelf]:
    """The nodes `left` and `right` with a model, and one that passes requests on to them."""
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(
            NodeProcess(folder / "front", "--node-id", "front", "--proposer", "ngram", *QUICK)
        )
        minis = {}
        for name in ("left", "right"):
            own = ("--node-id", name, "--model", model, "--peer", front.grpc, *QUICK, *flags)
            minis[name] = await stack.enter_async_context(NodeProcess(folder / name, *own))
        await eventually(
            "the front hears of both models",
            lambda: [model in offers(card) for card in seen_by(front).values()].count(True) == 2,
        )
        yield Shelf(front, minis)


@asynccontextmanager
async def replaceable(folder: Path) -> AsyncIterator[tuple[NodeProcess, NodeProcess]]:
    """A peer with the model, and a node that knows it and is going to be replaced."""
    flags = ("--model", VERIFIER, *QUICK)
    async with NodeProcess(folder / "peer", "--node-id", "peer", *flags) as peer:
        flags = ("--node-id", "replaced", "--peer", peer.grpc, *flags)
        async with NodeProcess(folder / "node", *flags, stop_s=60.0) as old:
            for node in (peer, old):
                await eventually(
                    "it is ready", lambda node=node: model_state(node, VERIFIER)["state"] == "ready"
                )
            await eventually(
                "it knows its peer",
                lambda: VERIFIER in offers(seen_by(old).get("peer", {"models": []})),
            )
            yield peer, old


def successor(folder: Path, peer: NodeProcess, old: NodeProcess) -> NodeProcess:
    """The node that takes the place of one of `replaceable`."""
    flags = ("--node-id", "replaced", "--peer", peer.grpc, "--model", VERIFIER, *QUICK)
    return NodeProcess(
        folder / "node", *flags, "--bind", old.grpc, "--http", old.http, start_s=150.0
    )


def client_of(node: NodeProcess, name: str = "") -> openai.AsyncOpenAI:
    """An OpenAI client of a node, which may call itself by a name."""
    return openai.AsyncOpenAI(
        base_url=f"http://{node.http}/v1",
        api_key="none",
        max_retries=0,
        default_headers={"x-kakeya-client": name} if name else {},
    )
