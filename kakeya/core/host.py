"""Facts of this machine for its card: platform, memory, names, addresses."""

from __future__ import annotations

import os
import platform
import random
import re
import socket

from kakeya.core.ids import draw_id
from kakeya.core.settings import split_address


def platform_name() -> str:
    """Name system and processor: `darwin-arm64`, `linux-x86_64`. Informational."""
    return f"{platform.system().lower()}-{platform.machine().lower()}"


def unified_memory_bytes() -> int:
    """Return the memory of the machine, which on Apple silicon is also the GPU's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def draw_node_id(rng: random.Random) -> str:
    """Draw a readable id: the first label of the host's name and six characters."""
    label = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0])[:40].strip("-")
    return draw_id(label or "node", rng, length=6)


def host_label() -> str:
    """Return the default label of this machine: the first word of its host name."""
    return socket.gethostname().partition(".")[0][:40] or "node"


def host_names() -> frozenset[str]:
    """Return the names by which a local network knows this machine."""
    name = socket.gethostname().lower().rstrip(".")
    label = name.partition(".")[0]
    return frozenset({name, label, f"{label}.local"})


def reachable_address(bound: str) -> str:
    """Return the address by which peers reach a bound one; "" when only the owner knows it.

    An unspecified host becomes the source address of the default route; the look-up sends no
    packet.
    """
    host, port = split_address(bound)
    if host not in ("0.0.0.0", "::"):
        return bound
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    probe = "2001:db8::1" if host == "::" else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        try:
            route.connect((probe, 9))
        except OSError:
            return ""
        found = str(route.getsockname()[0])
    return join_address(found, port)


def join_address(host: str, port: int) -> str:
    """Write HOST:PORT, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
