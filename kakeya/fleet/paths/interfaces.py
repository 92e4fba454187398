"""The network interfaces of this machine: their kinds, listeners and entries on the card.

    thunderbolt   cables between Macs: `bridgeN` on macOS, `thunderboltN` on Linux
    lan           Ethernet and Wi-Fi with private addresses
    tailscale     100.64.0.0/10 and fd7a:115c:a1e0::/48, whatever the interface is called
    public        the rest, chosen only when the operator asks for it

`classify` and the choices are pure; `read_interfaces` asks the system.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import ifaddr

from kakeya.fleet.cards.cards import MAX_ENDPOINTS, Endpoint
from kakeya.fleet.paths.addresses import (
    TAILSCALE_NETWORKS,
    AddressPolicy,
    Ip,
    IpNetwork,
    Literal,
    NetworkRank,
    is_private,
)

WATCH_S = 2.0
"""Time between two reads of the interfaces; one costs about a millisecond."""

# Of macOS: AirDrop and its like, tunnels that the system keeps for itself, modems for phones.
_UNUSABLE = {
    "darwin": re.compile(
        r"lo|awdl|llw|anpi|ap|gif|stf|ipsec|pdp_ip|XHC|vmenet|vmnet|vnic|vboxnet|pktap"
    ),
    # Of Linux: containers and virtual machines of this host, which no peer reaches.
    "linux": re.compile(
        r"lo$|docker|podman|br-|veth[0-9a-f]{7}|virbr|cni|flannel|cali|lxcbr|lxdbr|incusbr|vnet|vmnet"
        r"|vboxnet|tap\d"
    ),
}
_THUNDERBOLT = {
    "darwin": re.compile(r"bridge\d+|thunderbolt.*", re.IGNORECASE),
    "linux": re.compile(r"thunderbolt.*"),
}
# macOS makes bridge100 and up for the guests of virtual machines and for internet sharing.
_GUESTS = {"darwin": re.compile(r"bridge\d{3,}"), "linux": re.compile(r"(?!)")}
_LIST_PORTS = ("/usr/sbin/networksetup", "-listallhardwareports")
_PORT = re.compile(
    # A dock's or a display's Ethernet, or FireWire, behind Thunderbolt is a network like others.
    r"^Hardware Port: Thunderbolt(?![^\n]*(?:Ethernet|FireWire))[^\n]*\nDevice: (\w+)$",
    re.MULTILINE,
)
_ASK_S = 3.0
# ZeroTier's are feth on macOS and zt on Linux.
_TUNNELS = {
    "darwin": re.compile(r"(?:utun|ppp|feth)\d+"),
    "linux": re.compile(r"(?:tun|wg|tailscale|ppp)\d+|zt\w{8}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One address of one interface; `name` is the system's, `index` its number."""

    name: str
    index: int
    ip: Ip
    prefix: int
    priority: NetworkRank

    @property
    def host(self) -> str:
        """The address as it is bound, with the interface where the address alone is not enough."""
        needs_zone = self.ip.version == 6 and self.ip.is_link_local
        return f"{self.ip}%{self.name}" if needs_zone else str(self.ip)

    @property
    def link(self) -> IpNetwork:
        """The network of the interface."""
        return ipaddress.ip_network((self.ip, self.prefix), strict=False)

    def address(self, port: int) -> str:
        """Write `HOST:PORT`."""
        return str(Literal(self.ip, port, self.host.partition("%")[2]))


def classify(
    name: str, ip: Ip, platform: str, thunderbolt: Collection[str] = ()
) -> NetworkRank | None:
    """Tell the kind of network of an interface's address; None = it reaches no peer.

    `platform` as `sys.platform` says it; unknown systems are taken for Linux. `thunderbolt` are
    ports that the system calls so (`read_thunderbolt_ports`), for Macs without the bridge.
    """
    system = "darwin" if platform == "darwin" else "linux"
    if ip.is_loopback or ip.is_multicast or ip.is_unspecified:
        return None
    if any(ip in network for network in TAILSCALE_NETWORKS):
        return NetworkRank.TAILSCALE
    for unusable in (_UNUSABLE, _GUESTS, _TUNNELS):
        if unusable[system].match(name):
            return None
    if name in thunderbolt or _THUNDERBOLT[system].fullmatch(name):
        return NetworkRank.THUNDERBOLT
    return NetworkRank.LAN if is_private(ip) else NetworkRank.PUBLIC


def find_thunderbolt_ports(listing: str) -> frozenset[str]:
    """Read the devices of Thunderbolt ports from `networksetup -listallhardwareports`."""
    return frozenset(_PORT.findall(listing))


async def read_thunderbolt_ports(platform: str) -> frozenset[str]:
    """Ask macOS which devices are Thunderbolt ports; empty on other systems."""
    if platform != "darwin":
        return frozenset()
    try:
        asked = await asyncio.create_subprocess_exec(
            *_LIST_PORTS, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return frozenset()
    try:
        async with asyncio.timeout(_ASK_S):
            listing, _ = await asked.communicate()
    except TimeoutError:
        return frozenset()
    finally:
        if asked.returncode is None:
            asked.kill()
    return find_thunderbolt_ports(listing.decode("utf-8", "replace"))


def read_interfaces(platform: str, thunderbolt: Collection[str] = ()) -> tuple[Interface, ...]:
    """Ask the system for every address that peers may reach, the best network first."""
    found = []
    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            ip = ipaddress.ip_address(entry.ip if isinstance(entry.ip, str) else entry.ip[0])
            priority = classify(adapter.name, ip, platform, thunderbolt)
            if priority is not None:
                found.append(
                    Interface(
                        name=adapter.name,
                        index=adapter.index or 0,
                        ip=ip,
                        prefix=entry.network_prefix,
                        priority=priority,
                    )
                )
    return in_order(found)


def source_host(address: str) -> str:
    """The own host by which the system sends to `HOST:PORT`, an IP; "" = it cannot.

    Asks the table of routes: to connect a datagram socket sends nothing.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        ipaddress.ip_address(host)
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((host, int(port)))
            return str(asked.getsockname()[0])
    except (OSError, OverflowError, ValueError):
        return ""


def in_order(interfaces: Sequence[Interface]) -> tuple[Interface, ...]:
    """Sort by network, then IPv4 before IPv6: shorter to read, and never without a zone."""
    return tuple(sorted(interfaces, key=lambda i: (i.priority, i.ip.version, i.index, i.ip.packed)))


def choose_listeners(
    interfaces: Sequence[Interface], *, with_public: bool = False
) -> tuple[Interface, ...]:
    """Choose where to listen: each private address; a public one only when asked.

    IPv6 addresses of one link are chosen only where the interface has no other address: peers
    find them by mDNS alone, since a card cannot name another machine's interface.
    """
    usable = [i for i in interfaces if with_public or i.priority is not NetworkRank.PUBLIC]
    addressed = {i.name for i in usable if not _is_bare(i)}
    chosen = [i for i in usable if not _is_bare(i) or i.name not in addressed]
    return in_order(chosen)[:MAX_ENDPOINTS]


def endpoints_of(listeners: Sequence[Interface], port: int) -> tuple[Endpoint, ...]:
    """Make the card's entries of the addresses that this node listens on."""
    return tuple(
        Endpoint(i.address(port), i.priority.network, int(i.priority))
        for i in in_order(listeners)
        if not _is_bare(i)
    )


def policy_for(
    interfaces: Sequence[Interface],
    *,
    own: Sequence[str],
    typed: Sequence[str],
    is_on_loopback: bool = False,
) -> AddressPolicy:
    """Make the policy of a machine with these interfaces."""
    return AddressPolicy(
        own=frozenset(own),
        typed=frozenset(typed),
        links=tuple(dict.fromkeys(i.link for i in interfaces)),
        zones=frozenset(zone for i in interfaces for zone in (i.name, str(i.index))),
        is_on_loopback=is_on_loopback,
    )


def _is_bare(interface: Interface) -> bool:
    return interface.ip.version == 6 and interface.ip.is_link_local
