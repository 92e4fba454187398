"""Frames between the agent and an image worker: a line of JSON, and the bytes that it announces.

    agent -> worker   draw     request, prompt, seed, count, size, steps
                      cancel   request
    worker -> agent   ready    device, dtype            once, when the weights are loaded
                      failed   message                  instead: the worker ends
                      step     request, image, step, steps
                      image    request, seed            with the bytes of a PNG file
                      done     request                  also when it was cancelled
                      error    request, code, message   instead of `done`

`kind` is the first word, `request` the number of a request, `bytes` the length of what follows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

from kakeya.core.errors import PeerProtocol
from kakeya.core.units import MIB

MAX_HEAD_BYTES = MIB
"""Of a line: a prompt of 32,000 characters takes a fifth of it."""
MAX_BODY_BYTES = 64 * MIB


class WorkerFrame(NamedTuple):
    """A line, and the bytes behind it."""

    head: Mapping[str, object]
    body: bytes = b""

    @property
    def kind(self) -> str:
        """The kind of the frame."""
        return str(self.head.get("kind"))

    def number(self, name: str) -> int:
        """A whole number of the line. Raises PeerProtocol."""
        value = self.head.get(name)
        if type(value) is not int:
            raise PeerProtocol(f"{name} of a frame is {value!r}; it must be a whole number")
        return value


def packed(kind: str, fields: Mapping[str, object], body: bytes = b"") -> bytes:
    """The bytes of a frame."""
    head = {"kind": kind, **fields} | ({"bytes": len(body)} if body else {})
    return json.dumps(head).encode() + b"\n" + body


async def receive_frame(reader: asyncio.StreamReader) -> WorkerFrame | None:
    """Receive a frame; None at the end of the stream. Raises PeerProtocol.

    The reader's limit must be MAX_HEAD_BYTES.
    """
    try:
        head = _head(await reader.readuntil())
        return WorkerFrame(head, await reader.readexactly(_length(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except asyncio.LimitOverrunError:
        raise PeerProtocol(f"a frame begins with more than {MAX_HEAD_BYTES} bytes") from None


def read_frame(file: BinaryIO) -> WorkerFrame | None:
    """Read a frame; None at the end of the stream. Blocks. Raises PeerProtocol."""
    line = file.readline(MAX_HEAD_BYTES)
    if not line.endswith(b"\n"):
        return None
    head = _head(line)
    body = file.read(_length(head))
    return WorkerFrame(head, body) if len(body) == _length(head) else None


def _head(line: bytes) -> Mapping[str, object]:
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise PeerProtocol(f"a frame begins with {line[:80]!r}, which is no JSON object")
    return head


def _length(head: Mapping[str, object]) -> int:
    length = head.get("bytes", 0)
    if type(length) is not int or not 0 <= length <= MAX_BODY_BYTES:
        raise PeerProtocol(f"a frame announces {length!r} bytes; at most {MAX_BODY_BYTES} may come")
    return length
