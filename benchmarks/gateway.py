"""One client on the HTTP gateway, against mlx_lm.server and against mlx-lm without any server.

Two questions: what does streaming cost per token over in-process stream_generate, and how fast is
a 64-token request, plain and with n-gram drafts on repetitive text. Same model, same prompts,
runs alternate.

    .venv/bin/python -m benchmarks.gateway
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import tempfile
import time
from pathlib import Path

from kakeya.mlx.numerics.blas import preload_blas, use_threads

preload_blas(threads=1)

from mlx_lm import load, stream_generate  # noqa: E402

from benchmarks.models import EMBEDDED, NAMED, any_model, repeats  # noqa: E402
from benchmarks.nodes import CODE, MlxLmServer, blas_threads, wait_ready  # noqa: E402
from benchmarks.report import emit, median  # noqa: E402
from kakeya.cli.child import NodeProcess  # noqa: E402

TOKENS = 64
REPEATS = 15
PLAIN_GOAL, DRAFTED_GOAL = (1.05, 1.5) if NAMED else (1.4, 3.2)
"""On a model that was named, the least that is to be reached is 1.0."""
_WORDS = ("import", "os", "sys", "json", "time", "class", "def", "return", "value", "self")
_serial = itertools.count()


def unique_prompt() -> str:
    """About 35 tokens that no cache has seen."""
    at = next(_serial)
    return f"# case {at}\n" + " ".join(_WORDS[(at * 7 + i * 5) % len(_WORDS)] for i in range(16))


def post(address: str, body: dict[str, object]) -> float:
    """Seconds from the request to the end of its answer."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=600)
    started = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    payload = answer.read()
    seconds = time.perf_counter() - started
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{address}: {answer.status} {payload[:200]!r}")
    return seconds


def completion(model: str, prompt: str, **more: object) -> dict[str, object]:
    return {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **more}


async def compare(folder: Path, *, dense: bool) -> None:
    """`dense`: the folder holds float32, so that stream_generate computes what our engine does."""
    ours_id = folder.name
    network, tokenizer = load(str(folder))
    use_threads(blas_threads(folder))
    taken: dict[str, list[float]] = {
        name: [] for name in ("inside", "ours", "theirs", "ours_stream", "theirs_stream")
    }
    repetitive: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as home, MlxLmServer(folder) as server:
        async with NodeProcess(Path(home), "--model", str(folder)) as node:
            await wait_ready(node)
            for _ in range(repeats(REPEATS)):
                started = time.perf_counter()
                for _ in stream_generate(network, tokenizer, unique_prompt(), max_tokens=TOKENS):
                    pass
                taken["inside"].append(time.perf_counter() - started)
                for stream in (False, True):
                    tail = "_stream" if stream else ""
                    mine = completion(ours_id, unique_prompt(), stream=stream, draft_policy="off")
                    theirs = completion(server.model, unique_prompt(), stream=stream)
                    taken["ours" + tail].append(post(node.http, mine))
                    taken["theirs" + tail].append(post(server.address, theirs))
                text = f"# {next(_serial)}\n" + CODE * 4
                drafted = completion(ours_id, text, draft_policy="ngram")
                repetitive["ours"].append(post(node.http, drafted))
                repetitive["theirs"].append(post(server.address, completion(server.model, text)))
    say(folder.name, {name: median(values) for name, values in taken.items()}, dense=dense)
    ours, theirs = median(repetitive["ours"]), median(repetitive["theirs"])
    emit(
        "64-token request on repetitive text with n-gram drafts, ms",
        model=folder.name,
        ours=1000 * ours,
        baseline=1000 * theirs,
        ratio=theirs / ours,
        goal=f">= {DRAFTED_GOAL}x mlx_lm.server",
        met=theirs / ours >= DRAFTED_GOAL,
    )


def say(name: str, seconds: dict[str, float], *, dense: bool) -> None:
    ours_ms = 1000 * (seconds["ours_stream"] - seconds["inside"]) / TOKENS
    theirs_ms = 1000 * (seconds["theirs_stream"] - seconds["inside"]) / TOKENS
    if dense:
        emit(
            "streaming overhead over in-process stream_generate, ms/token",
            model=name,
            ours=ours_ms,
            baseline=theirs_ms,
            ratio=ours_ms / theirs_ms,
            goal="<= 0.15 ms and <= 1/4 of mlx_lm.server",
            met=ours_ms <= 0.15 and ours_ms <= theirs_ms / 4,
        )
    emit(
        "64-token request, ms",
        model=name,
        ours=1000 * seconds["ours"],
        baseline=1000 * seconds["theirs"],
        ratio=seconds["theirs"] / seconds["ours"],
        goal=f">= {PLAIN_GOAL}x mlx_lm.server",
        met=seconds["theirs"] / seconds["ours"] >= PLAIN_GOAL,
    )


if __name__ == "__main__":
    asyncio.run(compare(any_model("3m"), dense=True))
    if not NAMED:
        asyncio.run(compare(EMBEDDED, dense=False))
