"""Nodes and engines that are lost while they answer: whether each answer is that of an undisturbed
run, and how long its client waits.

kill      the agent of the node that answers is killed, and its engine with it
engine    only the engine of that node is killed
stop      the agent is stopped, as a machine that hangs

A front node without a model, and two nodes with one. A client streams in five forms: a greedy
text, a sampled one, a forced call, a JSON Schema, two answers at once. At a token drawn by chance
the node that answers is lost; it is started again after the answer. A pause is the longest one
between two pieces of an answer, beside the longest one of the undisturbed answer.

With --clients so many ask all the time, some leave in the middle, and nodes are lost at any moment:
no request may hang, end in the middle or give another answer.

.venv/bin/python -m benchmarks.failover [--times 100] [--faults kill,engine,stop] [--limit-s 900]
.venv/bin/python -m benchmarks.failover --clients 8 --limit-s 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import kakeya
from benchmarks.losses import SEED, Loss, longest_pause_s, lose_often, tell
from benchmarks.report import emit
from kakeya.cli.child import NodeProcess

MODEL = "kakeya-tiny-tools"
FOLDER = Path(kakeya.__file__).parent / "models" / MODEL
FAULTS = ("kill", "engine", "stop")
QUICK = ("--exchange-interval", "0.5")
WORDS = {"type": "string", "enum": ["sea", "sky", "sun", "sand"]}
LIST = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": WORDS, "minItems": 60, "maxItems": 60}},
    "required": ["words"],
    "additionalProperties": False,
}
STORY = [{"role": "user", "content": "Tell me about the sea."}]


def forms() -> dict[str, tuple[str, dict[str, Any]]]:
    """The route and body of each form of request, long enough to be cut in the middle."""
    config = json.loads((FOLDER / "generation_config.json").read_text())
    ends = config["eos_token_id"]
    endless = {str(one): -100 for one in (ends if isinstance(ends, list) else [ends])}
    chat = {"model": MODEL, "messages": STORY, "stream": True}
    text = {"model": MODEL, "prompt": "import os", "max_tokens": 400, "stream": True}
    plain = text | {"draft_policy": "off"}
    tool = {"type": "function", "function": {"name": "list_words", "parameters": LIST}}
    shape = {"name": "list", "strict": True, "schema": LIST}
    return {
        "greedy": ("completions", text | {"temperature": 0, "logit_bias": endless}),
        "sampled": (
            "completions",
            plain | {"temperature": 0.8, "seed": SEED, "logit_bias": endless},
        ),
        "call": (
            "chat/completions",
            chat
            | {"tools": [tool], "tool_choice": "required", "temperature": 0, "max_tokens": 800},
        ),
        "schema": (
            "chat/completions",
            chat
            | {
                "response_format": {"type": "json_schema", "json_schema": shape},
                "temperature": 0.8,
                "seed": SEED,
                "max_tokens": 800,
            },
        ),
        "two": ("completions", plain | {"temperature": 0.8, "seed": SEED, "n": 2}),
    }


@dataclass
class Streamed:
    """What a client got: the texts of its answers by index, and the moments of the pieces."""

    texts: dict[int, str] = field(default_factory=dict)
    moments: list[float] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)
    error: str = ""

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Add a piece of the answer, as the stream has it."""
        for choice in chunk["choices"]:
            self.moments.append(time.perf_counter())
            index = choice["index"]
            delta = choice.get("delta") or {}
            said = choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                said += (call["function"].get("name") or "") + call["function"]["arguments"]
            self.texts[index] = self.texts.get(index, "") + said
            if choice.get("finish_reason"):
                self.ends[index] = choice["finish_reason"]

    @property
    def pause_s(self) -> float:
        """The longest time between two pieces."""
        return longest_pause_s(self.moments)

    @property
    def said(self) -> tuple[object, object]:
        """What is compared."""
        return self.texts, self.ends


class Shelf:
    """The front node and the minis; a lost mini comes back under its name and addresses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.front = NodeProcess(
            folder / "front", "--node-id", "front", "--proposer", "ngram", *QUICK
        )
        self.minis: dict[str, NodeProcess] = {}

    async def start(self, name: str) -> None:
        """Start a mini, or start it again."""
        flags = ["--node-id", name, "--model", MODEL, "--peer", self.front.grpc, *QUICK]
        if (before := self.minis.get(name)) is not None:
            flags += ["--bind", before.grpc, "--http", before.http]
        node = NodeProcess(self._folder / name, *flags)
        await node.__aenter__()
        self.minis[name] = node

    async def settled(self) -> None:
        """Wait until the front would send requests to every mini."""
        async with asyncio.timeout(60):
            while not await self._are_quoted():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)

    async def _are_quoted(self) -> bool:
        """Whether a request would find both: their cards are live and nothing is in doubt."""
        nodes = (await self.get(self.front, "/api/v1/fleet"))["nodes"]
        good = [
            one["node_id"]
            for one in nodes
            if MODEL in str(one["models"]) and not one["is_suspect"] and not one["is_self"]
        ]
        states = [
            model["state"]
            for name in self.minis
            for model in (await self.get(self.minis[name], "/api/v1/status"))["models"]
            if model["model_id"] == MODEL
        ]
        return len(good) == len(self.minis) and states == ["ready"] * len(self.minis)

    async def get(self, node: NodeProcess, path: str) -> Any:  # noqa: ANN401 - JSON
        """The body of a GET."""
        async with httpx.AsyncClient(timeout=20) as client:
            return (await client.get(f"http://{node.http}{path}")).json()

    async def routed(self) -> Counter[str]:
        """How many generations went to each mini."""
        return Counter((await self.get(self.front, "/api/v1/status"))["routes"]["by_node"])

    async def lose(self, name: str, fault: str) -> None:
        """Let the node be lost."""
        node = self.minis[name]
        if fault == "engine":
            models = (await self.get(node, "/api/v1/status"))["models"]
            os.kill(next(m["pid"] for m in models if m["model_id"] == MODEL), signal.SIGKILL)
        else:
            node.send(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    async def mend(self, name: str, fault: str) -> None:
        """Start a lost node again."""
        if fault != "engine":
            node = self.minis[name]
            node.send(signal.SIGCONT)
            node.send(signal.SIGKILL)
            await node.wait()
            await self.start(name)
        await self.settled()


@asynccontextmanager
async def shelf(folder: Path) -> AsyncIterator[Shelf]:
    """A front node and two minis, all ready."""
    found = Shelf(folder)
    async with found.front:
        try:
            for name in ("left", "right"):
                await found.start(name)
            await found.settled()
            yield found
        finally:
            for node in found.minis.values():
                node.send(signal.SIGCONT)
                await node.stop()


async def stream(
    here: Shelf, form: tuple[str, Mapping[str, Any]], lose_at: int = 0, fault: str = ""
) -> tuple[Streamed, str]:
    """Stream one answer; after `lose_at` pieces its node is lost. Returns the node's name too."""
    path, body = form
    got, lost = Streamed(), ""
    before = await here.routed()
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"http://{here.front.http}/v1/{path}", json=body) as answer,
    ):
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                got.error = str(chunk["error"])
                break
            got.take(chunk)
            if fault and not lost and len(got.moments) >= lose_at:
                lost = next(iter(await here.routed() - before))
                await here.lose(lost, fault)
    return got, lost


async def drill(times: int, faults: Sequence[str], limit_s: float) -> None:
    """Lose nodes, and print what became of the answers."""
    with tempfile.TemporaryDirectory(prefix="kakeya-failover-") as folder:
        async with shelf(Path(folder)) as here:
            known = {name: (await stream(here, form))[0] for name, form in forms().items()}
            for name, whole in known.items():
                print(f"{name}: {len(whole.moments)} pieces, {whole.ends}", flush=True)

            async def one_loss(number: int, name: str, at: int) -> Loss:
                fault, whole = faults[number % len(faults)], known[name]
                got, lost = await stream(here, forms()[name], at, fault)
                if lost:
                    await here.mend(lost, fault)
                is_same = got.said == whole.said and not got.error
                return Loss(fault, is_same, got.pause_s - whole.pause_s, got.error or got.said)

            pieces = {name: len(whole.moments) for name, whole in known.items()}
            found = await lose_often(one_loss, pieces, times=times, limit_s=limit_s)
            moved = (await here.get(here.front, "/api/v1/status"))["routes"]["moved"]
    tell("answers that are those of an undisturbed run", found, moved=moved)


async def crowd(clients: int, faults: Sequence[str], seconds: float) -> None:
    """Let clients ask all the time while nodes are lost, one after the other; print what they got.
    Some clients leave in the middle of an answer."""
    rng, until = random.Random(SEED), time.monotonic() + seconds
    outcomes: Counter[str] = Counter()
    longest_s = 0.0

    async def client(here: Shelf, known: Mapping[str, Streamed]) -> None:
        nonlocal longest_s
        while time.monotonic() < until:
            name, form = rng.choice(list(forms().items()))
            began = time.monotonic()
            try:
                async with asyncio.timeout(rng.uniform(0.05, 1.0) if rng.random() < 0.2 else 150):
                    got, _ = await stream(here, form)
            except TimeoutError:
                outcomes["left" if time.monotonic() - began < 100 else "hung"] += 1
                continue
            except httpx.HTTPStatusError as refused:
                outcomes[f"refused with {refused.response.status_code}"] += 1
                await asyncio.sleep(1)
                continue
            longest_s = max(longest_s, time.monotonic() - began)
            is_same = got.said == known[name].said
            outcomes["error" if got.error else "same" if is_same else "other"] += 1
            if got.error or not is_same:
                print(f"{name}: {got.error or got.said}", flush=True)

    async def lose(here: Shelf) -> int:
        count = 0
        while time.monotonic() < until - 20:
            await asyncio.sleep(rng.uniform(0.5, 4))
            name, fault = rng.choice(list(here.minis)), faults[count % len(faults)]
            await here.lose(name, fault)
            count += 1
            await asyncio.sleep(rng.uniform(0, 12) if fault == "stop" else 1)
            await here.mend(name, fault)
        return count

    with tempfile.TemporaryDirectory(prefix="kakeya-failover-") as folder:
        async with shelf(Path(folder)) as here:
            known = {name: (await stream(here, form))[0] for name, form in forms().items()}
            lost = asyncio.create_task(lose(here))
            await asyncio.gather(*(client(here, known) for _ in range(clients)))
            count = await lost
            await asyncio.sleep(2)
            left = [
                await here.get(node, "/api/v1/status")
                for node in (here.front, *here.minis.values())
            ]
            busy = sum(one["running"] + one["waiting"] for told in left for one in told["clients"])
            moved = left[0]["routes"]["moved"]
    total = sum(outcomes.values())
    print(f"{total} requests, {count} losses, {moved} answers moved: {dict(outcomes)}")
    print(f"the longest answer took {longest_s:.1f} s; requests left behind: {busy}")
    wrong = outcomes["other"] + outcomes["hung"] + outcomes["error"] + busy
    emit(
        "requests that hang, end in the middle or give another answer",
        ours=wrong,
        baseline=total,
        ratio=wrong / max(1, total),
        goal="none",
        met=wrong == 0,
    )


def main() -> None:
    """Run the drill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--limit-s", type=float, default=900.0)
    parser.add_argument("--clients", type=int, default=0, help="ask all the time, for --limit-s")
    options = parser.parse_args()
    if options.clients:
        asyncio.run(crowd(options.clients, options.faults.split(","), options.limit_s))
        return
    asyncio.run(drill(options.times, options.faults.split(","), options.limit_s))


if __name__ == "__main__":
    main()
