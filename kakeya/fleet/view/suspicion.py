"""Peers that do not answer: the doubts of this node, and the doubts that it tells the fleet.

A doubt is about an edge, from this node to one address. It begins with a failed call, at once, so
that placement avoids the address, and is then judged by probes (`probing.py` makes the calls):

    unjudged     no helper was asked yet, or no helper answered: the fault may be this node's
    asymmetric   helpers reach the node, this node does not
    fleet-wide   neither this node nor its helpers reach it; told to all as an accusation

    ends by       an answer to this node   a restart   a sign of life from after the failure
    unjudged      yes                      yes         yes
    asymmetric    yes                      yes         no: its life was not in doubt
    fleet-wide    yes                      yes         becomes unjudged, and is probed again

An accusation of another node never makes a doubt here: it is a hint to probe, and a node passes on
only its own verdicts, so a liar costs the fleet a few probes and no node its good name. Nothing
here expires cards; only the TTL does. `now` and `lived_at` are seconds on one clock of the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import NamedTuple, Protocol

from kakeya.fleet.cards.cards import Card

MISSES_TO_SUSPECT = 2
"""One missed deadline may be a long garbage collection; two in a row are not."""
CONFIRMATIONS = 2
"""Helpers that must fail to reach a node too, if so many could be asked."""
SLACK_S = 0.25
"""By how much a sign of life may seem too young: its age travels in tenths of a second, and counts
the time at nodes but not the time on the network."""
MAX_ACCUSATIONS = 64
"""Told in one message, the newest first: more nodes than a switch has ports."""


class Doubt(StrEnum):
    """The verdict on a doubt."""

    UNJUDGED = "unjudged"
    ASYMMETRIC = "asymmetric"
    FLEET_WIDE = "fleet_wide"


class Sign(NamedTuple):
    """A sign of life: this start of the node, this card of it, this beat.

    On the wire it is an accusation: the node was not heard since.
    """

    node_id: str
    incarnation: int
    key: int = 0
    beat: int = 0


class Accusations(Protocol):
    """The suspicions that gossip carries; both methods are cheap and never wait."""

    def outgoing(self) -> tuple[Sign, ...]:
        """This node's own standing verdicts."""
        ...

    def hear(self, accusations: Sequence[Sign], accuser: str = "") -> None:
        """Take the accusations of another node: hints, of which some are worth a probe.

        `accuser` is the id in the certificate of its connection; "" = not known.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Failure:
    since_at: float
    sign: Sign | None
    """The last sign of life of the node at the address; None = not known."""
    doubt: Doubt = Doubt.UNJUDGED

    def is_of(self, card: Card | None) -> bool:
        return self.sign is not None and (card is None or card.node_id == self.sign.node_id)


def sign_of(card: Card, beat: int = 0) -> Sign:
    """The sign of life that a card and the beats after it are."""
    return Sign(card.node_id, card.incarnation, card.key, beat)


def is_refuted(accusation: Sign, held: Sign) -> bool:
    """Whether the held sign of a node is later than the accusation's sign.

    Two cards of one start cannot be ordered by their keys; that is no refutation, and a probe
    costs little.
    """
    if accusation.incarnation != held.incarnation:
        return held.incarnation > accusation.incarnation
    return held.key == accusation.key and held.beat > accusation.beat


def judge(answers: Sequence[bool | None]) -> Doubt:
    """Judge a node that did not answer this one, by the answers of the helpers that probed it.

    `None` stands for a helper that did not answer. If nearly all are silent, this node is likely
    cut off itself, and has no right to accuse.
    """
    if True in answers:
        return Doubt.ASYMMETRIC
    is_confirmed = answers.count(False) >= min(CONFIRMATIONS, len(answers))
    return Doubt.FLEET_WIDE if is_confirmed else Doubt.UNJUDGED


class Suspicions:
    """Doubted addresses, and the sign that would end each doubt. Pure: no clock, no calls."""

    __slots__ = ("_accused", "_failures", "_held", "_listener", "_misses", "on_change")

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}
        self._accused: dict[str, str] = {}
        """Address by node of each fleet-wide doubt, in the order of the verdicts."""
        self._misses: Counter[str] = Counter()
        self._held: set[str] = set()
        self._listener: Callable[[str], None] = _ignore
        self.on_change: Callable[[], None] = lambda: None
        """Called when a doubt begins or ends."""

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Tell `listener` the address of each failure, miss, refutation and newcomer, to probe."""
        self._listener = listener

    def look_at(self, address: str) -> None:
        """Have an address probed that is known from relays alone."""
        self._listener(address)

    # --- queries

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a doubt nor a missed deadline."""
        return not (self._failures or self._misses)

    def has(self, address: str) -> bool:
        """Whether calls to the address are to be avoided."""
        return address in self._failures

    def doubt_of(self, address: str) -> Doubt | None:
        """The doubt about an address; None = none."""
        failure = self._failures.get(address)
        return None if failure is None else failure.doubt

    def doubted(self) -> tuple[str, ...]:
        """Every doubted address, the oldest doubt first."""
        return tuple(self._failures)

    def accusations(self) -> tuple[Sign, ...]:
        """The accusations to tell: own fleet-wide verdicts, the newest `MAX_ACCUSATIONS`."""
        newest = islice(reversed(self._accused.values()), MAX_ACCUSATIONS)
        signs = (self._failures[address].sign for address in newest)
        return tuple(sign for sign in signs if sign is not None)

    def __len__(self) -> int:
        return len(self._failures)

    def __contains__(self, name: str) -> bool:
        """Whether a sign of life of this address or node id would change a doubt."""
        return name in self._failures or name in self._accused

    # --- results of calls

    def fail(self, address: str, card: Card | None, now: float) -> None:
        """Note that the address refused or broke a call; `card` is the held card of its node.

        A doubt that was judged stays judged.
        """
        held = self._failures.get(address)
        if held is not None and held.is_of(card):
            self._failures[address] = replace(held, since_at=now)
        else:
            self._forget_verdict(address)
            sign = None if card is None else Sign(card.node_id, card.incarnation)
            self._failures[address] = _Failure(now, sign)
            self.on_change()
        self._listener(address)

    def miss(self, address: str, card: Card | None, now: float) -> None:
        """Note a missed deadline; the second in a row is a failure."""
        self._misses[address] += 1
        if self._misses[address] >= MISSES_TO_SUSPECT:
            self.fail(address, card, now)
        else:
            self._listener(address)

    def clear(self, address: str) -> None:
        """Note that the address answered."""
        self._forget_verdict(address)
        self._misses.pop(address, None)
        if self._failures.pop(address, None) is not None:
            self.on_change()

    def suspect_all(self, cards: Iterable[Card], now: float) -> None:
        """Doubt all after this machine slept; each doubt ends with the first later sign of life."""
        for card in cards:
            if card.grpc_address not in self._failures:
                sign = Sign(card.node_id, card.incarnation)
                self._failures[card.grpc_address] = _Failure(now, sign)
        self.on_change()

    # --- results of probes

    def hold(self, address: str) -> None:
        """Keep the doubt through signs of life while it is judged, so that it does not flap."""
        self._held.add(address)

    def settle(self, card: Card, sign: Sign, doubt: Doubt, now: float) -> bool:
        """Note a verdict; `sign` is the last held one. Returns whether it is a new accusation.

        Only a fleet-wide verdict makes a doubt where the misses so far did not.
        """
        address = card.grpc_address
        if doubt is Doubt.FLEET_WIDE:
            before = self._accused.get(card.node_id)
            self._forget_verdict(address)
            if before is not None and before != address:
                self.clear(before)
            self._failures[address] = _Failure(now, sign, doubt)
            self._accused[card.node_id] = address
            self.on_change()
            return before is None
        failure = self._failures.get(address)
        if failure is not None and doubt is Doubt.ASYMMETRIC:
            self._forget_verdict(address)
            self._failures[address] = replace(failure, doubt=doubt)
        return False

    def release(self, address: str) -> None:
        """End `hold`."""
        self._held.discard(address)

    # --- signs of life

    def hear(self, card: Card, *, beat: int = 0, lived_at: float | None = None) -> None:
        """Weigh a newer card, or a later beat of it, that came through relays.

        `lived_at` is when its owner beat, by default the card's stamp. A sign from before the
        failure that took a longer way proves nothing.
        """
        address = self._accused.get(card.node_id, card.grpc_address)
        failure = self._failures.get(address)
        if failure is None or not (failure.sign is None or failure.is_of(card)):
            return  # a node that claims a foreign address proves nothing about the other node
        is_moved = address != card.grpc_address
        is_restarted = failure.sign is not None and card.incarnation > failure.sign.incarnation > 0
        if is_moved or is_restarted:
            self.clear(address)
        elif (card.announced_at if lived_at is None else lived_at) > failure.since_at + SLACK_S:
            self._weigh_life(address, failure, sign_of(card, beat))
        elif failure.doubt is Doubt.FLEET_WIDE:
            # Peers heard this sign too, and would ignore an accusation that names an older one.
            self._failures[address] = replace(failure, sign=sign_of(card, beat))

    def _weigh_life(self, address: str, failure: _Failure, sign: Sign) -> None:
        if failure.doubt is Doubt.UNJUDGED:
            if address not in self._held:
                self.clear(address)
        elif failure.doubt is Doubt.FLEET_WIDE:
            self._forget_verdict(address)
            self._failures[address] = replace(failure, sign=sign, doubt=Doubt.UNJUDGED)
            self._listener(address)

    def _forget_verdict(self, address: str) -> None:
        failure = self._failures.get(address)
        if failure is not None and failure.sign is not None:
            self._accused.pop(failure.sign.node_id, None)

    def keep_only(self, addresses: Collection[str]) -> None:
        """Forget every address but these."""
        for address in self._failures.keys() - set(addresses):
            self.clear(address)
        for address in self._misses.keys() - set(addresses):
            del self._misses[address]


def _ignore(address: str) -> None:
    pass
