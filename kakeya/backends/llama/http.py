"""HTTP/1.1 over a UNIX socket: one connection for each call, closed to cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from httptools import HttpParserError, HttpResponseParser

from kakeya.core.errors import PeerProtocol

_READ_BYTES = 65_536
_MOST_BYTES = 64 << 20
"""Of one answer that is read whole."""


class HttpAnswer:
    """The answer of one call, as httptools parses it. `body` yields its parts as they come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._is_begun = False
        self._is_whole = False

    @property
    def status(self) -> int:
        """The status code, once the headers are there."""
        return int(self._parser.get_status_code())

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._is_begun = True

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._is_whole = True

    async def begin(self) -> None:
        """Read the status and the headers. Raises OSError if the connection ends, PeerProtocol."""
        while not self._is_begun:
            await self._more()

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield what is there, at once. Raises OSError if the connection ends before the body."""
        while True:
            if self._parts:
                parts, self._parts = self._parts, []
                yield b"".join(parts)
            if self._is_whole:
                return
            await self._more()

    async def whole(self) -> dict[str, Any]:
        """Read the body to its end, as a JSON object. Raises OSError, PeerProtocol."""
        body = b""
        async for part in self.body():
            body += part
            if len(body) > _MOST_BYTES:
                raise PeerProtocol(f"an answer has more than {_MOST_BYTES} bytes")
        try:
            told = json.loads(body)
        except ValueError:
            raise PeerProtocol(f"an answer is no JSON: {body[:200]!r}") from None
        return told if isinstance(told, dict) else {"items": told}

    async def _more(self) -> None:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the connection was closed before the end of an answer")
        try:
            self._parser.feed_data(data)
        except HttpParserError as fault:
            raise PeerProtocol(f"an answer is no HTTP: {fault}") from None


@asynccontextmanager
async def call(
    socket: Path, path: str, body: Mapping[str, object] | None = None
) -> AsyncIterator[HttpAnswer]:
    """Send GET, or POST with a body; yield the answer once its headers are there.

    Leaving closes the connection. Raises OSError if nothing listens or the connection ends.
    """
    reader, writer = await asyncio.open_unix_connection(socket, limit=4 * _READ_BYTES)
    try:
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        method = "GET" if body is None else "POST"
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        )
        writer.write(content)
        await writer.drain()
        answer = HttpAnswer(reader)
        await answer.begin()
        yield answer
    finally:
        # A stream that was left has unread bytes: they are not waited for.
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
