"""GET /api/v1/events: the facts of the fleet as server-sent events, one stream for all of the page.

    data: {"nodes": {NODE_ID: {SECTION: value, ...}, ...}}

The first event has all sections, later ones those that changed; a section that is gone is null.
The sections are those of /api/v1/status, with `recent` requests and `events` of the log beside
them; of other nodes those that the node tells, and `card`, this node's view of it. The entry of
this node has `self`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kakeya.dispatch.watch.fleet import FleetWatch
from kakeya.gateway.openai.reply import event
from kakeya.gateway.reply import EVENT_STREAM

PATH = "/api/v1/events"
QUIET_S = 15.0
"""A stream without news says so often that it lives; so a client that left is found out."""


def events_route(watch: FleetWatch) -> Route:
    """The served path."""

    async def events(request: Request) -> Response:
        """GET: the stream."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(_stream(watch), headers=headers, media_type=EVENT_STREAM.decode())

    return Route(PATH, events)


async def _stream(watch: FleetWatch) -> AsyncGenerator[bytes, None]:
    async with aclosing(watch.follow()) as news:
        coming = asyncio.ensure_future(anext(news, None))
        try:
            while True:
                await asyncio.wait((coming,), timeout=QUIET_S)
                if not coming.done():
                    yield b": nothing new\n\n"
                    continue
                if (changed := coming.result()) is None:
                    return
                yield event({"nodes": changed})
                coming = asyncio.ensure_future(anext(news, None))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
