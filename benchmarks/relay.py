"""Tokens a second through engine, agent and gRPC client, against the engine's own loop.

.venv/bin/python -m benchmarks.relay
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from kakeya.mlx.numerics.blas import preload_blas

preload_blas(threads=1)

from benchmarks.models import random_model  # noqa: E402
from benchmarks.nodes import generate, wait_ready  # noqa: E402
from benchmarks.plain import known_model  # noqa: E402
from benchmarks.report import emit, median  # noqa: E402
from kakeya.cli.child import NodeProcess  # noqa: E402
from kakeya.decoding.control.controller import DraftController  # noqa: E402
from kakeya.engine.kv.slots import KvSlots  # noqa: E402
from kakeya.engine.steps.drafting import RemoteBooks  # noqa: E402
from kakeya.engine.steps.sequence import SequenceRun, SequenceTools, Violations  # noqa: E402
from kakeya.generation.frames import Tokens  # noqa: E402
from kakeya.generation.request import DecodeJob  # noqa: E402
from kakeya.sessions.client import Client  # noqa: E402

PROMPT = list(range(40))
TOKENS = 400
REPEATS = 7


class OwnLoop:
    """The engine's loop in this process, with nobody to tell."""

    def __init__(self, folder: Path) -> None:
        self._model = known_model(str(folder))
        self._tools = SequenceTools(
            slots=KvSlots(0),
            controller=DraftController(),
            books=RemoteBooks(),
            violations=Violations(),
            max_draft_rows=16,
        )

    def rate(self) -> float:
        """Tokens a second after the first token."""
        job = DecodeJob(token_ids=PROMPT, max_tokens=TOKENS)
        first = count = 0.0
        for frame in SequenceRun(self._model, self._tools, job).frames():
            if isinstance(frame, Tokens):
                first = first or time.perf_counter()
                count += len(frame.token_ids)
        return (count - 1) / (time.perf_counter() - first)


async def measure(size: str, goal: float) -> None:
    folder = random_model(size)
    own = OwnLoop(folder)
    relayed: list[float] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as home:
        async with NodeProcess(Path(home), "--model", str(folder)) as node:
            await wait_ready(node)
            async with Client(node.grpc) as client:
                for _ in range(REPEATS):
                    alone.append(own.rate())
                    tokens, seconds, _ = await generate(client, PROMPT, TOKENS, "off")
                    relayed.append((len(tokens) - 1) / seconds)
    ours, baseline = median(relayed), median(alone)
    emit(
        f"relay engine -> agent -> gRPC client, tokens/s, {size}",
        ours=ours,
        baseline=baseline,
        ratio=ours / baseline,
        goal=f">= {goal} of the engine's own loop",
        met=ours / baseline >= goal,
    )


if __name__ == "__main__":
    asyncio.run(measure("05m", 0.85))
    asyncio.run(measure("3m", 0.95))
