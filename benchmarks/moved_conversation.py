"""The first token of a conversation that has to move: with its KV taken along, and without.

A front node passes turns on to `old`, the only node with the model. Then `new` starts, and `old` is
drained; an answer that still runs there keeps it. The next turn of each conversation goes to `new`,
which fetches its KV from `old`, or computes it where `precache.peers` is off there. An engine
that loads on a busy machine measures no speed, and fetches nothing: it is told the speed of the
cold turns at `old`.

    .venv/bin/python -m benchmarks.moved_conversation [--model DIR] [--link loopback] [--link 1gbit]

Over a shaped link the nodes are network namespaces, as root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import emit, median
from kakeya.cli.child import NodeProcess
from kakeya.mlx.findings import Speeds, decode_findings, encode_findings
from kakeya.node.datadir import FINDINGS
from tests import netns

MODEL = Path.home() / ".cache/kakeya/real-model"
QUICK = ("--exchange-interval", "0.5")
WORDS = 900
PATIENCE_S = 300.0


class Talk:
    """A conversation with a long first message."""

    def __init__(self, number: int, words: int) -> None:
        rng = random.Random(number)
        text = " ".join(rng.choices(("sea", "sky", "sun", "sand", "tide", "wind"), k=words))
        self.messages = [{"role": "user", "content": f"{number}: {text}"}]
        self.name = f"talk-{number}"

    async def turn(
        self, http: httpx.AsyncClient, url: str, model: str
    ) -> tuple[float, dict[str, Any]]:
        """Seconds to the first token, and what is told of the request."""
        body = {"model": model, "messages": self.messages, "max_tokens": 4, "stream": True}
        headers = {"x-kakeya-conversation": self.name}
        began, first_s, answer, answer_id = time.perf_counter(), 0.0, "", ""
        async with http.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers=headers
        ) as stream:
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                told = json.loads(line[6:])
                answer_id = told.get("id", answer_id)
                said = (told.get("choices") or [{}])[0].get("delta", {}).get("content") or ""
                if said and not first_s:
                    first_s = time.perf_counter() - began
                answer += said
        self.messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Go on."},
        ]
        explained: dict[str, Any] = {}
        while "routes" not in explained:  # its account is written behind its last byte
            explained = (await http.get(f"{url}/api/v1/requests/{answer_id}")).json()
        return first_s, explained


async def hold(http: httpx.AsyncClient, url: str, model: str, begun: asyncio.Event) -> None:
    """An answer without an end."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "max_tokens": 7000,
        "stream": True,
        "logit_bias": {"2": -100, "0": -100},
    }
    async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if '"content"' in line:
                begun.set()


class Place:
    """Where a node runs: a machine of its own, or this one."""

    def __init__(self, folder: Path, name: str, machine: netns.Machine | None) -> None:
        self.folder = folder / name
        self.flags = ["--node-id", name, *QUICK]
        self.program = [sys.executable, "-m", "kakeya.node.daemon"]
        if machine is not None:
            self.flags += ["--bind", f"{machine.ip}:50051", "--insecure-lan"]
            self.program = machine.command(*self.program)

    def node(self, *flags: str) -> NodeProcess:
        """The node, to be started."""
        return NodeProcess(self.folder, *self.flags, *flags, program=self.program)


def tell_speed(known: Path, folder: Path, tokens_per_s: float) -> None:
    """Lay what is known of a model into the folder of a node, with a speed."""
    findings = folder / "data" / FINDINGS
    findings.mkdir(mode=0o700, parents=True)
    for file in (known / "data" / FINDINGS).glob("*.json"):
        found = decode_findings(file.read_bytes())
        speeds = Speeds(forwards_s={1: 0.05}, pieces_s={256: 256 / tokens_per_s})
        (findings / file.name).write_bytes(encode_findings(replace(found, speeds=speeds)))


async def moved(
    folder: Path,
    options: argparse.Namespace,
    machines: tuple[netns.Machine, ...],
    *,
    carries: bool,
) -> list[float]:
    """The seconds to the first token of each conversation's turn after its move."""
    places = [
        Place(folder, name, machines[at] if machines else None)
        for at, name in enumerate(("front", "old", "new"))
    ]
    served = ("--model", str(options.model))
    setting = folder / "new.toml"
    setting.write_text(f"[precache]\npeers = {str(carries).lower()}\n")
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(places[0].node("--proposer", "ngram"))
        peer = ("--peer", front.grpc)
        await stack.enter_async_context(places[1].node(*served, *peer))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))
        url = f"http://{front.http}"
        await until_served(http, url, {"old"})
        name = (await http.get(f"{url}/v1/models")).json()["data"][0]["id"]
        talks = [Talk(number, options.words) for number in range(options.talks)]
        cold_s, tokens = 0.0, 0
        for talk in talks:
            cold_s, told = await talk.turn(http, url, name)
            tokens = told["prompt_tokens"]
            print(f"  {talk.name}: first turn, cold at old, {cold_s:.2f} s", flush=True)
        tell_speed(places[1].folder, places[2].folder, tokens / cold_s)
        begun = asyncio.Event()
        holding = asyncio.create_task(hold(http, url, name, begun))
        await begun.wait()
        new = places[2].node(*served, *peer, "--config", str(setting))
        await stack.enter_async_context(new)
        await until_served(http, url, {"old", "new"})
        command = [sys.executable, "-m", "kakeya.cli.main", "drain", "--data-dir"]
        command += [str(places[1].folder / "data"), "--patience", str(PATIENCE_S)]
        draining = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            await until_served(http, url, {"new"})
            found = []
            for talk in talks:
                first_s, told = await talk.turn(http, url, name)
                route = told["routes"][-1]
                print(
                    f"  {talk.name}: next turn at {route['node']}, {first_s:.2f} s, "
                    f"{told['cached_tokens']} of {told['prompt_tokens']} tokens were there",
                    flush=True,
                )
                found.append(first_s)
        finally:
            holding.cancel()
            with contextlib.suppress(ProcessLookupError):
                draining.kill()
            await draining.wait()
            with contextlib.suppress(asyncio.CancelledError):
                await holding
    return found


async def serving(http: httpx.AsyncClient, url: str) -> set[str]:
    """The nodes that offer a model."""
    nodes = (await http.get(f"{url}/api/v1/fleet")).json()["nodes"]
    return {
        card["node_id"]
        for card in nodes
        if any(model.get("role") == "verifier" for model in card["models"])
    }


async def until_served(http: httpx.AsyncClient, url: str, nodes: set[str]) -> None:
    """Wait until just these nodes offer a model."""
    while await serving(http, url) != nodes:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


@contextlib.contextmanager
def places(link: str) -> Iterator[tuple[netns.Machine, ...]]:
    """Machines on links of such a rate, or none for loopback."""
    if link == "loopback":
        yield ()
        return
    with netns.network(3) as machines:
        for machine in machines:
            shape = ("rate", link, "burst", "512kb", "latency", "50ms")
            machine.run("tc", "qdisc", "add", "dev", netns.LAN, "root", "tbf", *shape)
        with machines[0].entered():
            yield machines


def main() -> None:
    """Print a line for each link."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--link", action="append", help="loopback, or a rate as tc takes it")
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--talks", type=int, default=2)
    options = parser.parse_args()
    for link in options.link or ["loopback", "1gbit"]:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        with places(link) as machines, tempfile.TemporaryDirectory(prefix="kk-move-") as folder:
            for carries in (False, True):
                print(f"{link}, KV {'carried' if carries else 'computed again'}", flush=True)
                root = Path(folder) / str(carries)
                root.mkdir()
                seconds[carries] += asyncio.run(moved(root, options, machines, carries=carries))
        emit(
            f"first token of a moved conversation of about {options.words} words over {link}",
            ours=median(seconds[True]),
            baseline=median(seconds[False]),
            ratio=median(seconds[False]) / median(seconds[True]),
            goal="sooner than computed again",
            met=median(seconds[True]) < median(seconds[False]),
        )


if __name__ == "__main__":
    main()
