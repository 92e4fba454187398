"""How fast a node is there and how little its agent holds, against mlx_lm.server's start.

The agent's figures are of the process that holds no model; its engine child loads meanwhile. On the
model of real size, once `scripts/real_model` has made it: the time from the ready line, when the
load begins, to the first token, against a fresh process that does the same with mlx_lm.load. A
second start knows the findings of the first one.

    .venv/bin/python -m benchmarks.startup
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.models import EMBEDDED, REAL
from benchmarks.nodes import MlxLmServer, request, resident_mb, wait_ready
from benchmarks.report import emit, median
from kakeya.cli.child import NodeProcess

REPEATS = 5


_THEIRS = """
import sys, time
started = time.perf_counter()
from kakeya.mlx.numerics.blas import preload_blas
preload_blas(1)
import mlx_lm
loading = time.perf_counter()
model, tokenizer = mlx_lm.load(sys.argv[1])
loaded = time.perf_counter()
next(iter(mlx_lm.stream_generate(model, tokenizer, "def main():", max_tokens=1)))
print(loaded - loading, time.perf_counter() - started)
"""


async def first_token(home: Path, model: Path) -> float:
    """Seconds from the ready line of a node to the first token of a request."""
    async with NodeProcess(home, "--model", str(model)) as node:
        started = time.perf_counter()
        body = {"model": "", "prompt": "def main():", "max_tokens": 1}
        body["model"] = node.api.get("/v1/models")["data"][0]["id"]  # type: ignore[index]
        await asyncio.to_thread(request, node.http, "POST", "/v1/completions", body)
        return time.perf_counter() - started


def theirs(model: Path) -> tuple[float, float]:
    """Seconds of mlx_lm.load, and of a process up to its first token."""
    run = [sys.executable, "-c", _THEIRS, str(model)]
    load_s, all_s = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    return float(load_s), float(all_s)


def loads(model: Path) -> None:
    """Compare loads of a model of real size."""
    first, second, load, whole = [], [], [], []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as home:
            first.append(asyncio.run(first_token(Path(home), model)))
            second.append(asyncio.run(first_token(Path(home), model)))
        load_s, all_s = theirs(model)
        load.append(load_s)
        whole.append(all_s)
    _emit(
        "load to first answer, 540 MB, s",
        second,
        whole,
        goal="<= 1.5 of mlx_lm.load",
        met=median(second) / median(whole) <= 1.5,
        first_start_s=round(median(first), 2),
        mlx_lm_load_s=round(median(load), 2),
    )


def _emit(
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    goal: str,
    met: bool,
    **more: object,
) -> None:
    """Print the line of a goal, from all runs of both sides."""
    emit(
        what,
        ours=median(ours),
        baseline=median(theirs),
        ratio=median(ours) / median(theirs),
        goal=goal,
        met=met,
        **more,
    )


async def one_node() -> tuple[float, float, float]:
    """Seconds to the ready line, seconds to a loaded model, MB of the agent after a request."""
    with tempfile.TemporaryDirectory() as home:
        started = time.perf_counter()
        async with NodeProcess(Path(home)) as node:
            ready_s = time.perf_counter() - started
            await wait_ready(node)
            loaded_s = time.perf_counter() - started
            body = {"model": "kakeya-tiny", "prompt": "def main():", "max_tokens": 16}
            await asyncio.to_thread(request, node.http, "POST", "/v1/completions", body)
            return ready_s, loaded_s, resident_mb(node.pid)


def main() -> None:
    ready, loaded, agent_mb, server_s, server_mb = [], [], [], [], []
    for _ in range(REPEATS):
        one, two, three = asyncio.run(one_node())
        ready.append(one)
        loaded.append(two)
        agent_mb.append(three)
        with MlxLmServer(EMBEDDED) as server:
            server_s.append(server.start_s)
            server_mb.append(resident_mb(server.pid))
    _emit(
        "agent start to ready line, s",
        ready,
        server_s,
        goal="<= 1.0 s",
        met=median(ready) <= 1.0,
        loaded_model_s=round(median(loaded), 2),
    )
    _emit(
        "agent resident memory, MB",
        agent_mb,
        server_mb,
        goal="<= 120 MB",
        met=median(agent_mb) <= 120,
    )
    if (REAL / "config.json").is_file():
        loads(REAL)


if __name__ == "__main__":
    main()
