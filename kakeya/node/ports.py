"""The two ports of a node, bound before anything else is built."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import grpc.aio

from kakeya.core.errors import ConfigError
from kakeya.node.config import ListenConfig
from kakeya.node.machine import join_address, reachable_address
from kakeya.node.settings import is_loopback, split_address
from kakeya.node.table import ADVERTISE, BIND, HTTP, INSECURE_LAN, JOIN
from kakeya.wire.channels import Keepalive, message_options

_BACKLOG = 512
DEFAULT_BIND = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """A gRPC server that has a port and no services, a listening HTTP socket, their addresses.

    `advertised` is where peers reach gRPC.
    """

    server: grpc.aio.Server
    grpc: str
    http_socket: socket.socket
    http: str
    advertised: str


def bind(config: ListenConfig) -> Ports:
    """Bind both ports. Raises ConfigError naming the flag of the one that cannot be used."""
    wanted = config.bind or DEFAULT_BIND
    if not config.insecure_lan and not is_loopback(wanted):
        raise ConfigError(
            f"{BIND.flag} {wanted} is reachable from other machines and this node has no identity; "
            f"make one with kakeya init or {JOIN.flag} TOKEN, add {INSECURE_LAN.flag} on a trusted "
            "network, or bind 127.0.0.1"
        )
    http_socket = listen(HTTP.flag, config.http)
    try:
        server = grpc.aio.server(options=Keepalive().server_options() + message_options())
        address = _bind_grpc(server, wanted)
        advertised = config.advertise or _advertisable(address)
    except BaseException:
        http_socket.close()
        raise
    host, port = http_socket.getsockname()[:2]
    return Ports(
        server=server,
        grpc=address,
        http_socket=http_socket,
        http=join_address(str(host), int(port)),
        advertised=advertised,
    )


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


def _bind_grpc(server: grpc.aio.Server, address: str) -> str:
    host, _ = split_address(address)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        # gRPC does not say why; the same attempt by hand does.
        listen(BIND.flag, address).close()
        raise unusable(BIND.flag, address, "gRPC cannot listen there") from None
    return join_address(host, port)


def unusable(flag: str, address: str, reason: str) -> ConfigError:
    """The one sentence for an address that cannot be listened on."""
    return ConfigError(
        f"{flag} {address} cannot be used: {reason}; "
        "stop what listens there, or give another address (port 0 lets the system choose)"
    )


def _advertisable(address: str) -> str:
    found = reachable_address(address)
    if not found:
        raise ConfigError(
            f"{BIND.flag} {address} listens everywhere and no network address was found to tell "
            f"peers; give it with {ADVERTISE.flag} HOST:PORT"
        )
    return found
