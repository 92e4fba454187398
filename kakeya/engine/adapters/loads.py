"""Adapter loads that an agent asks for on a stream, each answered when it has ended.

    reader     a load goes to the model thread, a withdrawal drops one that has not begun
    writer     answers leave in the order in which loads end

A load that fails is an answer like another. When the agent leaves, loads that have not begun are
dropped. A generation may follow a load that was asked for just before: it waits here until the load
has gone to the model thread, which does one after the other. The answer of the load then leaves
behind the first frame of that generation, for which a client waits, or a moment later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc.aio

from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.engine.adapters.slots import LoadedAdapter
from kakeya.v1 import engine_pb2 as pb
from kakeya.wire.status import metadata_of, status_of

_log = logging.getLogger(__name__)
Load = Callable[[pb.AdapterLoad], Future[LoadedAdapter]]
"""Begins a load on the model thread. Raises KakeyaError."""
_Context = grpc.aio.ServicerContext[Any, Any]


class AdapterLoads:
    """The streams of one engine; an agent has one of them open."""

    def __init__(self, load: Load, *, patience_s: float = 1.0, hold_s: float = 0.002) -> None:
        """A generation waits `patience_s` for the load before it; then the load's stream broke. An
        answer waits `hold_s` at most."""
        self._load = load
        self._patience_s = patience_s
        self._hold_s = hold_s
        self._streams: set[_Stream] = set()
        self._is_ending = False
        self._latest = 0
        self._behind: dict[asyncio.Future[None], int] = {}

    async def serve(self, context: _Context) -> None:
        """Answer loads until the agent leaves or `end` is called."""
        stream = _Stream(self._load, self._came, context, self._hold_s)
        self._streams.add(stream)
        if self._is_ending:
            stream.end()
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    async def behind(self, number: int) -> None:
        """Return once a load came and went to the model thread, or was refused; or when it will not
        come, because its stream broke."""
        if number <= self._latest:
            return
        coming = asyncio.get_running_loop().create_future()
        self._behind[coming] = number
        try:
            async with asyncio.timeout(self._patience_s):
                await coming
        except TimeoutError:
            return
        finally:
            del self._behind[coming]

    def followed(self, number: int) -> None:
        """Let the answer of a load go: the generation behind it has answered."""
        for stream in self._streams if number else ():
            stream.followed(number)

    def _came(self, number: int) -> None:
        self._latest = max(self._latest, number)
        for coming, wanted in self._behind.items():
            if wanted <= self._latest and not coming.done():
                coming.set_result(None)

    def end(self) -> None:
        """Take no more loads; streams end when loads that have begun were answered."""
        self._is_ending = True
        for stream in self._streams:
            stream.end()


class _Stream:
    def __init__(
        self, load: Load, came: Callable[[int], None], context: _Context, hold_s: float
    ) -> None:
        self._load = load
        self._hold_s = hold_s
        self._came = came
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._flights: dict[int, Future[LoadedAdapter]] = {}
        self._followed: set[int] = set()
        """Loads with a generation behind them that has not answered yet."""
        self._held: dict[int, pb.LoadAdaptersResponse] = {}
        """Their answers."""
        self._answers: asyncio.Queue[pb.LoadAdaptersResponse | None] = asyncio.Queue()
        self._is_ending = False

    async def run(self) -> None:
        reader = self._loop.create_task(self._read(), name="adapter loads")
        try:
            while (answer := await self._answers.get()) is not None:
                await self._context.write(answer)
        finally:
            reader.cancel()
            for flight in tuple(self._flights.values()):
                flight.cancel()

    def end(self) -> None:
        self._is_ending = True
        self._end_if_idle()

    def followed(self, number: int) -> None:
        """Let the answer of a load go."""
        self._followed.discard(number)
        answer = self._held.pop(number, None)
        if answer is not None:
            self._answers.put_nowait(answer)
        self._end_if_idle()

    async def _read(self) -> None:
        try:
            while not self._is_ending:
                asked = await self._context.read()
                if asked is grpc.aio.EOF:
                    break
                self._take(asked)
                self._came(asked.number)
        finally:
            self.end()

    def _take(self, asked: pb.LoadAdaptersRequest) -> None:
        number = asked.number
        if not asked.HasField("load"):
            if number in self._flights:
                self._flights[number].cancel()
            return
        try:
            flight = self._load(asked.load)
        except KakeyaError as refusal:
            self._answers.put_nowait(_failed(number, refusal))
            return
        self._flights[number] = flight
        if asked.load.is_followed:
            self._followed.add(number)
        flight.add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._ended, number, done)
        )

    def _ended(self, number: int, flight: Future[LoadedAdapter]) -> None:
        self._flights.pop(number, None)
        if not flight.cancelled():
            self._held[number] = _answer(number, flight)
            if number in self._followed and flight.exception() is None:
                self._loop.call_later(self._hold_s, self.followed, number)
                return
        self.followed(number)

    def _end_if_idle(self) -> None:
        if self._is_ending and not (self._flights or self._held):
            self._answers.put_nowait(None)


def _answer(number: int, flight: Future[LoadedAdapter]) -> pb.LoadAdaptersResponse:
    problem = flight.exception()
    if problem is None:
        loaded = flight.result()
        return pb.LoadAdaptersResponse(
            number=number, loaded=pb.AdapterLoaded(slot=loaded.slot, bytes=loaded.nbytes)
        )
    if isinstance(problem, KakeyaError):
        return _failed(number, problem)
    event(_log, "adapter load failed", level=logging.ERROR, error=repr(problem))
    unknown = pb.CallFailure(
        status=grpc.StatusCode.UNKNOWN.value[0],
        details=f"Unexpected {type(problem)}: {problem}",
    )
    return pb.LoadAdaptersResponse(number=number, failure=unknown)


def _failed(number: int, error: KakeyaError) -> pb.LoadAdaptersResponse:
    failure = pb.CallFailure(
        status=status_of(error).value[0], details=error.message, metadata=dict(metadata_of(error))
    )
    return pb.LoadAdaptersResponse(number=number, failure=failure)
