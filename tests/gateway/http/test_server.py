"""Starting, draining and limits of the HTTP server itself."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from types import SimpleNamespace

import httpx
import pytest

from kakeya.core.clock import SystemClock
from kakeya.gateway.app import build_app
from kakeya.gateway.http import server
from kakeya.gateway.http.server import serve_http
from tests.fakes import set_by
from tests.gateway.toy import Directory, Pace, Router, ToyModel, make_folder, no_jobs, serving

PLAIN = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


def app_of(model):
    return build_app(
        Directory(model),
        Router(),
        status=dict,
        clock=SystemClock(),
        rng=random.Random(1),
        jobs=no_jobs(),
    )


@asynccontextmanager
async def listening(model):
    """A server, and a client of it."""
    sock = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with (
        httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as http,
        serve_http(app_of(model), sock) as running,
    ):
        yield http, running


async def test_each_answer_has_the_date_of_its_second(folder, monkeypatch):
    async with listening(ToyModel(folder)) as (http, _):
        for now in (1_800_000_000.9, 1_800_000_000.95, 1_800_000_001.0):
            monkeypatch.setattr(server, "time", SimpleNamespace(time=lambda now=now: now))
            dates = (await http.get("/healthz")).headers.get_list("date")
            (date,) = map(parsedate_to_datetime, dates)
            assert date.timestamp() == int(now)


@pytest.mark.parametrize(("grace_s", "is_answered"), [(60.0, True), (0.2, False)])
async def test_running_requests_get_their_grace_and_no_more(folder, grace_s, is_answered):
    model = ToyModel(folder, pace=Pace(step_s=0.05))
    async with listening(model) as (http, running):
        asked = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await set_by(asked, model.started)
        await running.stop(grace_s)
        if is_answered:
            assert (await asked).json()["usage"]["completion_tokens"] == 20
        else:
            assert (await asked).status_code == 503
            assert (await asked).json()["error"]["message"] == "this node is stopping"
        assert model.open == 0
        with pytest.raises(httpx.ConnectError):
            await http.get("/healthz")
        await running.stop(grace_s)


async def test_a_closed_port_takes_nothing_and_running_requests_end_without_a_limit(folder):
    model = ToyModel(folder, pace=Pace(step_s=0.05))
    async with listening(model) as (http, running):
        host, port = http.base_url.host, http.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        asked = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await set_by(asked, model.started)
        assert running.answering == 1
        running.accept_no_more()
        async with httpx.AsyncClient(timeout=60, trust_env=False) as other:
            with pytest.raises(httpx.ConnectError):
                await other.get(str(http.base_url))
        await reader.read()  # the idle connection ends
        writer.close()
        answer = await asked
        assert running.answering == 0
        assert answer.json()["usage"]["completion_tokens"] == 20
        assert answer.headers["connection"] == "close"


async def test_a_connection_may_bring_one_more_request_when_the_port_is_left(folder):
    """A client that sends while the port is left, on an old connection or a new one."""
    model = ToyModel(folder)
    async with listening(model) as (http, running):
        host, port = http.base_url.host, http.base_url.port
        old = await asyncio.open_connection(host, port)
        fresh = await asyncio.open_connection(host, port)
        old[1].write(PLAIN)
        first = await old[0].readuntil(b"\r\n\r\n")
        assert b"connection: close" not in first
        await old[0].readexactly(int(first.split(b"content-length: ")[1].split()[0]))
        running.accept_no_more()
        assert running.answering
        for reader, writer in (old, fresh):
            writer.write(PLAIN)
            answer = await reader.read()  # to its end: it is the last one
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in answer
            writer.close()
        assert running.answering == 0


async def test_a_stream_that_a_stop_cuts_off_is_told_so(folder):
    model = ToyModel(folder, pace=Pace(step_s=0.05))
    async with (
        listening(model) as (http, running),
        http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as streamed,
    ):
        lines = streamed.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await running.stop(0.2)
        *_, last = [line async for line in lines if line]
        assert (
            json.loads(last.removeprefix("data: "))["error"]["message"] == "this node is stopping"
        )
        assert model.open == 0


async def test_signal_handlers_are_left_alone(folder):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serving(ToyModel(folder)):
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_a_head_that_does_not_come_is_not_waited_for_and_a_slow_answer_is(folder):
    slow = ToyModel(folder, pace=Pace(step_s=0.05))
    async with serving(slow, head_s=0.2) as served:
        async with asyncio.timeout(60):
            assert await served.raw(b"GET /healthz HTTP/1.1\r\nHost:") == b""
        assert (await served.http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_connection_without_a_byte_is_kept_and_serves(folder):
    async with serving(ToyModel(folder), head_s=0.2) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        async with asyncio.timeout(60):  # a later connection with half a head is closed
            assert await served.raw(b"GET /healthz HTTP/1.1\r\nHost:") == b""
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


OFFERS = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
    "websocket": "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "TLS": "Connection: keep-alive, Upgrade\r\nUpgrade: TLS/1.2\r\n",
    "without Connection": "Upgrade: h2c\r\n",
}


async def raw(served, *packets: bytes) -> list[int]:
    """The statuses of the answers to these bytes, with a plain request behind them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    for packet in (*packets, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0.01)  # a packet of its own
    statuses = []
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        statuses.append(int(head.split()[1]))
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        await reader.readexactly(length)
    writer.close()
    return statuses


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
async def test_an_offer_to_upgrade_is_ignored(folder, offer, is_chunked, parts):
    body = json.dumps({**BODY, "max_tokens": 2}).encode()
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{offer}{length}\r\n\r\n".encode()
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    async with serving(ToyModel(folder)) as served:
        packets = (head + sent,) if parts == 1 else (head, sent)
        assert await raw(served, *packets) == [200, 200]


@pytest.mark.parametrize("size", [5 << 20, 30 << 20])
async def test_a_client_that_sends_all_before_it_reads_gets_the_refusal_of_its_body(folder, size):
    request = urllib.request.Request("http://localhost", bytes(size))

    def send(port: int) -> int:
        request.full_url = f"http://127.0.0.1:{port}/v1/completions"
        try:
            with urllib.request.urlopen(request) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code

    async with serving(ToyModel(folder)) as served:
        assert await asyncio.to_thread(send, served.port) == 413
