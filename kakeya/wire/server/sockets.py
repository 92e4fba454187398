"""Close open TCP connections of this process by their sockets: gRPC has no call for it.

A revoked node must lose its open connections, not only the right to new ones. The sockets belong
to gRPC; a duplicate of the descriptor reaches the same connection, and shutting it down ends the
connection for both. Needs no root; `/dev/fd` lists the descriptors on Linux and macOS.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Collection
from typing import NewType
from urllib.parse import unquote

Peer = NewType("Peer", str)
"""The other end of a connection, `IP:PORT`; IPv6 in brackets, no zone id, IPv4 never mapped."""
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def peer_of(grpc_peer: str) -> Peer | None:
    """Parse the text of `context.peer()`, `ipv4:10.0.0.5:50123`; None for a unix socket."""
    kind, _, rest = grpc_peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = unquote(rest).rpartition(":")
    return _peer(host.strip("[]"), int(port)) if port.isdigit() else None


def open_peers() -> frozenset[Peer]:
    """List the other ends of all open TCP connections of this process."""
    found: set[Peer] = set()
    _visit(lambda _, peer: found.add(peer))
    return frozenset(found)


def accepted(ports: Collection[int]) -> tuple[Peer, ...]:
    """List the other ends of the connections to these ports of this process."""
    found: list[Peer] = []

    def keep(connection: socket.socket, peer: Peer) -> None:
        if connection.getsockname()[1] in ports:
            found.append(peer)

    _visit(keep)
    return tuple(found)


def hang_up(peers: Collection[Peer]) -> int:
    """Close every connection to these ends; return their number."""
    closed = 0

    def close(connection: socket.socket, peer: Peer) -> None:
        nonlocal closed
        if peer in peers:
            connection.shutdown(socket.SHUT_RDWR)
            closed += 1

    if peers:
        _visit(close)
    return closed


def _visit(act: Callable[[socket.socket, Peer], None]) -> None:
    """Call `act` with each connected TCP socket of this process."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - names, not paths
        try:
            # Files are skipped: closing any copy of one ends the locks that this process has
            # on it, and SQLite's would be among them.
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A duplicate: if gRPC closes its own meanwhile, the number cannot become another file.
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                os.close(copy)
                continue
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with connection:
            peer = _connected_to(connection)
            if peer is not None:
                try:
                    act(connection, peer)
                except OSError:
                    continue  # it was closing already


def _connected_to(connection: socket.socket) -> Peer | None:
    if connection.family not in _FAMILIES or connection.type != socket.SOCK_STREAM:
        return None
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return None
    return _peer(host, port)


def _peer(host: str, port: int) -> Peer | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return Peer(f"{mapped}:{port}") if mapped else Peer(f"[{address}]:{port}")
    return Peer(f"{address}:{port}")
