"""How fast a node is there and how little its agent holds, against mlx_lm.server's start.

The agent's figures are of the process that holds no model; its engine child loads meanwhile.

    .venv/bin/python -m benchmarks.startup
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.models import EMBEDDED
from benchmarks.nodes import MlxLmServer, request, resident_mb, wait_ready
from benchmarks.report import emit, median
from kakeya.cli.child import NodeProcess

REPEATS = 5


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
    emit(
        "agent start to ready line, s",
        ours=median(ready),
        baseline=median(server_s),
        ratio=median(ready) / median(server_s),
        goal="<= 1.0 s",
        met=median(ready) <= 1.0,
        loaded_model_s=round(median(loaded), 2),
    )
    emit(
        "agent resident memory, MB",
        ours=median(agent_mb),
        baseline=median(server_mb),
        ratio=median(agent_mb) / median(server_mb),
        goal="<= 120 MB",
        met=median(agent_mb) <= 120,
    )


if __name__ == "__main__":
    main()
