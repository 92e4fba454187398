"""The gRPC servers of a node: one per address, all with the same services.

    loopback, unix    plain; only this machine can reach them
    other addresses   mutual TLS, or plain in a fleet without identities
                      (`--insecure-lan`); strangers get little time, few streams, short headers

Addresses come and go while the node runs, as cables do. A renewed certificate is used from the
next handshake on; the connections of a node that was revoked, or has an expired certificate, are
closed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError, Conflict
from kakeya.core.figures import Figure, counter
from kakeya.core.host import join_address
from kakeya.core.log import CountLog, event
from kakeya.core.settings import split_address
from kakeya.core.tasks import shared_pause_s
from kakeya.core.units import KIB
from kakeya.wire.channels import IDLE_S, Keepalive, Option, is_local, message_options
from kakeya.wire.security import TlsMaterial
from kakeya.wire.server.authorization import CallerTrust, CallGuard, Origin, Permission
from kakeya.wire.server.caller_limits import CallerAccounts, CallerLimits
from kakeya.wire.server.connections import Connections, surplus
from kakeya.wire.server.permissions import PERMISSIONS
from kakeya.wire.server.ports import listen, unusable
from kakeya.wire.server.sockets import accepted, hang_up
from kakeya.wire.tls import server_credentials

_log = logging.getLogger(__name__)
_NETWORK = (Origin.TLS, Origin.OPEN)
_LOOK_EVERY_S = 2.0
_LOOKS_TO_CALL = 6
"""A connection makes its first call within so many looks after its handshake began, or none."""
_USUAL_WITHOUT_CALL = 8
"""In a minute: each doctor of the fleet looks whether a port answers, a plan of a ring connects for
its figures, and a node that ends cuts what it began. A node that is refused comes back each 2 to
4 s, and goes on."""
Register = Callable[[grpc.aio.Server], None]
"""Adds the node's services to a server before it starts; called once for each server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLimits:
    """Limits of a connection from another machine, before and after its handshake."""

    handshake_s: float = 5.0
    idle_s: float = IDLE_S
    """The time without a call; an honest peer connects again by itself."""
    streams: int = 32
    metadata_bytes: int = 8 * KIB

    def options(self) -> tuple[Option, ...]:
        """Make the options of a server that unknown machines can reach."""
        return (
            ("grpc.server_handshake_timeout_ms", int(self.handshake_s * 1000)),
            ("grpc.max_connection_idle_ms", int(self.idle_s * 1000)),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_metadata_size", self.metadata_bytes),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes),
        )


@dataclass(frozen=True, slots=True)
class _Listener:
    server: grpc.aio.Server
    origin: Origin


class _Handshakes:
    """Counts handshakes that began, on threads of gRPC."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begun = 0

    def begin(self) -> None:
        """Count one."""
        with self._lock:
            self.begun += 1


class Listeners:
    """The servers of a node by address. Ports are bound by `open_*`, calls answered from `start`.

    `material` and `trust` belong to a fleet with identities; without them no address can use TLS.
    The limits of a caller hold over all listeners together.
    """

    def __init__(
        self,
        register: Register,
        *,
        clock: Clock,
        material: Callable[[], TlsMaterial] | None = None,
        trust: CallerTrust | None = None,
        keepalive: Keepalive | None = None,
        network: NetworkLimits | None = None,
        callers: CallerLimits | None = None,
        permissions: Mapping[str, Permission] = PERMISSIONS,
    ) -> None:
        callers = callers or CallerLimits()
        self._register = register
        self._material = material
        self._trust = trust
        self._keepalive = keepalive or Keepalive()
        self._network = network or NetworkLimits()
        self._permissions = permissions
        self._clock = clock
        self._callers = callers
        self._admission = CallerAccounts(clock, callers)
        self._connections = Connections(callers.connections)
        self._open: dict[str, _Listener] = {}
        self._is_started = False
        self._handshakes = _Handshakes()
        words = "connections made no call: without TLS, without a certificate of this fleet, or cut"
        self._uncalled = CountLog(_log, words, clock, usual=_USUAL_WITHOUT_CALL)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the node in the order of opening, with their bound ports."""
        return tuple(self._open)

    def figures(self) -> Iterator[Figure]:
        """The connections of strangers."""
        words = "Connections from other machines that made no call"
        yield counter("kakeya_connections_without_call", words, self._uncalled.total)

    async def open_plain(self, address: str, *, flag: str) -> str:
        """Listen without encryption on HOST:PORT or unix:PATH; return the address with its port.

        Raises ConfigError naming `flag` when the address cannot be used.
        """
        if address.startswith("unix:"):
            origin = Origin.SOCKET
        else:
            origin = Origin.LOOPBACK if is_local(address) else Origin.OPEN
        server = self._server(origin)
        return await self._bind(address, _Listener(server, origin), server.add_insecure_port, flag)

    async def open_tls(self, address: str, *, flag: str) -> str:
        """Listen with mutual TLS on HOST:PORT; otherwise as `open_plain`."""
        if self._material is None:
            raise Conflict(f"{address} cannot be encrypted: this node has no identity")
        server = self._server(Origin.TLS)
        credentials = server_credentials(self._material, self._handshakes.begin)
        return await self._bind(
            address,
            _Listener(server, Origin.TLS),
            lambda where: server.add_secure_port(where, credentials),
            flag,
        )

    async def start(self) -> None:
        """Answer on every open address, and on each address that is opened later."""
        self._is_started = True
        for listener in list(self._open.values()):
            await self._start(listener.server)

    async def close(self, address: str, grace_s: float | None = None) -> None:
        """Stop listening on one address; running calls may go on for `grace_s`."""
        listener = self._open.pop(address, None)
        if listener is not None:
            await listener.server.stop(grace_s)

    async def stop(self, grace_s: float | None) -> None:
        """Refuse new calls on all addresses at once; running calls may go on for `grace_s`."""
        listeners = list(self._open.values())
        self._open.clear()
        await asyncio.gather(*(listener.server.stop(grace_s) for listener in listeners))

    def drop_revoked(self) -> int:
        """Begin to close the connections of revoked callers; return their number."""
        if self._trust is None:
            return 0
        gone = [caller for caller in self._connections.callers() if self._trust.is_revoked(caller)]
        return sum(self._connections.drop(caller) for caller in gone)

    def drop_expired(self) -> int:
        """Begin to close connections with expired certificates; return their number."""
        return self._connections.drop_ended(self._clock.wall())

    async def watch(self) -> None:
        """Close connections of revoked and expired certificates, and bound those of each host.

        The bound keeps one host from using up the open files of the process. Never returns.
        """
        begun: deque[int] = deque(maxlen=_LOOKS_TO_CALL)
        while True:
            await self._clock.sleep(shared_pause_s(_LOOK_EVERY_S, self._clock.mono()))
            begun.append(self._handshakes.begun)
            if len(begun) == _LOOKS_TO_CALL:
                settled = begun[0] - self._connections.noted
                self._uncalled.add(max(0, settled - self._uncalled.total))
            if ended := self.drop_expired():
                words = "closed connections with expired certificates"
                event(_log, words, level=logging.WARNING, closed=ended)
            ports = {
                split_address(address)[1]
                for address, listener in self._open.items()
                if listener.origin in _NETWORK
            }
            if not ports:
                continue
            open_now = await asyncio.to_thread(accepted, ports)
            too_many = surplus(
                open_now, self._connections.known(), self._callers.connections_per_host
            )
            if too_many:
                closed = await asyncio.to_thread(hang_up, frozenset(too_many))
                event(
                    _log,
                    "closed connections of hosts with too many",
                    level=logging.WARNING,
                    closed=closed,
                    first=too_many[0],
                )

    def _server(self, origin: Origin) -> grpc.aio.Server:
        guard = CallGuard(
            origin,
            self._permissions,
            admission=self._admission,
            connections=self._connections,
            clock=self._clock,
            trust=self._trust,
        )
        options = dict(self._keepalive.server_options() + message_options())
        if origin in _NETWORK:
            options |= dict(self._network.options())
        return grpc.aio.server(interceptors=(guard,), options=tuple(options.items()))

    async def _bind(
        self, address: str, listener: _Listener, bind: Callable[[str], int], flag: str
    ) -> str:
        try:
            bound = _bind(address, bind, flag)
        except ConfigError:
            await listener.server.stop(None)
            raise
        self._open[bound] = listener
        if self._is_started:
            await self._start(listener.server)
        return bound

    async def _start(self, server: grpc.aio.Server) -> None:
        self._register(server)
        await server.start()


def _bind(address: str, bind: Callable[[str], int], flag: str) -> str:
    try:
        port = bind(address)
    except RuntimeError:
        if not address.startswith("unix:"):
            # gRPC does not tell the reason; a plain socket does.
            listen(flag, address).close()
        raise unusable(flag, address, "gRPC cannot listen there") from None
    if address.startswith("unix:"):
        return address
    return join_address(split_address(address)[0], port)
