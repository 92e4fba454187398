"""1, 4 and 8 clients at once on the HTTP gateway, against mlx_lm.server and against batch_generate.

Prompts that no cache has seen, 64 tokens each, no drafts; the three run in turns. On the model of
real size also with its weights in 8 and in 4 bits, which have to be as fast as mlx_lm.server.

    .venv/bin/python -m benchmarks.concurrency
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kakeya.mlx.numerics.blas import preload_blas, use_threads

preload_blas(threads=1)

from mlx_lm import batch_generate, load  # noqa: E402

from benchmarks.gateway import TOKENS, completion, post, unique_prompt  # noqa: E402
from benchmarks.models import NAMED, REAL, any_model, quantized, repeats  # noqa: E402
from benchmarks.nodes import MlxLmServer, blas_threads, wait_ready  # noqa: E402
from benchmarks.report import emit, median  # noqa: E402
from kakeya.cli.child import NodeProcess  # noqa: E402

CLIENTS = (1, 4, 8)
ROUNDS = 1 if NAMED else 3
"""Requests of each client in one measurement."""
REPEATS = 5
QUANTIZED_CLIENTS, QUANTIZED_TOKENS = 4, 16
"""Few: on the CPU mlx's product with packed weights takes each row as long as the first."""
GOALS = {
    "server": (1.4, 1.4, 1.6),
    "batch": (0.85, 0.85, 1.1),
}
"""Tokens/s of ours over theirs, by the clients."""
REAL_GOALS = {"server": (1.05, 1.2, 1.2), "batch": (0.85, 0.85, 0.85)}
"""On a model that was named. 1.0 of mlx_lm.server is the least that is to be reached."""


def rate(ask: Callable[[], object], clients: int, tokens: int) -> float:
    """Tokens per second of all clients together, each asking ROUNDS times in a row."""

    def client() -> None:
        for _ in range(ROUNDS):
            ask()

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(client) for _ in range(clients)]:
            done.result()
    return clients * ROUNDS * tokens / (time.perf_counter() - started)


async def compare(folder: Path, counts: tuple[int, ...] = CLIENTS, bits: int = 0) -> None:
    """`bits` of its weights; 0 = they are not quantized."""
    tokens = QUANTIZED_TOKENS if bits else TOKENS
    network, tokenizer = load(str(folder))
    use_threads(blas_threads(folder))
    taken: dict[tuple[str, int], list[float]] = {}

    def inside(clients: int) -> float:
        started = time.perf_counter()
        for _ in range(ROUNDS):
            prompts = [tokenizer.encode(unique_prompt()) for _ in range(clients)]
            batch_generate(network, tokenizer, prompts, max_tokens=tokens)
        return clients * ROUNDS * tokens / (time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as home, MlxLmServer(folder) as server:
        async with NodeProcess(Path(home), "--model", str(folder)) as node:
            await wait_ready(node)

            def ours() -> float:
                more = {"max_tokens": tokens, "draft_policy": "off"}
                return post(node.http, completion(folder.name, unique_prompt(), **more))

            def theirs() -> float:
                body = completion(server.model, unique_prompt(), max_tokens=tokens)
                return post(server.address, body)

            for ask in (ours, theirs):  # both try out a model when requests first meet
                await asyncio.to_thread(rate, ask, 2, tokens)
            for _ in range(repeats(REPEATS)):
                for clients in counts:
                    for name, ask in (("ours", ours), ("server", theirs)):
                        found = await asyncio.to_thread(rate, ask, clients, tokens)
                        taken.setdefault((name, clients), []).append(found)
                    taken.setdefault(("batch", clients), []).append(inside(clients))
    say(folder, counts, {key: median(values) for key, values in taken.items()}, bits)


def say(
    folder: Path, counts: tuple[int, ...], rates: dict[tuple[str, int], float], bits: int
) -> None:
    goals = REAL_GOALS if NAMED else GOALS
    requests = f"{QUANTIZED_TOKENS if bits else TOKENS}-token requests"
    requests += f", {bits}-bit weights" if bits else ""
    for baseline, name in (("server", "mlx_lm.server"), ("batch", "in-process batch_generate")):
        for clients in counts:
            least = 1.0 if bits else goals[baseline][CLIENTS.index(clients)]
            ratio = rates["ours", clients] / rates[baseline, clients]
            emit(
                f"{clients} clients, {requests}, tokens/s, against {name}",
                model=folder.name,
                ours=rates["ours", clients],
                baseline=rates[baseline, clients],
                ratio=ratio,
                goal=f">= {least}x",
                met=ratio >= least,
            )


if __name__ == "__main__":
    asyncio.run(compare(any_model("3m")))
    if NAMED and Path(NAMED) == REAL:
        for bits in (8, 4):
            asyncio.run(compare(quantized(REAL, bits), (QUANTIZED_CLIENTS,), bits))
