"""Calls to an engine whose connection is closed meanwhile, as each unload of a model closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

from kakeya.backends.engine import client as engine_client
from kakeya.backends.engine.client import EngineClient, EngineMemoryLimits
from kakeya.core.errors import DeadlineExceeded, PeerUnavailable
from kakeya.generation.request import DecodeRequest
from kakeya.v1 import engine_pb2_grpc
from kakeya.wire.channels import Keepalive

LIMIT_S = 30.0


class Mute(engine_pb2_grpc.EngineServiceServicer):
    """Takes every call and answers none."""

    def __init__(self) -> None:
        self.calls = asyncio.Semaphore(0)

    async def _answer(self, request: object, context: object) -> None:
        self.calls.release()
        await asyncio.Event().wait()

    async def _stream(self, request: object, context: object) -> AsyncIterator[None]:
        await self._answer(request, context)
        yield None

    Describe = Draft = Release = Stats = SetLimits = Shrink = UnloadAdapter = _answer
    Decode = _stream


async def _decoded(client: EngineClient) -> None:
    async for _ in client.decode(DecodeRequest(token_ids=[1], max_tokens=1), LIMIT_S):
        pass


CALLS: dict[str, Callable[[EngineClient], Awaitable[object]]] = {
    "describe": lambda client: client.describe(LIMIT_S),
    "decode": _decoded,
    "draft": lambda client: client.draft([1], 2, seed=None, temperature=None, timeout_s=LIMIT_S),
    "release": lambda client: client.release("key", LIMIT_S),
    "stats": lambda client: client.stats(LIMIT_S),
    "set_limits": lambda client: client.set_limits(EngineMemoryLimits(memory_bytes=1), LIMIT_S),
    "shrink": lambda client: client.shrink(1, LIMIT_S),
    "unload_adapter": lambda client: client.unload_adapter("a", LIMIT_S),
}


@pytest.fixture
async def engine(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Mute, EngineClient]]:
    monkeypatch.setattr(engine_client, "CLOSE_GRACE_S", 0.05)
    mute, server = Mute(), grpc.aio.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(mute, server)
    server.add_insecure_port(f"unix:{short_path}/engine")
    await server.start()
    client = EngineClient("toy", short_path / "engine", Keepalive())
    yield mute, client
    await client.aclose()
    await server.stop(0)


@pytest.mark.parametrize("name", CALLS)
async def test_who_waits_for_an_answer_is_told_that_the_engine_is_lost_and_is_not_cancelled(
    engine: tuple[Mute, EngineClient], name: str
) -> None:
    mute, client = engine
    call = asyncio.ensure_future(CALLS[name](client))
    await asyncio.wait_for(mute.calls.acquire(), LIMIT_S)
    await client.aclose()
    with pytest.raises(PeerUnavailable, match="toy"):
        await call
    with pytest.raises(PeerUnavailable, match="toy"):
        await CALLS[name](client)  # nor is there one any more


async def test_an_engine_whose_client_is_closed_is_not_seen(
    engine: tuple[Mute, EngineClient],
) -> None:
    mute, client = engine
    call = asyncio.ensure_future(client.look(LIMIT_S))
    await asyncio.wait_for(mute.calls.acquire(), LIMIT_S)
    await client.aclose()
    assert await call is None
    assert await client.look(LIMIT_S) is None


async def test_who_is_cancelled_is_cancelled(engine: tuple[Mute, EngineClient]) -> None:
    mute, client = engine
    call = asyncio.ensure_future(client.shrink(1, LIMIT_S))
    await asyncio.wait_for(mute.calls.acquire(), LIMIT_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_no_connection_is_tried_before_the_socket_of_a_child_is_there(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failed one sets a short timer, and gRPC then wakes an idle node more often for ever."""
    monkeypatch.setattr(engine_client, "CLOSE_GRACE_S", 0.05)
    client = EngineClient("toy", short_path / "engine", Keepalive())
    waiting = asyncio.ensure_future(client.describe(LIMIT_S))
    await asyncio.sleep(0.2)
    assert client._channel.get_state() is grpc.ChannelConnectivity.IDLE
    mute, server = Mute(), grpc.aio.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(mute, server)
    server.add_insecure_port(f"unix:{short_path}/engine")
    await server.start()
    await asyncio.wait_for(mute.calls.acquire(), LIMIT_S)
    await client.aclose()
    with pytest.raises(PeerUnavailable):
        await waiting
    await server.stop(0)


async def test_a_child_whose_socket_never_appears_is_late(short_path: Path) -> None:
    client = EngineClient("toy", short_path / "engine", Keepalive())
    with pytest.raises(DeadlineExceeded):
        await client.describe(0.2)
    await client.aclose()
