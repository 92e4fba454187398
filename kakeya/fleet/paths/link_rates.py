"""How fast bytes come from each peer: as measured, else as networks of its kind are.

A rate is of the whole way: from the end of one block to the end of the next one, with the checks
and the place in pages of the block between them. Pure; times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from kakeya.core.units import MIB

LOOPBACK = "loopback"
"""The kind of a link to another node of this machine."""
EXPECTED: dict[str, float] = {
    LOOPBACK: 200 * MIB,
    "thunderbolt": 400 * MIB,
    "lan": 40 * MIB,
    "tailscale": 4 * MIB,
    "public": 2 * MIB,
}
"""Bytes/s of links that were never measured, by network: less than most have, since a fetch that is
foretold too soon sends a request to the wrong node."""
UNKNOWN = 2 * MIB
RATE_KEPT_S = 120.0
"""How long a measured link counts as measured."""
MOST_LINKS = 256
TAKEN_IN = 1.1
"""A fetch by its bytes and its rate takes so many times longer: a block also has to be taken in."""
_SMOOTHING = 0.3
"""Weight of the newest block in a link's rate."""


@dataclass(slots=True)
class LinkRate:
    """How fast blocks come from one peer; 0 = none came yet. `streams` of ours are open on it."""

    bytes_per_s: float = 0.0
    streams: int = 0
    _measured_mono: float = math.inf
    _last: float = 0.0

    def observe(self, size: int, seconds: float, now: float) -> None:
        """One block of so many bytes took so long, from the end of the one before."""
        self._measured_mono = now
        rate = size / max(seconds, 1e-6)
        known = self.bytes_per_s
        self.bytes_per_s = rate if not known else known + _SMOOTHING * (rate - known)

    def age(self, now: float) -> None:
        """Forget an old rate: a link that was slow is else never tried again."""
        if now - self._measured_mono > RATE_KEPT_S:
            self._last = self.bytes_per_s
            self.bytes_per_s, self._measured_mono = 0.0, math.inf

    @property
    def known(self) -> float:
        """Bytes/s as measured, be it long ago; 0 = never."""
        return self.bytes_per_s or self._last


class LinkRates:
    """The rates of the links to peers, by node id."""

    def __init__(self) -> None:
        self._links: OrderedDict[str, LinkRate] = OrderedDict()

    def link(self, node_id: str) -> LinkRate:
        """The link to a peer."""
        found = self._links.setdefault(node_id, LinkRate())
        self._links.move_to_end(node_id)
        if len(self._links) > MOST_LINKS:
            self._links.popitem(last=False)
        return found

    def expected(self, node_id: str, network: str) -> float:
        """Bytes/s to reckon with from a peer that is reached over such a network."""
        known = self._links.get(node_id)
        measured = 0.0 if known is None else known.known
        return measured or EXPECTED.get(network, UNKNOWN)

    def measured(self) -> dict[str, float]:
        """Bytes/s of the links that were measured, by node id."""
        return {node_id: link.known for node_id, link in self._links.items() if link.known}


def fetch_seconds(size_bytes: float, bytes_per_s: float) -> float:
    """Seconds until so many bytes of KV came and are in place. The rate is above 0."""
    return size_bytes / bytes_per_s * TAKEN_IN
