"""Clients that lose the very node that they are connected to, in the middle of a streamed response,
and go on at another one: whether each response is that of an undisturbed run.

The openai client streams from a node that is killed at an event drawn by chance, with its engine;
in turns a node without a model, and one that computes the answer itself. The client then asks
another node for the events behind the last one that it has. The forms are a greedy text with
drafts, a sampled one, a forced call and a JSON Schema.

With --cost instead what copies cost: the time of streams to --clients clients at once, and that of
the same streams without copies, in turns. An idle node sends none.

.venv/bin/python -m benchmarks.gateway_loss [--times 50] [--limit-s 900]
.venv/bin/python -m benchmarks.gateway_loss --cost [--clients 1] [--times 20]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.failover import LIST, MODEL, SEED, Shelf, forms, longest_pause_s, shelf
from benchmarks.report import emit, median, percentile
from benchmarks.shelf_drill.clients import client_of
from kakeya.cli.child import NodeProcess


def asked() -> dict[str, dict[str, Any]]:
    """The body of each form of request."""
    endless = forms()["greedy"][1]["logit_bias"]
    text = {"model": MODEL, "input": "Tell me about the sea.", "stream": True}
    long = text | {"max_output_tokens": 300, "extra_body": {"logit_bias": endless}}
    sampled = {"logit_bias": endless, "seed": SEED, "draft_policy": "off"}
    shape = {"type": "json_schema", "name": "list", "strict": True, "schema": LIST}
    tool = {"type": "function", "name": "list_words", "parameters": LIST, "strict": True}
    return {
        "greedy": long | {"temperature": 0},
        "sampled": long | {"temperature": 0.8, "extra_body": sampled},
        "call": text
        | {"tools": [tool], "tool_choice": "required", "temperature": 0, "max_output_tokens": 800},
        "schema": text
        | {
            "text": {"format": shape},
            "temperature": 0.8,
            "max_output_tokens": 800,
            "extra_body": {"seed": SEED},
        },
    }


@dataclass
class Told:
    """What a client was told of one response, over all its connections."""

    response_id: str = ""
    numbers: list[int] = field(default_factory=list)
    said: str = ""
    output: list[tuple[str, str]] = field(default_factory=list)
    status: str = ""
    moments: list[float] = field(default_factory=list)

    @property
    def shown(self) -> tuple[str, list[tuple[str, str]], str]:
        """What is compared: the deltas, the items at the end, the status."""
        return self.said, self.output, self.status

    @property
    def is_in_order(self) -> bool:
        """Whether each event came once, in its place."""
        return self.numbers == list(range(len(self.numbers)))

    async def follow(self, events: AsyncIterator[Any], stop_at: int = 0) -> None:
        """Take events, up to the one behind `stop_at` others; 0 = to the end."""
        async for event in events:
            self.moments.append(time.perf_counter())
            self.numbers.append(event.sequence_number)
            if event.type == "response.created":
                self.response_id = event.response.id
            elif event.type.endswith(".delta"):
                self.said += event.delta
            elif event.type in ("response.completed", "response.incomplete", "response.failed"):
                self.status = event.response.status
                self.output = [
                    (one.type, one.arguments if one.type == "function_call" else _text(one))
                    for one in event.response.output
                ]
            if stop_at and len(self.numbers) >= stop_at:
                return


def _text(item: Any) -> str:  # noqa: ANN401 - of several types
    return "".join(part.text for part in item.content or ())


async def stream_from(
    node: NodeProcess, body: dict[str, Any], told: Told, stop_at: int = 0
) -> None:
    """Stream a response from a node."""
    async with client_of(node.http) as client:
        await told.follow(await client.responses.create(**body), stop_at)


async def go_on_at(node: NodeProcess, told: Told) -> None:
    """Stream the rest of a response from another node."""
    async with client_of(node.http) as client:
        events = await client.responses.retrieve(
            told.response_id, stream=True, starting_after=told.numbers[-1]
        )
        await told.follow(events)


async def one_loss(here: Shelf, at_front: bool, body: dict[str, Any], stop_at: int) -> Told:
    """Kill the node that streams after so many events, and go on at another one."""
    told = Told()
    node = here.front if at_front else here.minis["left"]
    async with client_of(node.http) as client:
        events = await client.responses.create(**body)
        await told.follow(events, stop_at)
        node.send(signal.SIGKILL)
        # What is on its way still comes; the connection is lost in one way or another.
        with contextlib.suppress(Exception):
            await told.follow(events)
        await events.close()
    if not told.status:
        await go_on_at(here.minis["right"] if at_front else here.front, told)
    return told


async def drill(times: int, limit_s: float) -> None:
    """Lose nodes, and print what became of the responses."""
    rng, began = random.Random(SEED), time.monotonic()
    pauses: list[float] = []
    same = total = 0
    with tempfile.TemporaryDirectory(prefix="kakeya-gateway-loss-") as folder:
        async with shelf(Path(folder)) as here:
            known: dict[str, Told] = {}
            for name, body in asked().items():
                known[name] = Told()
                await stream_from(here.front, body, known[name])
                print(
                    f"{name}: {len(known[name].numbers)} events, {known[name].status}", flush=True
                )
            for number in range(times):
                if time.monotonic() - began > limit_s:
                    break
                name, body = list(asked().items())[number % len(known)]
                whole, at_front = known[name], number % 2 == 0
                stop_at = rng.randrange(1, max(2, len(whole.numbers) * 3 // 4))
                told = await one_loss(here, at_front, body, stop_at)
                is_same = told.shown == whole.shown and told.is_in_order
                total, same = total + 1, same + is_same
                print(f"{total}: {name} at {stop_at} of {len(whole.numbers)}", flush=True)
                pauses.append(longest_pause_s(told.moments))
                if not is_same:
                    print(f"{number} {name} at {stop_at}: {told}", flush=True)
                await mend(here, at_front)
    print(
        f"longest pause of a stream: p50 {percentile(pauses, 0.5):.2f} s, "
        f"p95 {percentile(pauses, 0.95):.2f} s, longest {max(pauses):.2f} s"
    )
    emit(
        "responses that are those of an undisturbed run after the loss of the client's own node",
        ours=same,
        baseline=total,
        ratio=same / max(1, total),
        goal="all",
        met=same == total,
    )


async def mend(here: Shelf, at_front: bool) -> None:
    """Start the lost node again, under its name and addresses."""
    if not at_front:
        await here.mend("left", "kill")
        return
    await here.front.wait()
    await here.front.__aenter__()  # on other ports, as a machine that gets another address
    await here.settled()


async def cost(clients: int, times: int) -> None:
    """Stream with copies and without, in turns, and print the ratio of the times."""
    body = asked()["sampled"]
    taken: dict[bool, list[float]] = {True: [], False: []}

    async def one(node: NodeProcess, is_copied: bool) -> None:
        extra = body["extra_body"] | {"resumable": is_copied}
        await stream_from(node, body | {"extra_body": extra}, Told())

    with tempfile.TemporaryDirectory(prefix="kakeya-gateway-loss-") as folder:
        async with shelf(Path(folder)) as here:
            for number in range(times + 1):
                for is_copied in (True, False):
                    began = time.perf_counter()
                    await asyncio.gather(*(one(here.front, is_copied) for _ in range(clients)))
                    if number:  # the first one warms up
                        taken[is_copied].append(time.perf_counter() - began)
    ours, baseline = median(taken[True]), median(taken[False])
    emit(
        f"seconds of {clients} streams of 300 tokens at once with copies, and without",
        ours=ours,
        baseline=baseline,
        ratio=ours / baseline,
        goal="no goal",
        met=True,
    )


def main() -> None:
    """Run the drill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--limit-s", type=float, default=900.0)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--clients", type=int, default=1)
    options = parser.parse_args()
    if options.cost:
        asyncio.run(cost(options.clients, options.times))
        return
    asyncio.run(drill(options.times, options.limit_s))


if __name__ == "__main__":
    main()
