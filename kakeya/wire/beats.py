"""Both ends of a stream between nodes that says something each second, so that the node that asks
finds out one that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

import grpc
import grpc.aio

from kakeya.core.errors import KakeyaError, PeerUnavailable
from kakeya.wire.calls import calling

Item = TypeVar("Item")
Asked = TypeVar("Asked")
Message = TypeVar("Message")
BEAT_S = 1.0
"""After so long without an item, a message says that the node lives, and for what it waits."""
SILENT_S = 8.0
"""A node that says nothing for so long hangs."""


async def with_beats(items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item | None, None]:
    """The items, and None after each `BEAT_S` without one. Closes the items with itself."""
    async with aclosing(items):
        while True:
            coming = asyncio.ensure_future(anext(items, None))
            try:
                while not coming.done():
                    done, _ = await asyncio.wait((coming,), timeout=BEAT_S)
                    if not done:
                        yield None
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait((coming,))
            item = coming.result()
            if item is None:
                return
            yield item


async def hear(
    call: grpc.aio.UnaryStreamCall[Asked, Message],
    kind: type[Message],
    peer: str,
    *errors: type[KakeyaError],
) -> Message | None:
    """The next message of a stream; None at its end. Raises PeerUnavailable for a `peer` that is
    silent, and the errors with which it ends the stream, as `calling`."""
    with calling(peer, *errors):
        try:
            async with asyncio.timeout(SILENT_S):
                message = await call.read()
        except TimeoutError:
            raise PeerUnavailable(
                f"{peer}: nothing was heard of the answer for {SILENT_S:g} s"
            ) from None
    return message if isinstance(message, kind) else None
