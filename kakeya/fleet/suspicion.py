"""Which addresses do not answer this node: local knowledge that placement steers by at once.

An edge, not a node, is suspected: another node may still reach it, so none of this is gossiped,
and only the TTL removes a card. A suspicion ends with an answer, or with a card that its owner
stamped after the failure (the owner lives and was heard through others).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kakeya.fleet.cards import Card

MISSES_TO_SUSPECT = 2
"""One missed deadline may be a long garbage collection; two in a row are not."""


@dataclass(frozen=True, slots=True)
class _Failure:
    since_at: float
    incarnation: int
    announced_at: float


class Suspicions:
    """Failed addresses and what would refute each failure."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}
        self._misses: Counter[str] = Counter()

    def has(self, address: str) -> bool:
        """Whether calls to the address are to be avoided."""
        return address in self._failures

    def fail(self, address: str, card: Card | None, now: float) -> None:
        """Note that the address refused or broke a call; `card` is what is held of its node."""
        incarnation, announced_at = (card.incarnation, card.announced_at) if card else (0, 0.0)
        self._failures[address] = _Failure(now, incarnation, announced_at)

    def miss(self, address: str, card: Card | None, now: float) -> None:
        """Note a missed deadline; the second in a row is a failure."""
        self._misses[address] += 1
        if self._misses[address] >= MISSES_TO_SUSPECT:
            self.fail(address, card, now)

    def clear(self, address: str) -> None:
        """Note that the address answered."""
        self._failures.pop(address, None)
        self._misses.pop(address, None)

    def hear(self, card: Card) -> None:
        """Weigh a newer card: it clears its address if it was stamped after the failure.

        A card that was stamped before and came round a longer way says nothing.
        """
        failure = self._failures.get(card.grpc_address)
        if failure is None:
            return
        is_restarted = card.incarnation > failure.incarnation > 0
        is_fresh = card.announced_at > max(failure.since_at, failure.announced_at)
        if is_restarted or is_fresh:
            self.clear(card.grpc_address)

    def keep_only(self, addresses: set[str]) -> None:
        """Forget every address but these."""
        for address in self._failures.keys() - addresses:
            del self._failures[address]
        for address in self._misses.keys() - addresses:
            del self._misses[address]
