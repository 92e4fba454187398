"""Hosts that are this machine itself, judged by their text, without a resolver."""

from __future__ import annotations

import ipaddress


def is_loopback_host(host: str) -> bool:
    """Whether a host without port and brackets is `localhost` or a loopback literal."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
