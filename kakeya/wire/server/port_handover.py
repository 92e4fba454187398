"""A listening port that one process gives to another: both then hold one socket.

A connection that neither accepts waits in it, and none is refused while one of them has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kakeya.core.errors import ConfigError, Conflict
from kakeya.core.settings import split_address
from kakeya.wire.server.ports import listen

_TAKEN = b"taken"
_LIMIT_S = 5.0
"""How long the other process may take to give the port away."""


class PortHandover:
    """Gives a listening socket to one process, until `close`."""

    def __init__(self, port: socket.socket) -> None:
        self._listening = port
        self._port: socket.socket | None = None
        self.is_taken = False
        """Whether another process has the port."""

    async def run(self, path: Path, opened: Callable[[], None]) -> None:
        """Give the port to the first process that asks at a unix socket; `opened`, which may block,
        is called once one can ask. Never returns, but where the port is closed already."""
        if self._listening.fileno() < 0:
            return  # a drain that had no request to wait for is over by now
        self._port = self._listening.dup()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.setblocking(False)
            door.bind(str(path))
            door.listen()
            await asyncio.to_thread(opened)
            while True:
                asked, _ = await asyncio.get_running_loop().sock_accept(door)
                with asked, contextlib.suppress(OSError):  # it has left already
                    if self.is_taken:
                        asked.send(_TAKEN)
                    elif self._port is not None:
                        socket.send_fds(asked, [b"port"], [self._port.fileno()])
                        self.is_taken = True

    def close(self) -> None:
        """Hold the port no more. Later calls do nothing."""
        if self._port is not None:
            self._port.close()
            self._port = None


def ask_for_port(path: Path, flag: str, address: str) -> socket.socket | None:
    """The listening socket for HOST:PORT, from the process that gives it away, or a new one where
    that has left it; None = it cannot be had now. Raises Conflict where another process has it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(_LIMIT_S)
        door.connect(str(path))
        said, given, _, _ = socket.recv_fds(door, 16, 1)
        if said == _TAKEN:
            raise Conflict(f"{flag} {address} is taken over by another process already; stop that")
        for descriptor in given:
            os.set_inheritable(descriptor, False)
            port = socket.socket(fileno=descriptor)
            if _is_at(port, address):
                return port
            port.close()
    with contextlib.suppress(ConfigError):
        return listen(flag, address)
    return None


def _is_at(port: socket.socket, address: str) -> bool:
    host, number = split_address(address)
    found = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return str(found[0][4][:2]) == str(port.getsockname()[:2])
