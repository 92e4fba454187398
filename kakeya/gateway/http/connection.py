"""One HTTP exchange at the ASGI level: body within limits, events out, a client that leaves.

When a client leaves, the work for it is cancelled at the next await, be it a load, prefill or
decode, and with or without streaming.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

import zstandard
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kakeya.core.clock import Clock
from kakeya.core.errors import Cancelled, InvalidArgument
from kakeya.core.units import MIB, format_bytes
from kakeya.gateway.http.body import Parsed, UnknownParameters, parse_body
from kakeya.gateway.http.edge import BodyTimeout, BodyTooLarge, UnsupportedEncoding
from kakeya.gateway.http.receipt import note_ignored
from kakeya.generation.config import WAIT_S
from kakeya.generation.waiting import WaitTeller

_STREAM_HEADERS = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
_PACKED = ("gzip", "zstd")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of what one client may cost and send."""

    body_bytes: int = 4 * MIB
    body_s: float = 30.0
    """From the head to the last byte of the body."""
    ready_s: float = WAIT_S
    """How long a request waits for a model that loads or restarts."""
    keepalive_s: float = 5.0
    """A stream that is silent for so long gets a keepalive, so that no proxy or client ends it."""
    progress_s: float = 2.0
    """While a request waits, keepalives come so often and say for what, and where it stands."""
    stall_s: float = 60.0
    """A client that takes nothing of its stream for so long has left."""
    generations: int = 256
    """At once; further requests are told to come again."""
    unknown: Literal["refuse", "warn"] = "refuse"
    """A parameter that no node knows: refused, or left out and named in x-kakeya-ignored."""
    plain_tools: Literal["write", "refuse"] = "write"
    """Tools for a model whose chat template shows none: written as plain text, or refused."""


async def read_request(
    scope: Scope,
    receive: Receive,
    limits: HttpLimits,
    parse: Callable[[Mapping[str, object]], Parsed],
) -> Parsed:
    """Read what a request asks for. Raises as `read_body` and `parse`."""
    body = await read_body(scope, receive, limits)
    try:
        return await parse_body(body, parse)
    except UnknownParameters as fault:
        if limits.unknown == "refuse" or not fault.names:
            raise
        unknown = frozenset(fault.names)
    note_ignored(scope, sorted(unknown))
    return await parse_body(
        body,
        lambda whole: parse({name: value for name, value in whole.items() if name not in unknown}),
    )


async def read_body(scope: Scope, receive: Receive, limits: HttpLimits) -> bytes:
    """Read the whole body. Raises BodyTooLarge, BodyTimeout, Cancelled,
    UnsupportedEncoding, InvalidArgument for one that cannot be unpacked."""
    headers = Headers(scope=scope)
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", *_PACKED):
        raise UnsupportedEncoding(
            f"Content-Encoding {encoding!r} is not supported; send plain JSON, or one of "
            f"{', '.join(_PACKED)}"
        )
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.body_bytes:
        raise _too_large(f"{announced[:20]} bytes", limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client left before its request was whole")
                body += message.get("body", b"")
                if len(body) > limits.body_bytes:
                    raise _too_large("more", limits)
                if not message.get("more_body", False):
                    break
    except TimeoutError as fault:
        raise BodyTimeout(
            f"{len(body)} bytes of the body came within {limits.body_s:g} s, and not its end"
        ) from fault
    if encoding not in _PACKED:
        return bytes(body)
    return await asyncio.to_thread(_unpacked, encoding, bytes(body), limits)


def _unpacked(encoding: str, body: bytes, limits: HttpLimits) -> bytes:
    """Unpack a whole body, but no more than the limit. Raises BodyTooLarge, InvalidArgument."""
    stream = (
        zstandard.ZstdDecompressor().stream_reader(body)
        if encoding == "zstd"
        else gzip.GzipFile(fileobj=io.BytesIO(body))
    )
    try:
        with stream:
            found: bytes = stream.read(limits.body_bytes + 1)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as fault:
        raise InvalidArgument(f"the body cannot be unpacked as {encoding}: {fault}") from fault
    if len(found) > limits.body_bytes:
        raise _too_large("more, unpacked", limits)
    return found


class StreamForm(Protocol):
    """The form of a streamed answer."""

    @property
    def content_type(self) -> bytes:
        """The MIME type of the stream."""
        ...

    def keepalive(self, waits_for: str) -> bytes:
        """Bytes for a silent stream; `waits_for` as of `WaitTeller.describe`; b"" = none."""
        ...


class Connection:
    """The client of one request, while it is being worked for: `async with`.

    When the client leaves, the task inside is cancelled and the `async with` raises Cancelled.
    A streaming one also sends keepalives, beginning the response if need be.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        clock: Clock,
        limits: HttpLimits,
        wait: WaitTeller | None = None,
        stream: StreamForm | None = None,
    ) -> None:
        """`wait` tells for what the request waits; None = for nothing. `stream` None = the answer
        is sent whole."""
        self._wait = wait
        self._receive = receive
        self._send = send
        self._stream = stream
        self._clock = clock
        self._limits = limits
        self._helpers: list[asyncio.Task[None]] = []
        self._work: asyncio.Task[object] | None = None
        self.has_left = False
        """Whether the client was given up."""
        self._is_over = False
        self._is_quiet = True
        self._writes_since_mono: list[float] = []
        self.is_started = False

    async def __aenter__(self) -> Self:
        self._work = asyncio.current_task()
        self._helpers.append(asyncio.create_task(self._watch()))
        if self._stream is not None:
            self._helpers.append(asyncio.create_task(self._keep_alive(self._stream)))
            self._helpers.append(asyncio.create_task(self._watch_stall()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        for helper in self._helpers:
            helper.cancel()
        try:
            await asyncio.gather(*self._helpers, return_exceptions=True)
        except asyncio.CancelledError:
            if not self.has_left:
                raise
        if not self.has_left or self._work is None:
            return
        if self._work.uncancel() == 0 and kind is not None:
            raise Cancelled("the client left") from value

    async def send_event(self, event: bytes) -> None:
        """Send bytes of the event stream, beginning the response first if need be."""
        self._is_quiet = False
        since = self._clock.mono()
        self._writes_since_mono.append(since)
        try:
            if not self.is_started:
                await self._start()
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            self._writes_since_mono.remove(since)

    async def end(self, last: bytes) -> None:
        """Send the last bytes; from here on the client may leave.

        Raises Cancelled when it does not take them in time.
        """
        try:
            async with asyncio.timeout(self._limits.stall_s):
                if not self.is_started:
                    await self._start()
                self.finish()
                await self._send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError as fault:
            raise Cancelled("the client did not take the end of its stream") from fault

    def finish(self) -> None:
        """Stop watching the client: only the end of the answer is still to be sent."""
        self._is_over = True

    async def _start(self) -> None:
        self.is_started = True
        kind = b"" if self._stream is None else self._stream.content_type
        headers = [(b"content-type", kind), *_STREAM_HEADERS]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._abandon()

    async def _keep_alive(self, stream: StreamForm) -> None:
        """Send keepalives into silence; one that is not taken is bounded like any event."""
        limits, quiet_s = self._limits, 0.0
        while not self._is_over:
            pause_s = min(limits.progress_s, limits.keepalive_s - quiet_s)
            await self._clock.sleep(pause_s)
            quiet_s = quiet_s + pause_s if self._is_quiet else 0.0
            waits_for = "" if self._wait is None else self._wait.describe()
            is_due = bool(waits_for) or quiet_s >= limits.keepalive_s
            is_silent = self._is_quiet and not self._writes_since_mono and not self._is_over
            if is_due:
                quiet_s = 0.0
            if is_due and is_silent and (alive := stream.keepalive(waits_for)):
                await self.send_event(alive)
            self._is_quiet = True

    async def _watch_stall(self) -> None:
        """Give up a client that let one write wait for too long, be it an event or a keepalive."""
        while not self._is_over:
            now = self._clock.mono()
            waited_s = now - min(self._writes_since_mono, default=now)
            if waited_s >= self._limits.stall_s:
                self._abandon()
                return
            await self._clock.sleep(min(self._limits.keepalive_s, self._limits.stall_s - waited_s))

    def _abandon(self) -> None:
        if not self._is_over and not self.has_left and self._work is not None:
            self.has_left = True
            self._work.cancel()


def _too_large(size: str, limits: HttpLimits) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size}; at most {format_bytes(limits.body_bytes)} is read")
