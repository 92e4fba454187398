"""Addresses that this node dials of its own accord, and the names of their networks.

An address from a card or mDNS is a stranger's claim until the connection is authenticated, so it is
dialled only as an IP literal inside networks that this node has a reason to reach: a hostile card
must not make nodes call foreign machines. An address that the operator typed is dialled as typed.

Values and predicates only: no sockets, no resolver.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class NetworkRank(IntEnum):
    """Rank of a kind of network, the lowest first; the names in lower case go on the wire."""

    THUNDERBOLT = 10
    LAN = 20
    TAILSCALE = 30
    PUBLIC = 40

    @property
    def network(self) -> str:
        """The kind's name on cards."""
        return self.name.lower()


UNKNOWN_PRIORITY = 50
"""Rank of endpoints without a network name: after all others."""
TAILSCALE_NETWORKS: tuple[IpNetwork, ...] = (
    ipaddress.IPv4Network("100.64.0.0/10"),
    ipaddress.IPv6Network("fd7a:115c:a1e0::/48"),
)
LINK_LOCAL_NETWORKS: tuple[IpNetwork, ...] = (
    ipaddress.IPv4Network("169.254.0.0/16"),
    ipaddress.IPv6Network("fe80::/10"),
)
PRIVATE_NETWORKS: tuple[IpNetwork, ...] = (
    ipaddress.IPv4Network("10.0.0.0/8"),
    ipaddress.IPv4Network("172.16.0.0/12"),
    ipaddress.IPv4Network("192.168.0.0/16"),
    ipaddress.IPv6Network("fc00::/7"),
    *TAILSCALE_NETWORKS,
)
"""Networks that only their owners reach: RFC 1918, RFC 4193 and the range of RFC 6598."""
_LITERAL = re.compile(
    r"(?:(?P<four>[0-9.]{7,15})|\[(?P<six>[0-9A-Fa-f:.]{2,45})(?:%(?P<zone>[\w.-]{1,16}))?\])"
    r":(?P<port>[0-9]{1,5})",
    re.ASCII,
)


class Literal(NamedTuple):
    """An address without names: nothing here needs a resolver. `zone` names an interface."""

    ip: Ip
    port: int
    zone: str = ""

    def __str__(self) -> str:
        if isinstance(self.ip, ipaddress.IPv4Address):
            return f"{self.ip}:{self.port}"
        zone = f"%{self.zone}" if self.zone else ""
        return f"[{self.ip}{zone}]:{self.port}"


def read_literal(address: str) -> Literal | None:
    """Read `IPV4:PORT` or `[IPV6%ZONE]:PORT`; None for names and for every other spelling."""
    match = _LITERAL.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= 65535:
        return None
    try:
        ip = ipaddress.ip_address(match["four"] or match["six"])
    except ValueError:
        return None
    return Literal(ip, int(match["port"]), match["zone"] or "")


def is_private(ip: Ip) -> bool:
    """Whether an address is of a private network, or of one cable."""
    return _within(ip, PRIVATE_NETWORKS) or _within(ip, LINK_LOCAL_NETWORKS)


def _within(ip: Ip, networks: Iterable[IpNetwork]) -> bool:
    # `in` is false across versions.
    return any(ip in network for network in networks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressPolicy:
    """Addresses that this node may dial of its own accord; replaced when its interfaces change.

    `own` are its own addresses, `typed` those of the operator (dialled whatever they are),
    `links` the networks of its interfaces, `zones` the names and numbers of those, `allowed`
    further networks. Loopback is for nodes that are on loopback themselves.
    """

    own: frozenset[str] = frozenset()
    typed: frozenset[str] = frozenset()
    links: tuple[IpNetwork, ...] = ()
    zones: frozenset[str] = frozenset()
    allowed: tuple[IpNetwork, ...] = PRIVATE_NETWORKS
    is_on_loopback: bool = False

    def may_dial(self, address: str) -> str:
        """Return "" or the reason against it."""
        if address in self.own:
            return "it is this node's own"
        if address in self.typed:
            return ""
        literal = read_literal(address)
        if literal is None:
            return "it is no IP address with a port from 1 to 65535"
        return self._fault_of(literal.ip) or self._fault_of_zone(literal)

    def allows(self, address: str) -> bool:
        """Whether `may_dial` gives no reason against it."""
        return not self.may_dial(address)

    def is_on_link(self, address: str) -> bool:
        """Whether an interface of this machine is in the address's network: no router between."""
        literal = read_literal(address)
        return literal is not None and _within(literal.ip, self.links)

    def _fault_of(self, ip: Ip) -> str:
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            return "it is an IPv4 address written as IPv6"
        if ip.is_unspecified:
            return "it is the unspecified address, not one machine's"
        if ip.is_multicast:
            return "it is a multicast address, not one machine's"
        if ip.is_loopback:
            return "" if self.is_on_loopback else "it is a loopback address"
        if any(ip == link.broadcast_address for link in self.links if link.version == 4):
            return "it is a broadcast address, not one machine's"
        if _within(ip, self.links) or (
            # Another cable's link-local addresses are not reachable, whatever else is allowed.
            _within(ip, self.allowed) and not _within(ip, LINK_LOCAL_NETWORKS)
        ):
            return ""
        return "its network is neither private nor this node's"

    def _fault_of_zone(self, literal: Literal) -> str:
        needs_zone = literal.ip.version == 6 and literal.ip.is_link_local
        if needs_zone and literal.zone not in self.zones:
            return "it names no interface of this machine"
        return "" if needs_zone or not literal.zone else "it needs no interface"


def dialable(addresses: Collection[str], policy: AddressPolicy, limit: int) -> tuple[str, ...]:
    """Keep the first `limit` addresses that may be dialled, those on an own link first."""
    allowed = [address for address in addresses if not policy.may_dial(address)]
    return tuple(sorted(allowed, key=lambda address: not policy.is_on_link(address))[:limit])
