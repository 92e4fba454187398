"""Hosts that are this machine itself, judged by their text, without a resolver."""

from __future__ import annotations

import ipaddress


def plain_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IP address without its zone; IPv4 as itself, also where a socket for both shows it as IPv6
    (::ffff:192.0.2.1). Raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback_host(host: str) -> bool:
    """Whether a host without port and brackets is `localhost` or a loopback literal."""
    if host == "localhost":
        return True
    try:
        return plain_address(host).is_loopback
    except ValueError:
        return False
