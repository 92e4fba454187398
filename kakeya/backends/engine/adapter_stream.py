"""Adapter loads of one engine over one stream, which the first load opens and which stays open.

A message on an open stream costs less than a call. Each load still behaves like a call: it has its
own error, its own deadline, and its cancellation affects no other load. A stream that breaks, at
either end, fails the running loads; the next load opens a new stream.

gRPC does not order two calls on one connection: a decode that must run after a load names the
number of the load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import DeadlineExceeded, KakeyaError, PeerProtocol, PeerUnavailable
from kakeya.core.tasks import Supervisor
from kakeya.v1 import engine_pb2 as pb
from kakeya.wire.status import STATUS_BY_NUMBER, rpc_status

if TYPE_CHECKING:
    from kakeya.v1.engine_pb2_grpc import EngineServiceAsyncStub  # types of the stubs only

_Call = grpc.aio.StreamStreamCall[pb.LoadAdaptersRequest, pb.LoadAdaptersResponse]
Failure = Callable[[grpc.StatusCode | None, str, Mapping[str, str]], KakeyaError]
"""Makes the error for a status, its details and its metadata."""


class AdapterStream:
    """See the module."""

    def __init__(
        self, name: str, stub: EngineServiceAsyncStub, failure: Failure, clock: Clock
    ) -> None:
        self._name = name
        self._stub = stub
        self._failure = failure
        self._clock = clock
        self._open: _Open | None = None
        self._numbers = count(1)
        self._under_way: dict[str, int] = {}

    async def load(
        self, load: pb.AdapterLoad, timeout_s: float, sent: Callable[[], None] | None
    ) -> pb.AdapterLoaded:
        """Load an adapter. `sent` is called when the load is `under_way`.

        Raises the error of the engine, PeerUnavailable if the engine is lost, DeadlineExceeded.
        """
        stream, number = self._stream(), next(self._numbers)
        answering = stream.ask(number, load)
        self._under_way[load.adapter_id] = number
        try:
            if sent is not None:
                sent()
            async with asyncio.timeout(timeout_s):
                answer = await answering
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._name}: no answer within {timeout_s:g} s to the load of adapter "
                f"{load.adapter_id}"
            ) from None
        finally:
            stream.end(number)
            if self._under_way.get(load.adapter_id) == number:
                del self._under_way[load.adapter_id]
        match answer.WhichOneof("outcome"):
            case "loaded":
                return answer.loaded
            case "failure":
                said = answer.failure
                code = STATUS_BY_NUMBER.get(said.status)
                raise self._failure(code, said.details, said.metadata)
            case _:
                raise PeerProtocol(f"{self._name}: an adapter load was answered with nothing")

    def under_way(self, adapter_id: str) -> int:
        """The number of an adapter's load that was sent and has no answer yet; 0 = none."""
        return self._under_way.get(adapter_id, 0)

    async def aclose(self) -> None:
        """End the stream and the running loads."""
        if self._open is not None:
            await self._open.aclose()

    def _stream(self) -> _Open:
        if self._open is None or self._open.is_over:
            try:
                call = self._stub.LoadAdapters()
            except grpc.aio.UsageError:  # how a closed channel answers
                raise self._closed() from None
            self._open = _Open(self._name, call, self._problem, self._clock)
        return self._open

    def _problem(self, error: grpc.aio.AioRpcError | None) -> KakeyaError:
        return self._closed() if error is None else self._failure(*rpc_status(error))

    def _closed(self) -> PeerUnavailable:
        return PeerUnavailable(f"{self._name}: the connection was closed")


class _Open:
    """An open stream, until it breaks.

    Writes run in a separate task, since cancelling a write would cancel the whole call. A fault in
    either direction is logged and ends the call, and with it all waiting loads.
    """

    def __init__(
        self,
        name: str,
        call: _Call,
        problem: Callable[[grpc.aio.AioRpcError | None], KakeyaError],
        clock: Clock,
    ) -> None:
        self._call = call
        self._problem = problem
        self._waiting: dict[int, asyncio.Future[pb.LoadAdaptersResponse]] = {}
        self._outgoing: asyncio.Queue[pb.LoadAdaptersRequest] = asyncio.Queue()
        self.is_over = False
        self._tasks = Supervisor(clock)
        self._tasks.start(f"adapter loads of {name}", self._run)

    def ask(self, number: int, load: pb.AdapterLoad) -> asyncio.Future[pb.LoadAdaptersResponse]:
        """Send a load and return the future of its answer. The caller must call `end` later."""
        answer: asyncio.Future[pb.LoadAdaptersResponse]
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._outgoing.put_nowait(pb.LoadAdaptersRequest(number=number, load=load))
        return answer

    def end(self, number: int) -> None:
        """Withdraw a load that has no answer, without effect on other loads."""
        if self._waiting.pop(number, None) is not None:
            self._outgoing.put_nowait(pb.LoadAdaptersRequest(number=number))

    async def aclose(self) -> None:
        """Fail the running loads, and end the call."""
        self._end(None)
        await self._tasks.aclose()

    async def _run(self) -> None:
        if self.is_over:
            return  # started again after a fault
        error: grpc.aio.AioRpcError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(), name="adapter loads")
                error = await self._read()
                writer.cancel()
        finally:
            self._end(error)

    async def _read(self) -> grpc.aio.AioRpcError | None:
        """Hand out answers until the call ends; return its fault, None = it ended in order."""
        try:
            async for answer in self._call:
                waiting = self._waiting.pop(answer.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except grpc.aio.AioRpcError as broken:
            return broken
        return None

    async def _write(self) -> None:
        try:
            while True:
                request = await self._outgoing.get()
                await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call ended; the reader has its fault

    def _end(self, error: grpc.aio.AioRpcError | None) -> None:
        self.is_over = True
        self._call.cancel()
        waiting = tuple(self._waiting.values())
        self._waiting.clear()
        for one in waiting:
            if not one.done():
                one.set_exception(self._problem(error))
