"""Clients that lose the very node that they are connected to, in the middle of a stream, and go on
at another one: whether each answer is that of an undisturbed run.

A client streams from a node that is killed at an event drawn by chance, with its engine; in turns a
node without a model, and one that computes the answer itself. The client then asks another node for
the events behind the last one that it has: of responses the openai client by its number, of chats,
completions and messages by Last-Event-ID, in turns with a GET of the answer's address and with the
same request once more. The forms are greedy texts with drafts, sampled ones, forced calls and JSON
Schemas.

With --cost instead what copies cost: the time of streams to --clients clients at once, and that of
the same streams without copies, in turns, of responses, or with --chats of chats. An idle node
sends none.

.venv/bin/python -m benchmarks.gateway_loss [--times 50] [--limit-s 900]
.venv/bin/python -m benchmarks.gateway_loss --cost [--chats] [--clients 1] [--times 20]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx

from benchmarks.failover import LIST, MODEL, STORY, Shelf, forms, shelf
from benchmarks.losses import SEED, Loss, longest_pause_s, lose_often, tell
from benchmarks.report import emit, median
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


def asked_by_events() -> dict[str, tuple[str, dict[str, Any]]]:
    """The path and body of each form of request whose events are read as they are sent."""
    endless = forms()["greedy"][1]["logit_bias"]
    message = {"model": MODEL, "messages": STORY, "max_tokens": 800, "stream": True}
    tool = {"name": "list_words", "input_schema": LIST}
    chosen = {
        name: (f"/v1/{path}", body) for name, (path, body) in forms().items() if name != "two"
    }
    return chosen | {
        "message": (
            "/v1/messages",
            message | {"max_tokens": 300, "temperature": 0, "logit_bias": endless},
        ),
        "message with a call": (
            "/v1/messages",
            message | {"tools": [tool], "tool_choice": {"type": "any"}, "temperature": 0},
        ),
    }


class Told(Protocol):
    """What a client was told of one answer, over all its connections."""

    moments: list[float]

    @property
    def count(self) -> int:
        """How many events came."""
        ...

    @property
    def shown(self) -> object:
        """What is compared."""
        ...

    @property
    def is_in_order(self) -> bool:
        """Whether each event came once, in its place."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the end came."""
        ...

    async def begin(
        self, node: NodeProcess, stop_at: int = 0, lose: Callable[[], None] = lambda: None
    ) -> None:
        """Stream from a node, which is lost behind so many events; 0 = it is not."""
        ...

    async def go_on(self, node: NodeProcess) -> None:
        """Stream the rest from another node."""
        ...


class ToldResponse:
    """A response, by the openai client."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._response_id = ""
        self._numbers: list[int] = []
        self._said = ""
        self._output: list[tuple[str, str]] = []
        self._status = ""
        self.moments: list[float] = []

    @property
    def count(self) -> int:
        """How many events came."""
        return len(self._numbers)

    @property
    def shown(self) -> object:
        """The deltas, the items at the end, the status."""
        return self._said, self._output, self._status

    @property
    def is_in_order(self) -> bool:
        """Whether each event came once, in its place."""
        return self._numbers == list(range(len(self._numbers)))

    @property
    def is_over(self) -> bool:
        """Whether the end came."""
        return bool(self._status)

    async def begin(
        self, node: NodeProcess, stop_at: int = 0, lose: Callable[[], None] = lambda: None
    ) -> None:
        """Stream from a node, which is lost behind so many events; 0 = it is not."""
        async with client_of(node.http) as client:
            events = await client.responses.create(**self._body)
            await self._follow(events, stop_at)
            if not stop_at:
                return
            lose()
            # What is on its way still comes; the connection is lost in one way or another.
            with contextlib.suppress(Exception):
                await self._follow(events)
            await events.close()

    async def go_on(self, node: NodeProcess) -> None:
        """Stream the rest from another node."""
        async with client_of(node.http) as client:
            events = await client.responses.retrieve(
                self._response_id, stream=True, starting_after=self._numbers[-1]
            )
            await self._follow(events)

    async def _follow(self, events: AsyncIterator[Any], stop_at: int = 0) -> None:
        """Take events, up to the one behind `stop_at` others; 0 = to the end."""
        async for event in events:
            self.moments.append(time.perf_counter())
            self._numbers.append(event.sequence_number)
            if event.type == "response.created":
                self._response_id = event.response.id
            elif event.type.endswith(".delta"):
                self._said += event.delta
            elif event.type in ("response.completed", "response.incomplete", "response.failed"):
                self._status = event.response.status
                self._output = [
                    (one.type, one.arguments if one.type == "function_call" else _text(one))
                    for one in event.response.output
                ]
            if stop_at and len(self._numbers) >= stop_at:
                return


def _text(item: Any) -> str:  # noqa: ANN401 - of several types
    return "".join(part.text for part in item.content or ())


_TRIES = 5
"""Of a client whose resumption is refused for another try."""


class ToldEvents:
    """An answer whose events are read as they are sent, by their ids."""

    def __init__(self, path: str, body: Mapping[str, Any], *, posts: bool) -> None:
        """`posts` = the client goes on by the same request, and not by a GET."""
        self._path = path
        self._body = body
        self._posts = posts
        self._ids: list[str] = []
        self._events: list[str] = []
        self.moments: list[float] = []

    @property
    def count(self) -> int:
        """How many events came."""
        return len(self._ids)

    @property
    def shown(self) -> object:
        """The events, without what differs between two answers: ids, times and costs."""
        bodies = [json.loads(one) if one.startswith("{") else {"end": one} for one in self._events]
        for body in bodies:
            for name in ("id", "created", "usage", "message"):
                body.pop(name, None)
        return re.sub(r'"(call_|toolu_)\w+"', "", json.dumps(bodies))

    @property
    def is_in_order(self) -> bool:
        """Whether each event came once, in its place."""
        answer_id = self._ids[0].rpartition(":")[0]
        return self._ids == [f"{answer_id}:{number}" for number in range(len(self._ids))]

    @property
    def is_over(self) -> bool:
        """Whether the end came."""
        return self._events[-1] == "[DONE]" or "message_stop" in self._events[-1]

    async def begin(
        self, node: NodeProcess, stop_at: int = 0, lose: Callable[[], None] = lambda: None
    ) -> None:
        """Stream from a node, which is lost behind so many events; 0 = it is not."""
        with contextlib.suppress(httpx.TransportError):
            await self._stream(node, "POST", self._path, {}, stop_at, lose)

    async def go_on(self, node: NodeProcess) -> None:
        """Stream the rest from another node."""
        last = {"Last-Event-ID": self._ids[-1]}
        address = f"{self._path}/{self._ids[-1].rpartition(':')[0]}"
        way = ("POST", self._path) if self._posts else ("GET", address)
        for left in reversed(range(_TRIES)):
            try:
                await self._stream(node, *way, last)
            except httpx.HTTPStatusError as refusal:
                if refusal.response.status_code != 503 or not left:
                    raise
                print(f"refused: {refusal}", flush=True)
                await asyncio.sleep(float(refusal.response.headers["retry-after"]))
            else:
                return

    async def _stream(
        self,
        node: NodeProcess,
        method: str,
        path: str,
        headers: Mapping[str, str],
        stop_at: int = 0,
        lose: Callable[[], None] = lambda: None,
    ) -> None:
        body = self._body if method == "POST" else None
        async with (
            httpx.AsyncClient(timeout=120, base_url=f"http://{node.http}") as client,
            client.stream(method, path, json=body, headers=headers) as answer,
        ):
            answer.raise_for_status()
            event_id = ""
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: ") and event_id:
                    self.moments.append(time.perf_counter())
                    self._ids.append(event_id)
                    self._events.append(line[6:])
                    event_id = ""
                    if len(self._ids) == stop_at:
                        lose()


def clients() -> Mapping[str, Callable[[bool], Told]]:
    """What makes a client for each form; with true one that goes on by the same request."""

    def by_events(path: str, body: Mapping[str, Any]) -> Callable[[bool], Told]:
        return lambda posts: ToldEvents(path, body, posts=posts)

    def by_client(body: Mapping[str, Any]) -> Callable[[bool], Told]:
        return lambda _: ToldResponse(body)

    responses = {f"response, {name}": by_client(body) for name, body in asked().items()}
    others = {
        f"{path.removeprefix('/v1/')}, {name}": by_events(path, body)
        for name, (path, body) in asked_by_events().items()
    }
    return responses | others


async def drill(times: int, limit_s: float) -> None:
    """Lose nodes, and print what became of the answers."""
    with tempfile.TemporaryDirectory(prefix="kakeya-gateway-loss-") as folder:
        async with shelf(Path(folder)) as here:
            known: dict[str, Told] = {}
            for name, make in clients().items():
                known[name] = make(False)
                await known[name].begin(here.front)
                print(f"{name}: {known[name].count} events", flush=True)

            async def one_loss(number: int, name: str, at: int) -> Loss:
                at_front = number % 2 == 0
                node = here.front if at_front else here.minis["left"]
                told = clients()[name](number % 4 < 2)
                await told.begin(node, at, lambda: node.send(signal.SIGKILL))
                if not told.is_over:
                    await told.go_on(here.minis["right"] if at_front else here.front)
                await mend(here, at_front)
                is_same = told.shown == known[name].shown and told.is_in_order
                pause_s = longest_pause_s(told.moments)
                return Loss("front" if at_front else "model", is_same, pause_s, told.shown)

            pieces = {name: whole.count for name, whole in known.items()}
            found = await lose_often(one_loss, pieces, times=times, limit_s=limit_s)
    tell(
        "answers that are those of an undisturbed run after the loss of the client's own node",
        found,
    )


async def mend(here: Shelf, at_front: bool) -> None:
    """Start the lost node again, under its name and addresses."""
    if not at_front:
        await here.mend("left", "kill")
        return
    await here.front.wait()
    await here.front.__aenter__()  # on other ports, as a machine that gets another address
    await here.settled()


async def cost(clients: int, times: int, *, is_chat: bool) -> None:
    """Stream with copies and without, in turns, and print the ratio of the times."""
    taken: dict[bool, list[float]] = {True: [], False: []}

    async def one(node: NodeProcess, is_copied: bool) -> None:
        async with client_of(node.http) as client:
            if is_chat:
                chat = {"model": MODEL, "messages": STORY, "stream": True, "max_tokens": 300}
                endless = forms()["greedy"][1]["logit_bias"]
                sampled = {"temperature": 0.8, "seed": SEED, "logit_bias": endless}
                body = chat | sampled | {"draft_policy": "off", "resumable": is_copied}
                base = f"http://{node.http}"
                async with (
                    httpx.AsyncClient(timeout=120, base_url=base) as plain,
                    plain.stream("POST", "/v1/chat/completions", json=body) as answer,
                ):
                    async for _ in answer.aiter_raw():
                        pass
                return
            response = asked()["sampled"]
            extra = response["extra_body"] | {"resumable": is_copied}
            async for _ in await client.responses.create(**response | {"extra_body": extra}):
                pass

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
    parser.add_argument("--chats", action="store_true")
    parser.add_argument("--clients", type=int, default=1)
    options = parser.parse_args()
    if options.cost:
        asyncio.run(cost(options.clients, options.times, is_chat=options.chats))
        return
    asyncio.run(drill(options.times, options.limit_s))


if __name__ == "__main__":
    main()
