"""Eight streams decode while a 4,000-token prompt is read: how long do their clients wait between
two pieces of text, on our gateway and on mlx_lm.server; and how long does the long one take. On a
model of real size it is one stream, and a prompt of 1,000 tokens.

The same load in turns; a gap is what a client sees between two events of its stream.

    .venv/bin/python -m benchmarks.long_prompt
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.eight_agents import words
from benchmarks.models import NAMED, any_model
from benchmarks.nodes import MlxLmServer, wait_ready
from benchmarks.report import emit, median, percentile
from kakeya.cli.child import NodeProcess

STREAMS = 1 if NAMED else 8
STREAM_TOKENS = 200 if NAMED else 400
LONG_TOKENS = 1000 if NAMED else 4000
LONG_WORDS = LONG_TOKENS * 9 // 10
REPEATS = 3
_serial = itertools.count()


def stream(
    address: str, model: str, began: threading.Barrier, **more: object
) -> list[tuple[float, float]]:
    """One streamed answer: (when, gap) of each event after the first one."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=300)
    prompt = words(30, f"stream {next(_serial)}")
    body = {"model": model, "prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": True, **more}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    gaps: list[tuple[float, float]] = []
    last: float | None = None
    while line := answer.readline():
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        if last is None:
            began.wait()
        else:
            gaps.append((now, now - last))
        last = time.perf_counter()
    connection.close()
    return gaps


def first_token_s(address: str, model: str, **more: object) -> tuple[float, float]:
    """When a one-token request on a long new prompt began and ended."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=300)
    prompt = words(LONG_WORDS, f"long {next(_serial)}")
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    started = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    payload = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{address}: {answer.status} {payload[:200]!r}")
    return started, time.perf_counter()


def measure(address: str, model: str, **more: object) -> tuple[list[float], float]:
    """Gaps that overlap the long prompt, and the seconds of the long prompt."""
    began = threading.Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [
            pool.submit(stream, address, model, began, temperature=0, **more)
            for _ in range(STREAMS)
        ]
        began.wait()
        start, end = first_token_s(address, model, **more)
        gaps = [
            gap for each in streams for at, gap in each.result() if start < at and at - gap < end
        ]
    return gaps, end - start


async def compare(folder: Path) -> None:
    gaps: dict[str, list[float]] = {"ours": [], "theirs": []}
    whole: dict[str, list[float]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory() as home, MlxLmServer(folder) as server:
        async with NodeProcess(Path(home), "--model", str(folder)) as node:
            await wait_ready(node)
            for _ in range(REPEATS):
                for name, address, model, more in (
                    ("ours", node.http, folder.name, {"draft_policy": "off"}),
                    ("theirs", server.address, server.model, {}),
                ):
                    found, took = await asyncio.to_thread(measure, address, model, **more)
                    gaps[name] += found
                    whole[name].append(took)
    worst = {name: 1000 * percentile(values, 0.99) for name, values in gaps.items()}
    emit(
        f"{STREAMS} streams while a {LONG_TOKENS}-token prompt is read: 99th percentile of a gap, "
        f"ms, {folder.name}",
        ours=worst["ours"],
        baseline=worst["theirs"],
        ratio=worst["ours"] / worst["theirs"],
        goal="<= mlx_lm.server",
        met=worst["ours"] <= worst["theirs"],
        longest_ms={name: round(1000 * max(values), 1) for name, values in gaps.items()},
    )
    emit(
        f"first token of a {LONG_TOKENS}-token prompt beside {STREAMS} streams, s, {folder.name}",
        ours=median(whole["ours"]),
        baseline=median(whole["theirs"]),
        ratio=median(whole["ours"]) / median(whole["theirs"]),
        goal="no goal",
        met=True,
    )


if __name__ == "__main__":
    asyncio.run(compare(any_model("3m")))
