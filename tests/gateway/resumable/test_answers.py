"""Streams of chats, completions and messages that another gateway goes on with."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.dispatch.profiles import ProfileSpec
from kakeya.dispatch.registry import TaskRegistry
from tests.gateway.resumable.pair import Pair, pair
from tests.gateway.toy import Pace, Served, ToyModel, make_folder
from tests.laws import law
from tests.waiting import until

SAID = "Hello there, how are you today? I am well, thank you. " * 3
CALL = 'Let me see.<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}}
HI = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "toy", "messages": HI, "stream": True}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT
    | {"tools": [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]},
    "/v1/completions": {"model": "toy", "prompt": "hi", "max_tokens": 400, "stream": True},
    "/v1/messages": CHAT
    | {"max_tokens": 400, "tools": [{"name": "look", "input_schema": PARAMETERS}]},
    "/v1/responses": {"model": "toy", "input": "hi", "stream": True},
}
PACE = Pace(step_s=0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "toy")


def toy(folder: Path, script: str, pace: Pace = PACE) -> ToyModel:
    return ToyModel(folder, script=script, pace=pace, context_tokens=4096)


async def events(answer: httpx.Response, most: int = 10**6) -> list[bytes]:
    """The events of a stream, without its comments and pings."""
    answer.raise_for_status()
    found: list[bytes] = []
    left = b""
    async for piece in answer.aiter_bytes():
        *whole, left = (left + piece).split(b"\n\n")
        told = [re.sub(rb"(?m)^:.*\n?", b"", one) for one in whole]
        found += [one for one in told if one.startswith(b"id: ")]
        if len(found) >= most:
            break
    return found[:most]


async def stream(served: Served, path: str, most: int = 10**6, **headers: str) -> list[bytes]:
    """The first events of a new stream, whose client then loses its connection; or, with
    Last-Event-ID, of one that it goes on with by the same request."""
    sent = served.http.stream("POST", path, json=ASKED[path], headers=headers)
    async with sent as answer:
        return await events(answer, most)


async def rest(served: Served, path: str, last: str, most: int = 10**6) -> list[bytes]:
    address = f"{path}/{last.rpartition(':')[0]}"
    async with served.http.stream("GET", address, headers={"Last-Event-ID": last}) as answer:
        return await events(answer, most)


def id_of(event: bytes) -> str:
    return event.split(b"\n")[0].removeprefix(b"id: ").decode()


def same(path: str, told: list[bytes]) -> list[Any]:
    """What events say, without what differs between two answers: ids, times and costs."""
    bodies = [one.partition(b"data: ")[2] for one in told]
    found = [json.loads(one) if one.startswith(b"{") else one for one in bodies]
    for body in found:
        if isinstance(body, dict):
            for name in ("id", "created", "message", "usage", "item_id", "item", "response"):
                body.pop(name, None)
            for choice in body.get("choices", ()):
                for call in choice.get("delta", {}).get("tool_calls", ()):
                    call.pop("id")
            body.get("content_block", {}).pop("id", None)
    return found


class Shelf:
    """A pair of gateways for all examples of a law."""

    def __init__(self, folder: Path) -> None:
        self.models = [toy(folder, SAID) for _ in range(2)]
        self._loop = asyncio.new_event_loop()
        self._life = AsyncExitStack()
        self.pair: Pair = self.run(self._life.enter_async_context(pair(*self.models)))

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self._life.aclose())
        self._loop.close()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    asyncio.set_event_loop(None)
    found = Shelf(make_folder(tmp_path_factory.mktemp("law") / "toy"))
    yield found
    found.close()


@given(
    path=st.sampled_from(sorted(ASKED)),
    script=st.sampled_from([SAID, CALL, SAID + CALL]),
    steps=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    per_step=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    posts=st.booleans(),
)
@law(180)
def test_no_event_is_lost_or_comes_twice_however_often_a_client_is_cut_off(
    shelf: Shelf,
    path: str,
    script: str,
    steps: list[int],
    per_step: tuple[int, int],
    posts: bool,
) -> None:
    """A client that goes on at one gateway and the other in turns has the events of one stream."""
    for model, size in zip(shelf.models, per_step, strict=True):
        model.script, model.pace = script, Pace(per_step=size)
    both = shelf.pair.first, shelf.pair.second

    async def run() -> None:
        got = await stream(both[0], path, steps[0])
        for number, most in enumerate([*steps[1:], 10**6], start=1):
            at, last = both[number % 2], id_of(got[-1])
            if posts:
                got += await stream(at, path, most, **{"Last-Event-ID": last})
            else:
                got += await rest(at, path, last, most)
        (answer_id,) = {id_of(one).rpartition(":")[0] for one in got}
        assert [id_of(one) for one in got] == [f"{answer_id}:{n}" for n in range(len(got))]
        whole = await stream(both[1], path)
        assert same(path, got) == same(path, whole)

    shelf.run(run())


@pytest.mark.parametrize("path", ASKED)
async def test_the_events_of_a_complete_answer_are_the_same_bytes_at_each_node(
    folder: Path, path: str
) -> None:
    one, two = (toy(folder, SAID + CALL, Pace(per_step=3)) for _ in range(2))
    async with pair(one, two) as nodes:
        whole = await stream(nodes.first, path)
        await until(lambda: not nodes.fleet.is_sending)
        address = f"{path}/{id_of(whole[0]).rpartition(':')[0]}"
        for served in (nodes.second, nodes.first):
            async with served.http.stream("GET", address + "?stream=true") as answer:
                assert await events(answer) == whole
        last = id_of(whole[6])
        assert await rest(nodes.second, path, last) == whole[7:]
        assert not two.requests, "a complete answer is not computed again"


@pytest.mark.parametrize("path", ASKED)
async def test_what_was_told_before_a_loss_is_told_again_in_the_same_bytes(
    folder: Path, path: str
) -> None:
    one, two = (ToyModel(folder, script=SAID, pace=PACE) for _ in range(2))
    async with pair(one, two) as nodes:
        got = await stream(nodes.first, path, 30)
        await nodes.lose_first()
        address = f"{path}/{id_of(got[0]).rpartition(':')[0]}"
        async with nodes.second.http.stream("GET", address + "?stream=true") as answer:
            again = await events(answer)
        assert again[:30] == got
        assert len(two.requests) == 1


async def test_the_whole_answer_is_shown_without_a_stream(folder: Path) -> None:
    one, two = (ToyModel(folder, script="hello world", pace=PACE) for _ in range(2))
    async with pair(one, two) as nodes:
        for path, text in (
            ("/v1/chat/completions", lambda body: body["choices"][0]["message"]["content"]),
            ("/v1/completions", lambda body: body["choices"][0]["text"]),
            ("/v1/messages", lambda body: body["content"][0]["text"]),
        ):
            got = await stream(nodes.first, path, 2)
            answer_id = id_of(got[0]).rpartition(":")[0]
            answer = await nodes.second.http.get(f"{path}/{answer_id}")
            assert (answer.json()["id"], text(answer.json())) == (answer_id, "hello world")


# --- what a client may ask


async def test_an_answer_is_found_by_its_own_client_at_its_own_path(folder: Path) -> None:
    path = "/v1/messages"
    one, two = (ToyModel(folder, script=SAID, pace=PACE) for _ in range(2))
    async with pair(one, two) as nodes:
        got = await stream(nodes.first, path, 5, **{"x-kakeya-client": "ann"})
        address = f"{path}/{id_of(got[0]).rpartition(':')[0]}"
        refused = await nodes.second.http.get(address)
        assert refused.status_code == 404
        assert "held for this client by this node, nor by one" in refused.json()["error"]["message"]
        assert "10 minutes" in refused.json()["error"]["message"]
        ann = {"x-kakeya-client": "ann"}
        assert (await nodes.second.http.get(address, headers=ann)).status_code == 200
        other = address.replace("/v1/messages", "/v1/chat/completions")
        refused = await nodes.second.http.get(other, headers=ann)
        assert "no answer of /v1/chat/completions" in refused.json()["error"]["message"]


async def test_another_request_does_not_get_the_answer_of_the_first(folder: Path) -> None:
    path = "/v1/chat/completions"
    one, two = (ToyModel(folder, script=SAID, pace=PACE) for _ in range(2))
    async with pair(one, two) as nodes:
        got = await stream(nodes.first, path, 5)
        last = {"Last-Event-ID": id_of(got[-1])}
        other = ASKED[path] | {"messages": [{"role": "user", "content": "ho"}]}
        refused = await nodes.second.http.post(path, json=other, headers=last)
        assert refused.status_code == 400
        assert "its messages differs" in refused.json()["error"]["message"]
        gone = {"Last-Event-ID": "chatcmpl-nothing:3"}
        refused = await nodes.second.http.post(path, json=ASKED[path], headers=gone)
        assert refused.status_code == 404


async def test_halves_of_characters_and_packed_bodies_go_along(folder: Path) -> None:
    path = "/v1/chat/completions"
    raw = b'{"model": "toy", "stream": true, "messages": [{"role": "user", "content": "\\ud83d"}]}'
    one, two = (ToyModel(folder, script=SAID, pace=PACE) for _ in range(2))
    async with pair(one, two) as nodes:
        async with nodes.first.http.stream("POST", path, content=raw) as answer:
            got = await events(answer, 5)
        sent = nodes.second.http.stream(
            "POST",
            path,
            content=gzip.compress(raw),
            headers={"Last-Event-ID": id_of(got[-1]), "content-encoding": "gzip"},
        )
        async with sent as answer:
            got += await events(answer)
        assert got[-1].endswith(b"[DONE]")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions"])
async def test_no_event_has_an_id_where_no_copy_may_be_made(folder: Path, path: str) -> None:
    one, two = (ToyModel(folder, script=SAID) for _ in range(2))
    profiles = {"quiet": ProfileSpec(clients=("quiet",), resumable=False)}
    asked = ASKED[path]
    async with pair(one, two, tasks=TaskRegistry(profiles=profiles)) as nodes:
        more: list[tuple[dict[str, Any], dict[str, str]]] = [
            (asked | {"resumable": False}, {}),
            (asked, {"x-kakeya-client": "quiet"}),
            (asked | {"stream": False}, {}),
        ]
        if path != "/v1/messages":
            more.append((asked | {"n": 2}, {}))  # events of two answers have no order of their own
        for body, headers in more:
            answer = await nodes.first.http.post(path, json=body, headers=headers)
            assert answer.status_code == 200
            assert b"id: " not in answer.content
        assert not nodes.fleet.sent


# --- the real clients


async def test_the_clients_of_openai_and_anthropic_read_streams_with_ids(folder: Path) -> None:
    import anthropic  # here: it costs each worker of xdist seconds to collect

    one, two = (toy(folder, SAID + CALL) for _ in range(2))
    async with pair(one, two) as nodes:
        chat = ASKED["/v1/chat/completions"] | {"stream_options": {"include_usage": True}}
        text, calls, usage = "", [], None
        async for chunk in await nodes.first.openai.chat.completions.create(**chat):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
        assert (text, calls[0].function.name) == (SAID + "Let me see.", "look")
        assert usage is not None
        base = f"http://127.0.0.1:{nodes.first.port}"
        body = {k: v for k, v in ASKED["/v1/messages"].items() if k != "stream"}
        async with anthropic.AsyncAnthropic(base_url=base, api_key="none") as client:
            async with client.messages.stream(**body) as told:
                message = await told.get_final_message()
        assert [one.type for one in message.content] == ["text", "tool_use"]
        assert message.stop_reason == "tool_use"
        assert nodes.fleet.sent


async def test_the_clients_go_on_with_their_own_means(folder: Path) -> None:
    """By the header on the same call, as their users can send it."""
    one, two = (ToyModel(folder, script=SAID, pace=PACE) for _ in range(2))
    async with pair(one, two) as nodes:
        said, number, answer_id = "", -1, ""
        told = await nodes.first.openai.chat.completions.create(**CHAT)
        async for chunk in told:
            answer_id, number = chunk.id, number + 1
            said += chunk.choices[0].delta.content or ""
            if number == 9:
                break
        await told.close()
        await nodes.lose_first()
        last = {"Last-Event-ID": f"{answer_id}:{number}"}
        again: openai.AsyncStream[Any] = await nodes.second.openai.chat.completions.create(
            **CHAT, extra_headers=last
        )
        async for chunk in again:
            said += chunk.choices[0].delta.content or ""
        assert said == SAID
