"""A service with OpenAI's API on a real socket, which answers as a test says."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from kakeya.backends.relay.backend import Finished
from kakeya.backends.request import ChatRequest, GenerationParams, SamplingWish
from kakeya.gateway.http.server import serve_http
from kakeya.text.chat import Chat
from kakeya.text.tools.answer import Part

Respond = Callable[["Exchange"], Awaitable[None]]


@dataclass
class Exchange:
    """One request, and the way to answer it."""

    path: str
    headers: Headers
    body: dict[str, Any]
    send: Send
    receive: Receive

    async def start(self, status: int = 200, **headers: str) -> None:
        sent = {"content-type": "text/event-stream"} | headers
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in sent.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def left(self) -> None:
        """Wait until the client closes its connection."""
        while True:
            message: Message = await self.receive()
            if message["type"] == "http.disconnect":
                return


@dataclass
class Upstream:
    url: str
    asked: list[Exchange] = field(default_factory=list)


@asynccontextmanager
async def upstream(respond: Respond) -> AsyncIterator[Upstream]:
    sock = socket.create_server(("127.0.0.1", 0))
    served = Upstream(f"http://127.0.0.1:{sock.getsockname()[1]}/v1")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        one = Exchange(scope["path"], Headers(scope=scope), json.loads(body), send, receive)
        served.asked.append(one)
        await respond(one)

    async with serve_http(app, sock):
        yield served


def events(*found: dict[str, object]) -> bytes:
    """A whole stream of events."""
    written = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in found]
    return b"".join([b": a comment\n\n", *written, b"data: [DONE]\n\n"])


def delta(finish: str | None = None, **content: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def says(*texts: str) -> Respond:
    """Answer every request with these texts."""

    async def respond(one: Exchange) -> None:
        usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(texts)}}
        await one.start()
        await one.write(events(*(delta(content=text) for text in texts), delta("stop"), usage))
        await one.write(b"", more=False)

    return respond


def refuses(status: int, body: object, **headers: str) -> Respond:
    async def respond(one: Exchange) -> None:
        await one.start(status, content_type="application/json", **headers)
        await one.write(json.dumps(body).encode(), more=False)

    return respond


async def stalls(one: Exchange) -> None:
    """Say one word, and then nothing until the client leaves."""
    await one.start()
    await one.write(events(delta(content="one"))[: -len(b"data: [DONE]\n\n")])
    await one.left()


def chat(model: str, text: str = "Hello!", **params: Any) -> ChatRequest:
    fields = {"max_tokens": None, "sampling": SamplingWish(), "stop": (), "stream": True} | params
    return ChatRequest(
        params=GenerationParams(model=model, **fields),
        chat=Chat(messages=({"role": "user", "content": text},)),
    )


async def answered(parts: Any) -> list[Part | Finished]:
    async with asyncio.timeout(20):
        return [part async for part in parts]


def text_of(parts: Sequence[Part | Finished]) -> str:
    return "".join(getattr(part, "text", "") for part in parts)
