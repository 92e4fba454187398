"""The same weights through mlx and through llama-server: tokens/s of 1 and 4 clients, and the first
token of a prompt that no cache has seen, of the same prompt again, and after a restart of the node.

SmolLM2-135M-Instruct on one node: in float32 as mlx takes it on a CPU, and in the 4 bits of its
GGUF file. The two run in turns.

    .venv/bin/python -m benchmarks.llama
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.eight_agents import PROMPT_WORDS, words
from benchmarks.first_token import first_token
from benchmarks.gateway import completion, post, unique_prompt
from benchmarks.models import REAL, REAL_GGUF
from benchmarks.nodes import wait_ready
from benchmarks.report import emit, interleaved, median
from kakeya.backends.llama.find import find_server
from kakeya.cli.child import NodeProcess

CLIENTS = (1, 4)
COLD, WARM, RESTARTED = 0, -1, -2
"""In their place: first tokens."""
TOKENS = 32
REPEATS = 2
"""Few and short: on two cores mlx decodes some ten tokens of this model a second."""
GOAL = 3.0


def rate(ask: Callable[[], object], clients: int) -> float:
    """Tokens per second of all clients together, with one request each."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(ask) for _ in range(clients)]:
            done.result()
    return clients * TOKENS / (time.perf_counter() - started)


async def main() -> None:
    if find_server() is None or not (REAL.exists() and REAL_GGUF.exists()):
        sys.exit("llama: make scripts/llama_server, scripts/real_model, scripts/real_model gguf")
    models = {"mlx": REAL, "llama": REAL_GGUF}
    named = [flag for name, path in models.items() for flag in ("--model", f"{name}={path}")]
    with tempfile.TemporaryDirectory() as home:
        async with NodeProcess(Path(home), *named) as node:
            await wait_ready(node)

            def ask(name: str) -> float:
                more = {"max_tokens": TOKENS, "draft_policy": "off"}
                return post(node.http, completion(name, unique_prompt(), **more))

            asked: dict[str, str] = {}

            def cold(name: str) -> float:
                asked[name] = words(PROMPT_WORDS, unique_prompt())
                return first_token(node.http, name, asked[name]).seconds

            def warm(name: str) -> float:
                return first_token(node.http, name, asked[name]).seconds

            def measured() -> dict[str, list[float]]:
                for name in models:
                    rate(lambda name=name: ask(name), 2)  # a model tries out its batches
                measures = {
                    (name, clients): (
                        lambda name=name, clients=clients: rate(lambda: ask(name), clients)
                    )
                    for clients in CLIENTS
                    for name in models
                }
                measures |= {(name, COLD): (lambda name=name: cold(name)) for name in models}
                measures |= {(name, WARM): (lambda name=name: warm(name)) for name in models}
                return interleaved(measures, REPEATS)

            rates = await asyncio.to_thread(measured)
            taken = {key: median(found) for key, found in rates.items()}
        async with NodeProcess(Path(home), *named) as node:
            await wait_ready(node)
            for name in models:
                await asyncio.to_thread(ask, name)  # it is loaded
                taken[name, RESTARTED] = await asyncio.to_thread(warm, name)
    for clients in CLIENTS:
        ours, mlx = taken["llama", clients], taken["mlx", clients]
        emit(
            f"{clients} clients, {TOKENS}-token requests, tokens/s, llama-server against mlx",
            model=REAL_GGUF.stem,
            ours=ours,
            baseline=mlx,
            ratio=ours / mlx,
            goal=f">= {GOAL}x",
            met=ours / mlx >= GOAL,
        )
    for kind, which in (
        (COLD, "a 1000-token prompt"),
        (WARM, "the same prompt again"),
        (RESTARTED, "the same prompt after a restart"),
    ):
        ours, mlx = taken["llama", kind], taken["mlx", kind]
        emit(
            f"first token of {which}, ms, llama-server against mlx",
            model=REAL_GGUF.stem,
            ours=1000 * ours,
            baseline=1000 * mlx,
            ratio=mlx / ours,
            goal="faster",
            met=ours < mlx,
        )


if __name__ == "__main__":
    asyncio.run(main())
