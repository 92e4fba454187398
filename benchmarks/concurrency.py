"""Eight clients at once on the HTTP gateway, against mlx_lm.server and against batch_generate.

Prompts that no cache has seen, 64 tokens each, no drafts; the three run in turns.

    .venv/bin/python -m benchmarks.concurrency
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kakeya.mlx.numerics.blas import preload_blas

preload_blas(threads=1)

from mlx_lm import batch_generate, load  # noqa: E402

from benchmarks.gateway import TOKENS, completion, post, unique_prompt  # noqa: E402
from benchmarks.models import any_model, repeats  # noqa: E402
from benchmarks.nodes import MlxLmServer, wait_ready  # noqa: E402
from benchmarks.report import emit, median  # noqa: E402
from kakeya.cli.child import NodeProcess  # noqa: E402

CLIENTS = 8
ROUNDS = 3
"""Requests of each client in one measurement."""
REPEATS = 5


def rate(ask: Callable[[], object]) -> float:
    """Tokens per second of all clients together, each asking ROUNDS times in a row."""

    def client() -> None:
        for _ in range(ROUNDS):
            ask()

    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(client) for _ in range(CLIENTS)]:
            done.result()
    return CLIENTS * ROUNDS * TOKENS / (time.perf_counter() - started)


async def compare(folder: Path) -> None:
    network, tokenizer = load(str(folder))
    taken: dict[str, list[float]] = {"ours": [], "server": [], "batch": []}

    def inside() -> float:
        started = time.perf_counter()
        for _ in range(ROUNDS):
            prompts = [tokenizer.encode(unique_prompt()) for _ in range(CLIENTS)]
            batch_generate(network, tokenizer, prompts, max_tokens=TOKENS)
        return CLIENTS * ROUNDS * TOKENS / (time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as home, MlxLmServer(folder) as server:
        async with NodeProcess(Path(home), "--model", str(folder)) as node:
            await wait_ready(node)

            def ours() -> float:
                body = completion(folder.name, unique_prompt(), draft_policy="off")
                return post(node.http, body)

            def theirs() -> float:
                return post(server.address, completion(server.model, unique_prompt()))

            for _ in range(repeats(REPEATS)):
                taken["ours"].append(await asyncio.to_thread(rate, ours))
                taken["server"].append(await asyncio.to_thread(rate, theirs))
                taken["batch"].append(inside())
    rates = {name: median(values) for name, values in taken.items()}
    for baseline, name, least in (
        ("server", "mlx_lm.server", 1.3),
        ("batch", "in-process batch_generate", 0.85),
    ):
        ratio = rates["ours"] / rates[baseline]
        emit(
            f"{CLIENTS} clients, 64-token requests, tokens/s, against {name}, {folder.name}",
            ours=rates["ours"],
            baseline=rates[baseline],
            ratio=ratio,
            goal=f">= {least}x",
            met=ratio >= least,
        )


if __name__ == "__main__":
    asyncio.run(compare(any_model("3m")))
