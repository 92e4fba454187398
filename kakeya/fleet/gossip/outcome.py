"""The outcome of a round of gossip, and of each peer in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import CardFault


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOutcome:
    """The outcome of one peer in a round. `error` is "" when it answered."""

    address: str
    error: str = ""
    error_code: str = ""
    rtt_s: float = 0.0
    sent_bytes: int = 0
    cards_received: int = 0
    has_pushed: bool = False
    """Whether it wanted bodies. It may have held back cards that these might have outdated."""
    changed: tuple[NodeId, ...] = ()
    dropped: Mapping[CardFault, int] = field(default_factory=dict)
    clamped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The report of one round. `sent_bytes` counts requests and pushes."""

    outcomes: tuple[PeerOutcome, ...]
    seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def errors(self) -> dict[str, str]:
        """A sentence for each peer that failed, by address."""
        return {outcome.address: outcome.error for outcome in self.outcomes if outcome.error}

    @property
    def changed(self) -> int:
        """Cards that were new or newer."""
        return sum(len(outcome.changed) for outcome in self.outcomes)

    @property
    def dropped(self) -> Mapping[CardFault, int]:
        """Cards that were refused, by fault."""
        total: Counter[CardFault] = Counter()
        for outcome in self.outcomes:
            total.update(outcome.dropped)
        return total

    @property
    def clamped(self) -> int:
        """Cards that were kept with a TTL moved into the bounds."""
        return sum(outcome.clamped for outcome in self.outcomes)


def joined(first: Round, second: Round) -> Round:
    """One report of two rounds, of which the second asked some of the targets of the first."""
    later = {outcome.address: outcome for outcome in second.outcomes}
    return Round(
        outcomes=tuple(
            _both(outcome, later[outcome.address]) if outcome.address in later else outcome
            for outcome in first.outcomes
        ),
        seconds=first.seconds + second.seconds,
        sent_bytes=first.sent_bytes + second.sent_bytes,
    )


def _both(first: PeerOutcome, second: PeerOutcome) -> PeerOutcome:
    return replace(
        second,
        sent_bytes=first.sent_bytes + second.sent_bytes,
        cards_received=first.cards_received + second.cards_received,
        changed=tuple(dict.fromkeys(first.changed + second.changed)),
        dropped=Counter(first.dropped) + Counter(second.dropped),
        clamped=first.clamped + second.clamped,
        has_pushed=True,
    )
