"""Adapter loads over one stream: each has its own end, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path

import grpc.aio
import pytest

from kakeya.backends.engine.client import EngineClient
from kakeya.core.errors import (
    DeadlineExceeded,
    KakeyaError,
    MemoryRefused,
    PageFreed,
    PeerProtocol,
    PeerUnavailable,
    UnknownMethod,
)
from kakeya.engine.adapters.loads import AdapterLoads
from kakeya.engine.adapters.slots import LoadedAdapter
from kakeya.generation.kv import PageRef
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1 import engine_pb2_grpc
from kakeya.wire.channels import Keepalive

REF = PageRef(slab="/s", slab_pages=1, page_bytes=1, first=0, pages=1, length=1, stamp=1)
CHILD = """
import asyncio, sys
from concurrent.futures import Future
from pathlib import Path
from tests.backends.engine.test_adapter_stream import Engine
async def main():
    async with Engine(Path(sys.argv[1])) as engine:
        print("serves", flush=True)
        await engine.begun.wait()
        print("begun", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


class Engine(engine_pb2_grpc.EngineServiceServicer):
    """An engine's end of the socket; the test is its model thread."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "engine"
        self.flights: dict[str, Future[LoadedAdapter]] = {}
        self.streams = 0
        self.begun = asyncio.Event()
        self.refusal: KakeyaError | None = None
        self.loads = AdapterLoads(self.load)
        self.server = grpc.aio.server()

    def load(self, load) -> Future[LoadedAdapter]:
        if self.refusal is not None:
            raise self.refusal
        self.flights[load.adapter_id] = Future()
        self.begun.set()
        return self.flights[load.adapter_id]

    async def LoadAdapters(self, requests, context):
        self.streams += 1
        await self.loads.serve(context)

    async def flight(self, adapter_id: str) -> Future[LoadedAdapter]:
        while adapter_id not in self.flights:
            self.begun.clear()
            await self.begun.wait()
        return self.flights.pop(adapter_id)

    async def __aenter__(self):
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{self.socket}")
        await self.server.start()
        return self

    async def __aexit__(self, *end):
        await self.server.stop(0)


@pytest.fixture
async def engine(short_path: Path) -> AsyncIterator[Engine]:
    async with Engine(short_path) as started:
        yield started


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    made = EngineClient("tiny", engine.socket, Keepalive())
    yield made
    await made.aclose()


def load(client: EngineClient, name: str, timeout_s: float = 30.0) -> asyncio.Task[int]:
    return asyncio.create_task(client.load_adapter(name, REF, timeout_s))


def followed(client: EngineClient, name: str) -> asyncio.Task[int]:
    return asyncio.create_task(client.load_adapter(name, REF, 30.0, "", lambda: None))


async def test_loads_are_answered_as_they_end_on_one_stream(engine, client) -> None:
    first, second = load(client, "a"), load(client, "b")
    (await engine.flight("b")).set_result(LoadedAdapter(slot=2, nbytes=20))
    assert await second == 20
    assert not first.done()
    (await engine.flight("a")).set_result(LoadedAdapter(slot=1, nbytes=10))
    assert await first == 10
    assert engine.streams == 1


@pytest.mark.parametrize(
    ("problem", "kind", "retry_after_s"),
    [
        (MemoryRefused("no slot", retry_after_s=3.0), MemoryRefused, 3.0),
        (PageFreed("the block was freed"), PageFreed.__mro__[1], None),
        (ZeroDivisionError("oh"), PeerProtocol, None),
    ],
)
async def test_a_load_that_fails_says_why_and_ends_no_stream(
    engine, client, problem, kind, retry_after_s
) -> None:
    failing, other = load(client, "a"), load(client, "b")
    (await engine.flight("a")).set_exception(problem)
    with pytest.raises(kind, match=str(problem)) as seen:
        await failing
    assert seen.value.retry_after_s == retry_after_s
    (await engine.flight("b")).set_result(LoadedAdapter(slot=1, nbytes=10))
    assert await other == 10
    assert engine.streams == 1


async def test_a_load_is_under_way_from_when_it_is_sent_until_its_answer(engine, client) -> None:
    seen: list[int] = []
    sent = lambda: seen.append(client._loads.under_way("a"))  # noqa: E731
    asked = asyncio.create_task(client.load_adapter("a", REF, 30.0, "", sent))
    flight = await engine.flight("a")
    assert seen == [client._loads.under_way("a")] != [0]
    assert client._loads.under_way("b") == 0
    flight.set_exception(MemoryRefused("no slot"))
    with pytest.raises(MemoryRefused):
        await asked
    assert client._loads.under_way("a") == 0


async def test_what_comes_behind_a_load_waits_until_that_is_there(engine, client) -> None:
    behind = asyncio.create_task(engine.loads.behind(1))
    await asyncio.sleep(0.02)
    assert not behind.done()
    asked = load(client, "a")
    flight = await engine.flight("a")
    await behind
    assert not asked.done(), "the load itself is not waited for"
    await engine.loads.behind(1)
    await engine.loads.behind(0)
    flight.set_result(LoadedAdapter(slot=1, nbytes=10))
    await asked


async def test_numbers_rise_over_streams_and_a_refused_load_came_too(engine, client) -> None:
    engine.refusal = UnknownMethod("the engine takes no adapters")
    for number in (1, 2):
        with pytest.raises(UnknownMethod):
            await load(client, "a")
        await engine.loads.behind(number)
        await client._loads.aclose()
    assert engine.streams == 2


async def test_what_comes_behind_a_load_that_never_comes_goes_on_by_itself(engine) -> None:
    async with asyncio.timeout(60):
        await AdapterLoads(engine.load, patience_s=0.01).behind(7)


async def test_the_answer_of_a_load_waits_for_what_answers_behind_it(engine, client) -> None:
    engine.loads = AdapterLoads(engine.load, hold_s=60.0)
    asked = followed(client, "a")
    (await engine.flight("a")).set_result(LoadedAdapter(slot=1, nbytes=10))
    await asyncio.sleep(0.02)
    assert not asked.done()
    other = load(client, "b")
    (await engine.flight("b")).set_result(LoadedAdapter(slot=2, nbytes=20))
    assert await other == 20, "one that nothing comes behind is answered at once"
    engine.loads.followed(2)
    await asyncio.sleep(0.02)
    assert not asked.done()
    engine.loads.followed(1)
    assert await asked == 10


async def test_the_answer_of_a_load_waits_no_longer_than_a_moment(engine, client) -> None:
    asked = followed(client, "a")
    (await engine.flight("a")).set_result(LoadedAdapter(slot=1, nbytes=10))
    async with asyncio.timeout(60):
        assert await asked == 10


async def test_what_answered_before_the_load_had_ended_is_not_waited_for(engine, client) -> None:
    engine.loads = AdapterLoads(engine.load, hold_s=60.0)
    asked = followed(client, "a")
    flight = await engine.flight("a")
    engine.loads.followed(1)
    flight.set_result(LoadedAdapter(slot=1, nbytes=10))
    async with asyncio.timeout(60):
        assert await asked == 10


async def test_a_load_that_failed_is_answered_at_once(engine, client) -> None:
    engine.loads = AdapterLoads(engine.load, hold_s=60.0)
    asked = followed(client, "a")
    (await engine.flight("a")).set_exception(MemoryRefused("no slot"))
    async with asyncio.timeout(60):
        with pytest.raises(MemoryRefused):
            await asked


async def test_an_engine_that_ends_gives_the_answers_that_wait(engine, client) -> None:
    engine.loads = AdapterLoads(engine.load, hold_s=0.05)
    asked = followed(client, "a")
    (await engine.flight("a")).set_result(LoadedAdapter(slot=1, nbytes=10))
    await asyncio.sleep(0.01)
    engine.loads.end()
    async with asyncio.timeout(60):
        assert await asked == 10


async def test_an_engine_without_adapters_says_so(engine, client) -> None:
    engine.refusal = UnknownMethod("the engine takes no adapters")
    with pytest.raises(UnknownMethod, match="takes no adapters"):
        await load(client, "a")


async def test_a_cancelled_load_is_dropped_and_concerns_nobody_else(engine, client) -> None:
    cancelled, other = load(client, "a"), load(client, "b")
    dropped, goes_on = await engine.flight("a"), await engine.flight("b")
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    async with asyncio.timeout(60):
        await asyncio.wrap_future(_end_of(dropped))
    assert dropped.cancelled()
    goes_on.set_result(LoadedAdapter(slot=1, nbytes=10))
    assert await other == 10
    assert engine.streams == 1


async def test_a_load_that_takes_too_long_is_dropped(engine, client) -> None:
    first = load(client, "z")
    (await engine.flight("z")).set_result(LoadedAdapter(slot=1, nbytes=10))
    await first
    late = load(client, "a", 0.01)
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0.01 s .* adapter a"):
        await late
    assert engine.streams == 1


async def test_an_engine_that_ends_in_order_answers_what_is_under_way(engine, client) -> None:
    waiting = load(client, "a")
    flight = await engine.flight("a")
    engine.loads.end()
    flight.set_result(LoadedAdapter(slot=1, nbytes=10))
    assert await waiting == 10
    async with asyncio.timeout(60):
        await engine.server.stop(60)  # no stream is left for which it would wait
    with pytest.raises(PeerUnavailable):
        await load(client, "b")


async def test_a_stream_that_broke_fails_its_loads_and_the_next_opens_another(
    engine, client, short_path
) -> None:
    waiting = [load(client, name) for name in "ab"]
    dropped = [await engine.flight(name) for name in "ab"]
    await engine.server.stop(0)
    for one in waiting:
        with pytest.raises(PeerUnavailable):
            await one
    assert all(flight.cancelled() for flight in dropped)
    async with Engine(short_path) as again, asyncio.timeout(60):
        while True:  # until the channel has found it
            asked = load(client, "c")
            served = asyncio.create_task(again.flight("c"))
            await asyncio.wait((asked, served), return_when=asyncio.FIRST_COMPLETED)
            if served.done():
                break
            assert isinstance(asked.exception(), PeerUnavailable)
            served.cancel()
        (await served).set_result(LoadedAdapter(slot=1, nbytes=30))
        assert await asked == 30


async def test_a_writer_that_dies_fails_at_once_what_waits_and_the_next_opens_another(
    engine, client, caplog, monkeypatch
) -> None:
    first = load(client, "a")
    dropped = await engine.flight("a")

    async def broken(_: pb.LoadAdaptersRequest) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(client._loads._open._call, "write", broken)
    second = load(client, "b")
    async with asyncio.timeout(60):
        for one in (first, second):
            with pytest.raises(PeerUnavailable) as seen:
                await one
            assert seen.value.retryable
        await asyncio.wrap_future(_end_of(dropped))
    assert faults(caplog) == ["adapter loads of tiny"]
    again = load(client, "b")
    (await engine.flight("b")).set_result(LoadedAdapter(slot=1, nbytes=10))
    assert await again == 10
    assert engine.streams == 2


class Unreadable(Engine):
    """Answers in a way that nobody can parse."""

    async def __aenter__(self):
        handler = grpc.stream_stream_rpc_method_handler(self.babble)
        name = "kakeya.v1.EngineService"
        self.server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, {"LoadAdapters": handler})]
        )
        self.server.add_insecure_port(f"unix:{self.socket}")
        await self.server.start()
        return self

    async def babble(self, requests, context):
        async for _ in requests:
            await context.write(b"\xff")


async def test_an_answer_that_cannot_be_read_fails_at_once_what_waits(short_path, caplog) -> None:
    async with Unreadable(short_path) as engine:
        client = EngineClient("tiny", engine.socket, Keepalive())
        async with asyncio.timeout(60):
            with pytest.raises(PeerUnavailable):
                await load(client, "a")
        assert faults(caplog) == ["adapter loads of tiny"]
        await client.aclose()


async def test_closing_the_client_fails_what_waits(engine, client) -> None:
    waiting = load(client, "a")
    await engine.flight("a")
    await client.aclose()
    with pytest.raises(PeerUnavailable, match="the connection was closed"):
        await waiting
    with pytest.raises(PeerUnavailable, match="the connection was closed"):
        await load(client, "b")


async def test_a_killed_engine_fails_the_load(short_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(short_path), stdout=asyncio.subprocess.PIPE
    )
    client = EngineClient("tiny", short_path / "engine", Keepalive())
    async with aclosing(client):
        try:
            assert child.stdout is not None
            assert await child.stdout.readline() == b"serves\n"
            waiting = load(client, "a")
            assert await child.stdout.readline() == b"begun\n"
        finally:
            child.kill()
            await child.wait()
        with pytest.raises(PeerUnavailable):
            async with asyncio.timeout(60):
                await waiting


def faults(caplog: pytest.LogCaptureFixture) -> list[object]:
    """The supervised tasks that failed."""
    said = [one for one in caplog.records if one.getMessage() == "background task failed"]
    return [vars(one)["kakeya_fields"]["task"] for one in said]


def _end_of(flight: Future[LoadedAdapter]) -> Future[None]:
    """Done when the flight is, however it ends."""
    ended: Future[None] = Future()
    flight.add_done_callback(lambda _: ended.set_result(None))
    return ended
