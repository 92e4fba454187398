"""A node that takes the place of one that is drained in the same data directory.

drained     says there that it leaves, and gives its HTTP port to the node that asks for it; it
            accepts until its own requests have ended
successor   takes the port, loads its libraries, and waits until the data directory is free
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kakeya.backends.engine.process import owner_socket
from kakeya.core.errors import ConfigError, Conflict
from kakeya.core.log import event
from kakeya.node.datadir import DataDir, is_left
from kakeya.wire.server.port_handover import PortHandover, ask_for_port
from kakeya.wire.server.ports import listen

if TYPE_CHECKING:  # a slow import, and the port is held before those
    from kakeya.gateway.http.server import HttpServer

_log = logging.getLogger(__name__)
SOCKET = "port.sock"
_HTTP = "--http"


class DrainedHttp:
    """The HTTP port of a node that is drained: a `DrainedPort`."""

    def __init__(self, home: DataDir, port: socket.socket, http: Callable[[], HttpServer]) -> None:
        """`http` is there once it serves."""
        self._home = home
        self._http = http
        self._handover = PortHandover(port)

    @property
    def is_taken(self) -> bool:
        """Whether the successor has the port."""
        return self._handover.is_taken

    @property
    def answering(self) -> int:
        """HTTP requests without a whole answer."""
        return self._http().answering

    async def run(self) -> None:
        """Give the port away, and have clients make new connections. Never returns."""
        self._http().end_connections()
        path = await asyncio.to_thread(_socket, self._home.folder)
        await self._handover.run(path, self._home.leave)

    def close(self) -> None:
        """Accept no more; without a successor the port is closed."""
        self._handover.close()
        self._http().accept_no_more()


def _socket(folder: Path) -> Path:
    path = owner_socket(folder, SOCKET)
    path.unlink(missing_ok=True)
    return path


def take_place(
    folder: Path, http: str, meanwhile: Callable[[], None]
) -> tuple[DataDir, socket.socket]:
    """The data directory and the listening HTTP port of a node that starts; `meanwhile` is called
    before it waits for a node that is drained.

    Raises Conflict while another node runs there, ConfigError for a folder or an address that
    cannot be used.
    """
    port: socket.socket | None = None
    try:
        home = DataDir(folder)
    except Conflict:
        if not is_left(folder):
            raise
        port = ask_for_port(owner_socket(folder, SOCKET), _HTTP, http)
        event(_log, "waits for the node that is drained here", has_its_port=port is not None)
        meanwhile()
        home = DataDir(folder, waits=True)
    try:
        return home, port or listen(_HTTP, http)
    except ConfigError:
        home.close()
        raise
