"""Adapter loads of one engine over one stream, which is opened by the first and stays open.

A message on an open stream costs less than a call. Whoever loads sees what a call of their own
would show: its own error, its own deadline, and a cancellation that concerns nobody else. A stream
that breaks, at either end or in the middle of our own work, fails the loads that are under way;
the next load opens another one.

Nothing says which of two calls on one connection the engine sees first: a decode that is to come
behind a load that is under way names its number.
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
    from kakeya.v1.engine_pb2_grpc import EngineServiceAsyncStub  # of the stubs' types only

_Call = grpc.aio.StreamStreamCall[pb.LoadAdaptersRequest, pb.LoadAdaptersResponse]
Failure = Callable[[grpc.StatusCode | None, str, Mapping[str, str]], KakeyaError]
"""Our error for a status, its details and its metadata."""


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
        """Have an adapter loaded. Raises what the engine found wrong, PeerUnavailable when it is
        lost, DeadlineExceeded.

        `sent` is called as soon as it is `under_way`.
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
        """The number of the load of an adapter that was asked for and has no answer; 0 = none."""
        return self._under_way.get(adapter_id, 0)

    async def aclose(self) -> None:
        """End the stream, and what is under way on it."""
        if self._open is not None:
            await self._open.aclose()

    def _stream(self) -> _Open:
        if self._open is None or self._open.is_over:
            try:
                call = self._stub.LoadAdapters()
            except grpc.aio.UsageError:  # how a channel answers that was closed
                raise self._closed() from None
            self._open = _Open(self._name, call, self._problem, self._clock)
        return self._open

    def _problem(self, error: grpc.aio.AioRpcError | None) -> KakeyaError:
        return self._closed() if error is None else self._failure(*rpc_status(error))

    def _closed(self) -> PeerUnavailable:
        return PeerUnavailable(f"{self._name}: the connection was closed")


class _Open:
    """A stream that was opened, until it breaks.

    Writes have a task of their own: one that is cancelled cancels the whole call. A fault in either
    direction is logged and ends the call, and with it what waits for an answer.
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
        """Send a load; its answer. To be followed by `end`."""
        answer: asyncio.Future[pb.LoadAdaptersResponse]
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._outgoing.put_nowait(pb.LoadAdaptersRequest(number=number, load=load))
        return answer

    def end(self, number: int) -> None:
        """Withdraw a load that has no answer; harmless for others."""
        if self._waiting.pop(number, None) is not None:
            self._outgoing.put_nowait(pb.LoadAdaptersRequest(number=number))

    async def aclose(self) -> None:
        """Fail what is under way, and end the call."""
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
        """Hand answers out until the call ends; how it broke, None = in order."""
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
            return  # the call ended; the reader knows how

    def _end(self, error: grpc.aio.AioRpcError | None) -> None:
        self.is_over = True
        self._call.cancel()
        waiting = tuple(self._waiting.values())
        self._waiting.clear()
        for one in waiting:
            if not one.done():
                one.set_exception(self._problem(error))
