"""The own addresses of this node: opened, put on its card, and changed as cables come and go.

The first opened address chooses the port; later addresses share it, because peers remember
HOST:PORT. If a later address cannot be opened, only that address is missing.
"""

from __future__ import annotations

import ipaddress
import logging
import sys
from collections.abc import Callable, Collection, Sequence

from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError
from kakeya.core.host import join_address, reachable_address
from kakeya.core.log import event
from kakeya.core.settings import split_address
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Endpoint
from kakeya.fleet.config import FleetConfig
from kakeya.fleet.paths.addresses import AddressPolicy
from kakeya.fleet.paths.binding import Binding, choose_binding
from kakeya.fleet.paths.interfaces import (
    WATCH_S,
    Interface,
    choose_listeners,
    endpoints_of,
    policy_for,
    read_interfaces,
    read_thunderbolt_ports,
    source_host,
)
from kakeya.fleet.paths.round_trips import RoundTrips
from kakeya.wire.server.config import ListenConfig
from kakeya.wire.server.listeners import Listeners

_log = logging.getLogger(__name__)
_GRACE_S = 1.0
ReadInterfaces = Callable[[str, Collection[str]], tuple[Interface, ...]]


class OwnAddresses:
    """The node's own addresses, opened in `open` and kept up to date from `start` on.

    `on_change` is called on the loop after the addresses changed; it must not wait. `source`
    returns the own host from which the system reaches an address; "" = it cannot.
    """

    def __init__(
        self,
        listen: ListenConfig,
        fleet: FleetConfig,
        *,
        has_identity: bool,
        clock: Clock,
        on_change: Callable[[], None],
        platform: str = sys.platform,
        read: ReadInterfaces = read_interfaces,
        source: Callable[[str], str] = source_host,
    ) -> None:
        self._read = read
        self._source = source
        self._round_trips = RoundTrips()
        self._listen = listen
        self._fleet = fleet
        self._has_identity = has_identity
        self._clock = clock
        self._on_change = on_change
        self._platform = platform
        self._opened: dict[str, str] = {}
        """Network host -> its bound address."""
        self._loopback = ""
        self._named: set[str] = set()
        """Interfaces that were seen when the ports were last read."""

    async def open(self, listeners: Listeners) -> None:
        """Bind every address. Raises ConfigError naming the flag of an unusable one."""
        self._listeners = listeners
        await self._read_all()
        self._binding = binding = choose_binding(
            self._listen.bind,
            has_identity=self._has_identity,
            insecure_lan=self._listen.insecure_lan,
            interfaces=self._interfaces,
        )
        self._port = binding.port
        if binding.follows_interfaces:  # a port that is free on loopback is mostly free elsewhere
            await self._open_loopback(binding)
        for host in binding.network:
            await self._open_first(host, binding)
        if not self._loopback:
            await self._open_loopback(binding)
        if not self._advertised():
            raise ConfigError(
                f"--bind {self.grpc} listens everywhere and no network address was found to "
                "tell peers; give it with --advertise HOST:PORT"
            )

    def start(self, supervisor: Supervisor) -> None:
        """Follow the interfaces if the node chooses its addresses itself."""
        if self._binding.follows_interfaces:
            supervisor.start("interfaces", self._follow)

    # Addresses for others

    @property
    def grpc(self) -> str:
        """The address in the ready line: on the best network, or on loopback."""
        return next(iter(self._opened.values()), self._loopback)

    @property
    def is_networked(self) -> bool:
        """Whether other machines can reach this node, now or after a cable is plugged in."""
        return bool(self._opened) or self._binding.follows_interfaces

    @property
    def port(self) -> int:
        """The port of every address."""
        return self._port

    @property
    def advertised(self) -> str:
        """The address on the card for nodes that read no other field."""
        return self._advertised()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Own addresses on networks, without ports."""
        return tuple(i.host for i in self._listened())

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints on the card, with the measured round trips."""
        return self._round_trips.measured(endpoints_of(self._listened(), self._port))

    def answered(self, address: str, rtt_ms: float) -> None:
        """Note the round trip of a peer at an address."""
        host = self._source(address)
        own = next((i.address(self._port) for i in self._listened() if i.host == host), "")
        self._round_trips.note(own, address, rtt_ms=rtt_ms, mono=self._clock.mono())

    def round_trip_ms(self, address: str) -> float | None:
        """The least round trip to a peer's address of the last minutes; None = none."""
        return self._round_trips.least_ms(address, mono=self._clock.mono())

    def settle_round_trips(self) -> bool:
        """Bring the round trips of `endpoints` up to date; returns whether one changed."""
        own = [i.address(self._port) for i in self._listened()]
        return self._round_trips.settle(own, mono=self._clock.mono())

    def policy(self) -> AddressPolicy:
        """The policy for addresses that this node may dial."""
        made = policy_for(
            self._interfaces,
            own=(*self._opened.values(), self._loopback, self._advertised()),
            typed=self._fleet.peers,
            is_on_loopback=not self.is_networked,
        )
        extra = tuple(ipaddress.ip_network(network) for network in self._fleet.networks)
        return AddressPolicy(
            own=made.own,
            typed=made.typed,
            links=made.links,
            zones=made.zones,
            allowed=made.allowed + extra,
            is_on_loopback=made.is_on_loopback,
        )

    def _advertised(self) -> str:
        return self._listen.advertise or reachable_address(self.grpc)

    def _listened(self) -> Sequence[Interface]:
        interfaces = self._interfaces
        if any(ipaddress.ip_address(h.partition("%")[0]).is_unspecified for h in self._opened):
            return choose_listeners(interfaces)
        return [i for i in interfaces if i.host in self._opened]

    # Opening and closing

    async def _open_loopback(self, binding: Binding) -> None:
        if binding.loopback:
            self._loopback = await self._listeners.open_plain(
                join_address(binding.loopback, self._port), flag="--bind"
            )
            self._port = split_address(self._loopback)[1]

    async def _open_first(self, host: str, binding: Binding) -> None:
        try:
            await self._open(host)
        except ConfigError as problem:
            # An automatic address may be dead; a port in use is in use on all addresses.
            is_last_hope = host == binding.network[-1] and not self._opened
            if is_last_hope or not binding.follows_interfaces:
                raise
            event(_log, "not listening", level=logging.WARNING, host=host, problem=problem.message)

    async def _open(self, host: str) -> None:
        address = join_address(host, self._port)
        if self._binding.is_encrypted:
            bound = await self._listeners.open_tls(address, flag="--bind")
        else:
            bound = await self._listeners.open_plain(address, flag="--bind")
        self._opened[host] = bound
        self._port = split_address(bound)[1]

    async def _read_all(self) -> None:
        """Read the interfaces, and which of them are Thunderbolt ports: each new one may be."""
        self._thunderbolt = await read_thunderbolt_ports(self._platform)
        self._interfaces = self._read(self._platform, self._thunderbolt)
        self._named |= {i.name for i in self._interfaces}

    async def _follow(self) -> None:
        while True:
            await self._clock.sleep(WATCH_S)
            found = self._read(self._platform, self._thunderbolt)
            if {i.name for i in found} - self._named:
                await self._read_all()
            else:
                self._interfaces = found
            await self._reconcile({i.host for i in choose_listeners(self._interfaces)})

    async def _reconcile(self, wanted: set[str]) -> None:
        before = dict(self._opened)
        for host in set(self._opened) - wanted:
            await self._listeners.close(self._opened.pop(host), _GRACE_S)
        for host in wanted - set(self._opened):
            try:
                await self._open(host)
            except ConfigError as problem:
                # A new IPv6 address may still be checked for duplicates; a later look retries.
                event(_log, "not listening yet", host=host, problem=problem.message)
        if self._opened != before:
            event(
                _log,
                "own addresses changed",
                now=",".join(self._opened.values()) or "none",
                before=",".join(before.values()) or "none",
            )
            self._on_change()
