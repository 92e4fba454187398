"""Round-trip times on each of this node's own networks, as its card shows them.

    samples    round trips to peers, each under the own address that it left by
    least      of each peer, of five to ten minutes: the rest of a sample is work and waiting
    median     over the peers of one network, rounded up to one of few steps
    shown      the figure on the card; 0 = not measured

A card goes to the whole fleet when it changes, so the shown figure changes seldom: a step is left
only when the median is clearly outside it, and never sooner than `HOLD_S` after the last change;
the first figure of a network waits for `SETTLE_S` only. The shown figure is a hint for nodes that
have not measured the way to this node. Pure: `mono` is given.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kakeya.fleet.cards.cards import Endpoint

STEPS_MS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
SETTLE_S = 30.0
"""From the first sample to the first figure: three rounds, so that the start does not count."""
HOLD_S = 300.0
MAX_PEERS = 64
"""Most peers measured on one network; the median of so many says enough."""
MAX_ADDRESSES = 32
"""Own addresses with kept figures: a cable that is pulled comes back."""
_WINDOW_S = 300.0
_SLACK = 0.25
"""Share of its step by which a median must be outside to leave it."""


@dataclass(slots=True)
class _Least:
    """The least sample of the last one to two windows."""

    begun_mono: float
    now_ms: float
    before_ms: float = float("inf")

    def note(self, rtt_ms: float, mono: float) -> None:
        windows = (mono - self.begun_mono) // _WINDOW_S
        if windows >= 1:
            self.before_ms = self.now_ms if windows < 2 else float("inf")
            self.begun_mono, self.now_ms = mono, rtt_ms
        self.now_ms = min(self.now_ms, rtt_ms)

    def is_fresh(self, mono: float) -> bool:
        return mono - self.begun_mono < 2 * _WINDOW_S

    @property
    def ms(self) -> float:
        return min(self.now_ms, self.before_ms)


class RoundTrips:
    """Measured and shown figures by own address (`HOST:PORT`)."""

    def __init__(self) -> None:
        self._peers: dict[str, OrderedDict[str, _Least]] = {}
        self._shown: dict[str, float] = {}
        self._first_mono: float | None = None
        self._changed_mono = float("-inf")

    def note(self, own: str, peer: str, *, rtt_ms: float, mono: float) -> None:
        """Take a round trip from an own address, "" = loopback, to a peer's.

        A value that is no time is ignored.
        """
        if not 0.0 < rtt_ms < float("inf"):
            return
        if self._first_mono is None:
            self._first_mono = mono
        peers = self._peers.setdefault(own, OrderedDict())
        least = peers.setdefault(peer, _Least(mono, rtt_ms))
        least.note(rtt_ms, mono)
        peers.move_to_end(peer)
        while len(peers) > MAX_PEERS:
            peers.popitem(last=False)

    def least_ms(self, peer: str, *, mono: float) -> float | None:
        """The least round trip to a peer's address, from any own one; None = none is known."""
        found = (peers[peer] for peers in self._peers.values() if peer in peers)
        return min((least.ms for least in found if least.is_fresh(mono)), default=None)

    def settle(self, own: Collection[str], *, mono: float) -> bool:
        """Update the shown figures of the own addresses; returns whether one changed."""
        if self._first_mono is None or mono - self._first_mono < SETTLE_S:
            return False
        since_s = mono - self._changed_mono
        news = {
            address: figure for address in own if (figure := self._news(address, since_s, mono))
        }
        if not news:
            return False
        self._shown = dict([*self._shown.items(), *news.items()][-MAX_ADDRESSES:])
        self._peers = {address: self._peers[address] for address in own if address in self._peers}
        self._changed_mono = mono
        return True

    def measured(self, endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
        """The endpoints with their shown round trips."""
        return tuple(way._replace(rtt_ms=self._shown.get(way.address, 0.0)) for way in endpoints)

    def _news(self, own: str, since_s: float, mono: float) -> float:
        """Another figure for an own address, if it is time for one; else 0."""
        shown = self._shown.get(own, 0.0)
        fresh = [least.ms for least in self._peers.get(own, {}).values() if least.is_fresh(mono)]
        if not fresh or since_s < (HOLD_S if shown else SETTLE_S):
            return 0.0
        figure = coarse_ms(statistics.median_low(fresh), shown)
        return 0.0 if figure == shown else figure


def coarse_ms(rtt_ms: float, shown_ms: float = 0.0) -> float:
    """The step to show for a round trip: the next one up, or the one shown if it is near enough."""
    if shown_ms in STEPS_MS:
        below_ms = (0.0, *STEPS_MS)[STEPS_MS.index(shown_ms)]
        if below_ms * (1 - _SLACK) < rtt_ms <= shown_ms * (1 + _SLACK):
            return shown_ms
    return next((step for step in STEPS_MS if rtt_ms <= step), STEPS_MS[-1])
