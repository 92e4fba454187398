"""Listening sockets, and the sentence for an address that cannot be used."""

from __future__ import annotations

import socket

from kakeya.core.errors import ConfigError
from kakeya.core.settings import split_address

_BACKLOG = 512


def listen(flag: str, address: str) -> socket.socket:
    """Open a listening TCP socket. Raises ConfigError naming the flag that chose its address."""
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
    """Make the error for an address that cannot be used."""
    return ConfigError(
        f"{flag} {address} cannot be used: {reason}; stop the program that listens there, "
        "or give another address (port 0 lets the system choose)"
    )
