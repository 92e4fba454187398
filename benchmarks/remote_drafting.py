"""Drafts from another node against drafts in the engine: the same n-gram proposer both times.

Two real nodes on loopback; the verifier decodes repetitive source text with the embedded model. Its
clients ask it, and then the node that drafts, which has the verifier check its own drafts.

    .venv/bin/python -m benchmarks.remote_drafting
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks.nodes import code_ids, generate, wait_ready
from benchmarks.report import emit, median
from kakeya.cli.child import NodeProcess
from kakeya.sessions.client import Client

TOKENS = 384
REPEATS = 9
FAST = ("--exchange-interval", "0.5")


async def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        async with (
            NodeProcess(Path(home) / "a", *FAST) as verifier,
            NodeProcess(Path(home) / "b", "--peer", verifier.grpc, *FAST) as drafter,
            Client(verifier.grpc) as client,
            Client(drafter.grpc) as drafting,
        ):
            await wait_ready(verifier)
            await asyncio.sleep(2)
            ways = {
                "plain": (client, "off"),
                "local": (client, "ngram"),
                "remote": (client, f"ngram@{drafter.grpc}"),
                "forwarded, plain": (drafting, "off"),
                "forwarded": (drafting, "peer"),
            }
            await measure(ways)


async def measure(ways: dict[str, tuple[Client, str]]) -> None:
    ids = code_ids()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    outputs = set()
    for repeat in range(REPEATS + 1):
        for name, (client, policy) in ways.items():
            tokens, _, seconds = await generate(client, ids, TOKENS, policy)
            outputs.add(tuple(tokens))
            if repeat:  # the first round warms every path up
                rates[name].append(len(tokens) / seconds)
    ours, baseline = median(rates["remote"]), median(rates["local"])
    emit(
        "remote n-gram drafting on loopback, tokens/s",
        ours=ours,
        baseline=baseline,
        ratio=ours / baseline,
        goal=">= 0.95 of in-process drafting",
        met=ours / baseline >= 0.95 and len(outputs) == 1,
        plain=round(median(rates["plain"]), 1),
        identical=len(outputs) == 1,
    )
    ours, baseline = median(rates["forwarded"]), median(rates["forwarded, plain"])
    emit(
        "own n-gram drafts of a node that has its neighbour verify them, tokens/s",
        ours=ours,
        baseline=baseline,
        ratio=ours / baseline,
        goal="> 1 of the neighbour without drafts",
        met=ours > baseline and len(outputs) == 1,
        identical=len(outputs) == 1,
    )


if __name__ == "__main__":
    asyncio.run(main())
