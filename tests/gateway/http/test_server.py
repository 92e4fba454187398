"""Starting, draining and limits of the HTTP server itself."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
from contextlib import asynccontextmanager

import httpx
import pytest

from kakeya.core.clock import SystemClock
from kakeya.gateway.app import build_app
from kakeya.gateway.http.server import serve_http
from tests.fakes import set_by
from tests.gateway.toy import Directory, Pace, Router, ToyModel, make_folder, serving

BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "toy")


def app_of(model):
    return build_app(
        Directory(model), Router(), status=dict, clock=SystemClock(), rng=random.Random(1)
    )


@asynccontextmanager
async def listening(model):
    """A server, and a client of it."""
    sock = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with (
        httpx.AsyncClient(base_url=base, trust_env=False) as http,
        serve_http(app_of(model), sock) as running,
    ):
        yield http, running


@pytest.mark.parametrize(("grace_s", "is_answered"), [(5.0, True), (0.2, False)])
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
        for beginning in (b"", b"GET /healthz HTTP/1.1\r\nHost:"):
            async with asyncio.timeout(60):
                assert await served.raw(beginning) == b""
        assert (await served.http.post("/v1/completions", json=BODY)).status_code == 200
