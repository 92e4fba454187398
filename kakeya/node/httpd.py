"""The HTTP server of the agent: uvicorn on a socket that was bound before, signals left alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from kakeya.core.errors import ConfigError
from kakeya.node.machine import join_address
from kakeya.node.settings import split_address

_BACKLOG = 512
_IDLE_S = 75
"""Kept-alive connections without a request are closed after this."""


def listen(flag: str, address: str) -> socket.socket:
    """Bind and listen on HOST:PORT. Raises ConfigError naming the flag."""
    host, port = split_address(address)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, proto)
    except OSError as problem:
        raise unusable(flag, address, problem.strerror or str(problem)) from problem
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(where)
        opened.listen(_BACKLOG)
    except OSError as problem:
        opened.close()
        raise unusable(flag, address, problem.strerror or str(problem)) from problem
    return opened


def unusable(flag: str, address: str, reason: str) -> ConfigError:
    """Return the refusal of an address that cannot be listened on."""
    return ConfigError(
        f"{flag} {address} cannot be used: {reason}; "
        f"stop what listens there, or give another address (port 0 lets the system choose)"
    )


def bound_address(opened: socket.socket) -> str:
    """Return HOST:PORT of a listening socket."""
    host, port = opened.getsockname()[:2]
    return join_address(str(host), int(port))


class HttpServer(uvicorn.Server):
    """Serves an ASGI app from `async with` entry to exit; exit drains for `grace_s`."""

    def __init__(self, app: ASGIApp, opened: socket.socket, *, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=max(1, int(grace_s)),
            )
        )
        self._opened = opened
        self._serving: asyncio.Task[None] | None = None
        self._accepting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the agent."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept."""
        await super().startup(sockets)
        self._accepting.set()

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self.serve(sockets=[self._opened]), name="http")
        await self._accepting.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.should_exit = True
        if self._serving is not None:
            await self._serving
