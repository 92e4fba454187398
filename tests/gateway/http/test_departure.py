"""A client that leaves stops the work within half a second, wherever the work is."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from starlette.types import Message

from kakeya.core.clock import SystemClock
from kakeya.core.errors import Cancelled
from kakeya.gateway.http.connection import Connection, HttpLimits
from kakeya.generation.facts import ModelState
from tests.fakes import set_by
from tests.gateway.toy import Pace, ToyModel, make_folder, serving
from tests.waiting import until

PREFILL = Pace(prefill_s=600.0)
DECODE = Pace(step_s=0.02)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


def request(*, stream: bool) -> bytes:
    body = json.dumps({"model": "toy", "prompt": "hi", "max_tokens": 400, "stream": stream})
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        f"{body}"
    ).encode()


@pytest.mark.parametrize("pace", [PREFILL, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_the_work_stops_when_the_client_leaves(folder, pace, stream, how):
    model = ToyModel(folder, pace=pace)
    async with serving(model) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(stream=stream))
        await model.started.wait()
        if stream and pace is DECODE:
            await reader.readuntil(b"data: ")
        assert not model.closed.is_set()
        if how == "reset":
            writer.transport.abort()
        elif how == "close":
            writer.close()
        else:
            writer.write_eof()
        async with asyncio.timeout(60):
            await model.closed.wait()
        assert model.open == 0
        writer.close()
        text = (await served.http.get("/metrics")).text
        assert 'kakeya_http_abandoned_total{model="toy"} 1.0' in text
        model.pace = Pace()
        again = await served.openai.completions.create(model="toy", prompt="hi")
        assert again.usage.completion_tokens == 16


async def test_control_a_client_that_stays_gets_its_answer(folder):
    model = ToyModel(folder, pace=Pace(step_s=0.02))
    async with serving(model) as served:
        answer = served.openai.completions.create(model="toy", prompt="hi", max_tokens=40)
        task = asyncio.create_task(answer)
        await set_by(task, model.started)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(model.closed.wait(), 0.5)
        assert (await task).usage.completion_tokens == 40


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_the_model_loads_never_reaches_it(folder, stream):
    model = ToyModel(folder, state=ModelState.LOADING)
    async with serving(model) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(stream=stream))

        async def running() -> str:
            return (await served.http.get("/metrics")).text

        async with asyncio.timeout(60):
            while "generations_running 1.0" not in await running():
                await asyncio.sleep(0.01)
            writer.close()
            while "generations_running 0.0" not in await running():
                await asyncio.sleep(0.01)
        assert model.requests == []


async def test_the_openai_client_closing_its_stream_stops_the_work(folder):
    model = ToyModel(folder, pace=DECODE)
    async with serving(model) as served:
        stream = await served.openai.completions.create(
            model="toy", prompt="hi", max_tokens=400, stream=True
        )
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(60):
            await model.closed.wait()


async def test_a_request_waits_for_a_loading_model_and_a_stream_shows_life(folder):
    model = ToyModel(folder, state=ModelState.LOADING, script="hello")
    async with serving(model, limits=HttpLimits(keepalive_s=0.05)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(stream=True))
        await reader.readuntil(b": waiting\n")
        await reader.readuntil(b": waiting\n")
        model.loaded.set()
        rest = await reader.readuntil(b"[DONE]\n\n")
        assert b'"text":"hello"' in rest or b'"text":"h' in rest
        writer.close()


async def test_a_stream_says_how_far_the_load_is_that_it_waits_for(folder):
    model = ToyModel(folder, state=ModelState.LOADING, script="hello", loads="41 %")
    async with serving(model, limits=HttpLimits(keepalive_s=60.0, progress_s=0.05)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(stream=True))
        await reader.readuntil(b": waiting: loading toy, 41 %\n")
        model.loads = "97 %\ndata: x"
        await reader.readuntil(b": waiting: loading toy, 97 % data: x\n")
        model.loads = ""
        model.loaded.set()
        await reader.readuntil(b"[DONE]\n\n")
        writer.close()


async def test_a_model_that_does_not_come_in_time_is_503_or_an_error_event(folder):
    model = ToyModel(folder, state=ModelState.LOADING)
    async with serving(model, limits=HttpLimits(ready_s=0.3)) as served:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="still loads") as caught:
                await served.openai.completions.create(model="toy", prompt="a", stream=stream)
            assert caught.value.response.headers["retry-after"] == "3"
    async with serving(model, limits=HttpLimits(ready_s=0.3, keepalive_s=0.05)) as served:
        stream = await served.openai.completions.create(model="toy", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="still loads"):
            _ = [chunk async for chunk in stream]


async def test_a_client_that_takes_nothing_is_given_up_and_disturbs_nobody(folder):
    model = ToyModel(folder, pace=Pace(per_step=400), context_tokens=1_000_000)
    limits = HttpLimits(keepalive_s=0.05, stall_s=0.2)
    body = json.dumps(
        {"model": "toy", "prompt": "hi", "max_tokens": 900_000, "stream": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    async with serving(model, limits=limits) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.write(head % len(body) + body)
        await model.started.wait()
        await asyncio.wait_for(model.closed.wait(), 60)
        assert (await served.http.get("/healthz")).status_code == 200
        writer.transport.abort()
        assert reader is not None


class _Blocked:
    """A connection whose client is there, and takes bytes only until `blocks_at` has come."""

    def __init__(self, blocks_at: bytes) -> None:
        self._blocks_at = blocks_at
        self.blocked = asyncio.Event()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        if message.get("body") == self._blocks_at:
            self.blocked.set()
            await asyncio.Event().wait()


KEEPALIVE = b": waiting\n"


class _Events:
    """A stream whose keepalive is a comment."""

    content_type = b"text/event-stream"

    def keepalive(self, waits_for: str) -> bytes:
        return KEEPALIVE


SHORT = HttpLimits(keepalive_s=0.05, stall_s=0.2)
END = b"data: [DONE]\n\n"


@pytest.mark.parametrize("last", [KEEPALIVE, b"data: a\n\n", END])
async def test_no_write_of_a_stream_waits_longer_than_a_stall_may_last(last: bytes) -> None:
    """A comment into the silence of a long prefill, an event, the end: all of them are bounded."""
    line = _Blocked(last)

    async def work() -> None:
        async with Connection(
            line.receive, line.send, stream=_Events(), clock=SystemClock(), limits=SHORT
        ) as client:
            if last == KEEPALIVE:
                await asyncio.Event().wait()  # nothing of the work's own to write
            await (client.end(last) if last == END else client.send_event(last))

    with pytest.raises(Cancelled):
        await asyncio.wait_for(work(), 60)
    assert line.blocked.is_set()


async def test_a_write_behind_a_blocked_comment_does_not_set_its_clock_back() -> None:
    line = _Blocked(KEEPALIVE)

    async def work() -> None:
        async with Connection(
            line.receive, line.send, stream=_Events(), clock=SystemClock(), limits=SHORT
        ) as client:
            await line.blocked.wait()
            while True:
                await client.send_event(b"data: a\n\n")
                await asyncio.sleep(0.01)

    with pytest.raises(Cancelled):
        await asyncio.wait_for(work(), 60)


async def test_many_clients_that_leave_at_once_leave_nothing_behind(folder):
    model = ToyModel(folder, pace=PREFILL)
    async with serving(model) as served:
        writers = []
        for index in range(30):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(request(stream=index % 2 == 0))
            writers.append(writer)
        await until(lambda: model.open == 30)
        for writer in writers:
            writer.close()
        await until(lambda: model.open == 0)
