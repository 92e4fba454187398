"""One node for everything at once: tasks, a GGUF, images, a guarded cloud, agents and a batch job.

A node on a budget for half of its models serves, at the same time, four openai clients that ask for
two tasks and a model, `claude -p` (where scripts/agents has installed it), responses in the
background of priority batch, and images (where torch and diffusers are installed). A second node is
its cloud. Counted: requests without an answer, the longest wait of each kind, the longest silence
of a stream, and what the cloud was asked while the guard kept it out, which is nothing.

.venv/bin/python -m benchmarks.coordinator [--requests 24]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from benchmarks.models import REAL_GGUF
from benchmarks.nodes import wait_ready
from benchmarks.report import emit
from kakeya.cli.child import NodeProcess
from kakeya.gateway.http.connection import HttpLimits
from scripts.agents import MODEL as TOOLS
from scripts.agents import RUNS, run_agent

CLOUD = "cloud:west/kakeya-tiny"
CONFIG = """
[models]
serve = ["{tools}", "kakeya-tiny"{gguf}]
{art}
[clouds.west]
url = "http://{cloud}/v1"

[tasks.write]
candidates = [{write}, "{model}"]

[tasks.titles]
candidates = ["kakeya-tiny", "{tools}"]
priority = "low"
"""
ART = """
[models.art]
path = "{folder}"
may_displace_text = true
"""
_LIMIT_S = 600.0
_MOST_SILENCE_S = 2 * HttpLimits().keepalive_s
"""Keepalives come twice as often; this machine computes beside them."""
_SPARE = 1.05
"""Of the largest model, which has to fit by itself."""
_WORDS = "Tell me in a few words what a lighthouse is for, number "


class Waits:
    """Seconds of each answer by kind of request, and what failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.lost: list[str] = []

    async def note(self, kind: str, ask: Callable[[], Awaitable[bool]]) -> None:
        """Ask once. The client of a refusal that names a time comes again then."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(_LIMIT_S):
                if not await ask():
                    self.lost.append(f"{kind}: an empty answer")
        except Exception as fault:  # noqa: BLE001 - each is a lost request
            self.lost.append(f"{kind}: {type(fault).__name__}: {str(fault)[:200]}")
        self.seconds.setdefault(kind, []).append(time.perf_counter() - began)


def config(cloud: str, art: Path | None) -> str:
    gguf = [f"story={REAL_GGUF}"] if REAL_GGUF.is_file() else []
    return CONFIG.format(
        cloud=cloud,
        tools=TOOLS,
        model=CLOUD,
        gguf="".join(f', "{one}"' for one in gguf),
        art=ART.format(folder=art) if art else "",
        write='"story", "kakeya-tiny"' if gguf else '"kakeya-tiny"',
    )


async def clients(http: str, waits: Waits, count: int) -> None:
    """Four openai clients, one request after the other."""
    async with AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=20) as openai:

        async def one(number: int) -> None:
            for at in range(number, count, 4):
                model = ("write", "titles", TOOLS)[at % 3]

                async def ask(model: str = model, at: int = at) -> bool:
                    answer = await openai.chat.completions.create(
                        model=model,
                        messages=[{"role": "user", "content": f"{_WORDS}{at}."}],
                        max_tokens=24,
                        extra_body={"x_client_id": f"client-{number}"},
                    )
                    return bool(answer.choices[0].finish_reason)

                await waits.note(model, ask)

        await asyncio.gather(*(one(number) for number in range(4)))


async def streams(http: str, waits: Waits, silences: list[float]) -> None:
    """Streams of both tasks and a model, one after the other, with the longest silence of each."""
    async with httpx.AsyncClient(base_url=f"http://{http}", timeout=_LIMIT_S) as plain:

        async def ask(model: str) -> bool:
            text = f"{_WORDS}{len(silences)}, in a stream."
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 24,
                "stream": True,
            }
            while True:
                heard_mono, longest_s, said = time.perf_counter(), 0.0, b""
                async with plain.stream("POST", "/v1/chat/completions", json=body) as answer:
                    if answer.status_code == 200:
                        async for piece in answer.aiter_raw():
                            now = time.perf_counter()
                            longest_s, heard_mono = max(longest_s, now - heard_mono), now
                            said += piece
                        silences.append(longest_s)
                        return said.endswith(b"data: [DONE]\n\n")
                    await asyncio.sleep(float(answer.headers["retry-after"]))

        for model in ("write", "titles", TOOLS) * 2:
            await waits.note("stream", partial(ask, model))


async def batch(http: str, waits: Waits, count: int) -> None:
    """Responses in the background, polled until they end."""
    async with AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=20) as openai:

        async def ask() -> bool:
            made = await openai.responses.create(
                model="write",
                input=f"{_WORDS}0.",
                background=True,
                max_output_tokens=24,
                extra_body={"x_priority": "batch"},
            )
            while made.status in ("queued", "in_progress"):
                await asyncio.sleep(0.5)
                made = await openai.responses.retrieve(made.id)
            return made.status in ("completed", "incomplete")

        await asyncio.gather(*(waits.note("batch", ask) for _ in range(count)))


async def images(http: str, waits: Waits) -> None:
    async with httpx.AsyncClient(base_url=f"http://{http}", timeout=_LIMIT_S) as plain:

        async def ask() -> bool:
            body = {"model": "art", "prompt": "a fox", "size": "64x64", "num_inference_steps": 2}
            while True:
                answer = await plain.post("/v1/images/generations", json=body)
                if answer.status_code not in (429, 503):
                    answer.raise_for_status()
                    return bool(answer.json()["data"])
                await asyncio.sleep(float(answer.headers.get("retry-after", 1)))

        for _ in range(2):
            await waits.note("image", ask)


async def agent(http: str, waits: Waits, folder: Path) -> None:
    async def ask() -> bool:
        passed, seen = await asyncio.to_thread(run_agent, "claude-code", http, folder)
        print(f"claude-code: {seen}", flush=True)
        if not passed:
            answers = json.loads((folder / "answers.json").read_text())
            print(*(one[:400] for one in answers), sep="\n", flush=True)
        return passed

    await waits.note("claude", ask)


async def asked_of(http: str) -> int:
    """The requests for text that a node has answered."""
    async with httpx.AsyncClient(base_url=f"http://{http}") as plain:
        status = (await plain.get("/api/v1/status")).json()
    return sum(int(one["requests"]) for one in status["clients"])


async def guarded(http: str, upstream: str, waits: Waits) -> int:
    """What the cloud is asked while the guard holds; afterwards its model answers by its name."""
    before = await asked_of(upstream)
    async with httpx.AsyncClient(base_url=f"http://{http}", timeout=_LIMIT_S) as plain:
        body = {"model": CLOUD, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

        async def ask() -> bool:
            return (await plain.post("/v1/chat/completions", json=body)).status_code == 200

        await plain.put("/api/v1/config", json={"allowCloudFallback": True})
        await waits.note("cloud", ask)
    return before


async def lent(http: str, art: Path | None) -> tuple[int, int]:
    """The bytes that all models take together, each once in memory, and the most that one needs:
    a node that has not measured it yet goes by its estimate."""
    waits = Waits()
    await clients(http, waits, 3)
    if art:
        await images(http, waits)
    if waits.lost:
        raise RuntimeError(f"a node with room for all models does not answer: {waits.lost}")
    async with httpx.AsyncClient(base_url=f"http://{http}", timeout=_LIMIT_S) as plain:
        memory = (await plain.get("/api/v1/status")).json()["memory"]
    residents = memory["residents"]
    needs = [max(one["lent_bytes"], one["estimate_bytes"]) for one in residents]
    print({one["model"]: one["lent_bytes"] >> 20 for one in residents}, "MB", flush=True)
    return sum(one["lent_bytes"] for one in residents), max(needs)


async def run(count: int, art: Path | None) -> None:
    waits, silences = Waits(), list[float]()
    with tempfile.TemporaryDirectory(prefix="kk") as temporary:
        folder = Path(temporary)
        async with NodeProcess(folder / "west", "--model", "kakeya-tiny") as west:
            file = folder / "node.toml"
            file.write_text(config(west.http, art))
            node = ["--config", str(file)]
            async with NodeProcess(folder / "whole", *node) as whole:
                await wait_ready(whole)
                total, largest = await lent(whole.http, art)
            budget = max(total // 2, int(largest * _SPARE))
            node += ["--memory-budget", str(budget >> 20)]
            async with NodeProcess(folder / "half", *node) as half:
                await wait_ready(half)
                async with httpx.AsyncClient(base_url=f"http://{half.http}") as plain:
                    await plain.put("/api/v1/config", json={"allowCloudFallback": False})
                work = [
                    clients(half.http, waits, count),
                    batch(half.http, waits, count // 4),
                    streams(half.http, waits, silences),
                ]
                if RUNS["claude-code"].program.exists():
                    work.append(agent(half.http, waits, folder / "claude"))
                if art:
                    work.append(images(half.http, waits))
                await asyncio.gather(*work)
                leaked = await guarded(half.http, west.http, waits)
    for problem in waits.lost:
        print(problem, flush=True)
    answers = sum(map(len, waits.seconds.values()))
    emit(
        "requests of all kinds at once on a budget for half of the models: answered",
        ours=answers - len(waits.lost),
        baseline=answers,
        ratio=(answers - len(waits.lost)) / answers,
        goal=f"all, no stream silent for {_MOST_SILENCE_S:g} s",
        met=not waits.lost and not leaked and max(silences) <= _MOST_SILENCE_S,
        longest_s={kind: round(max(one), 1) for kind, one in waits.seconds.items()},
        longest_silence_s=round(max(silences, default=0.0), 1),
        asked_of_guarded_cloud=leaked,
        budget_mb=budget >> 20,
        models_mb=total >> 20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=24)
    options = parser.parse_args()
    art: Path | None = None
    if find_spec("torch") and find_spec("diffusers"):
        from tests.backends.images.tiny_pipelines import save

        art = Path(tempfile.mkdtemp(prefix="kk-art"))
        save("sdxl", art)
    asyncio.run(run(options.requests, art))


if __name__ == "__main__":
    main()
