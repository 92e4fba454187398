"""The request that a job sends, and the events that come of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from kakeya.core.errors import KakeyaError
from kakeya.core.tasks import is_cancelled


class _Failed(KakeyaError):
    """A stream ended with an error, which its last event told."""


@dataclass(slots=True)
class ResponseLog:
    """The events of one response. `grown` is set, and replaced, when there are more."""

    events: list[bytes] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    size_bytes: int = 0

    def add(self, piece: bytes) -> None:
        """Add the events of a piece of a stream, and none of its comments."""
        events = (one for one in piece.split(b"\n\n") if one.startswith((b"event:", b"id:")))
        found = [one + b"\n\n" for one in events]
        self.events += found
        self.size_bytes += sum(map(len, found))
        grown, self.grown = self.grown, asyncio.Event()
        grown.set()

    def clear(self) -> None:
        """Begin anew."""
        self.events.clear()
        self.size_bytes = 0


class JobExchange:
    """The connection of a request that a job sends."""

    def __init__(self, body: bytes, log: ResponseLog | None) -> None:
        self._body: bytes | None = body
        self._log = log
        self._answer = b""

    async def receive(self) -> MutableMapping[str, Any]:
        """The body, and then nothing: a job does not leave."""
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Take a piece of the answer."""
        piece: bytes = message.get("body", b"")
        if self._log is None:
            self._answer += piece
        elif piece and not is_cancelled():
            # One that is cancelled ends by its job, and not by what the route says of it.
            self._log.add(piece)

    def response(self) -> dict[str, object]:
        """The response that came. Raises a KakeyaError where its stream ended with one."""
        if self._log is None:
            whole: dict[str, object] = json.loads(self._answer)
            return whole
        last: dict[str, object] = data_of(self._log.events[-1])["response"]
        if last["status"] == "failed":
            error = last["error"]
            assert isinstance(error, dict), last
            failed = _Failed(error["message"])
            failed.code = error["code"]
            raise failed
        return last


def data_of(event: bytes) -> dict[str, Any]:
    """The body of an event."""
    data: dict[str, Any] = json.loads(event.partition(b"\ndata: ")[2])
    return data
