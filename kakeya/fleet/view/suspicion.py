"""Who does not answer: doubts of this node, and which of them it tells the fleet.

A doubt is about an edge, from this node to one address. It begins with a failed call, at once, so
that placement steers around it, and is then judged by probes (`probing.py` makes the calls):

    unjudged     nobody else was asked yet, or nobody answered: the fault may be ours
    asymmetric   others reach the node, this one does not
    fleet-wide   neither this node nor those that it asked reach it; told to all as an accusation

    ends by       an answer to us   a restart   a sign of life from after the failure
    unjudged      yes               yes         yes
    asymmetric    yes               yes         no: nobody doubted its life
    fleet-wide    yes               yes         becomes unjudged, and is looked at again

What others say never makes a doubt here: an accusation is a hint to look, and only one's own
verdict is passed on, so a liar costs the fleet a few probes and no node its good name. Nothing
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
"""Others who must say that they do not reach a node either, if so many could be asked."""
SLACK_S = 0.25
"""How much younger than it is a sign of life may seem: its age travels in tenths of a second, and
grows by the time it lay at nodes but not by the time it was under way."""
MAX_ACCUSATIONS = 64
"""Told in one message, the newest first: more nodes than a switch has ports."""


class Doubt(StrEnum):
    """How far a doubt was judged."""

    UNJUDGED = "unjudged"
    ASYMMETRIC = "asymmetric"
    FLEET_WIDE = "fleet_wide"


class Sign(NamedTuple):
    """A sign of life: this start of the node, this card of it, this beat. On the wire it is an
    accusation: not heard of since."""

    node_id: str
    incarnation: int
    key: int = 0
    beat: int = 0


class Accusations(Protocol):
    """What gossip carries of suspicion; both are cheap and never wait."""

    def outgoing(self) -> tuple[Sign, ...]:
        """This node's own standing verdicts."""
        ...

    def hear(self, accusations: Sequence[Sign], accuser: str = "") -> None:
        """Take what another node accuses: hints, of which some are worth a look.

        `accuser` is the id that its connection vouches for; "" = nobody knows.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Failure:
    since_at: float
    sign: Sign | None
    """Of the node that was there, as far as it was known."""
    doubt: Doubt = Doubt.UNJUDGED

    def is_of(self, card: Card | None) -> bool:
        return self.sign is not None and (card is None or card.node_id == self.sign.node_id)


def sign_of(card: Card, beat: int = 0) -> Sign:
    """The sign of life that a card and the beats after it are."""
    return Sign(card.node_id, card.incarnation, card.key, beat)


def is_refuted(accusation: Sign, held: Sign) -> bool:
    """Whether what is held of a node shows that it lived on after the accusation's sign.

    Two cards of one start cannot be ordered by their keys; that is no refutation, and a look
    costs little.
    """
    if accusation.incarnation != held.incarnation:
        return held.incarnation > accusation.incarnation
    return held.key == accusation.key and held.beat > accusation.beat


def judge(answers: Sequence[bool | None]) -> Doubt:
    """Judge a node that did not answer us by what those said whom we asked to try.

    `None` stands for one who gave no answer. If nearly all are silent, this node is likely the one
    that is cut off, and it has no right to accuse.
    """
    if True in answers:
        return Doubt.ASYMMETRIC
    is_confirmed = answers.count(False) >= min(CONFIRMATIONS, len(answers))
    return Doubt.FLEET_WIDE if is_confirmed else Doubt.UNJUDGED


class Suspicions:
    """Doubted addresses, and what would end each doubt. Pure: no clock, no calls."""

    __slots__ = ("_accused", "_failures", "_held", "_listener", "_misses")

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}
        self._accused: dict[str, str] = {}
        """Address by node of each fleet-wide doubt, in the order of the verdicts."""
        self._misses: Counter[str] = Counter()
        self._held: set[str] = set()
        self._listener: Callable[[str], None] = _nobody

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Have the address of each failure, miss, refutation and newcomer told, to be looked at."""
        self._listener = listener

    def look_at(self, address: str) -> None:
        """Have an address looked at, of which nothing but hearsay is known."""
        self._listener(address)

    # --- queries

    @property
    def is_empty(self) -> bool:
        """Whether nobody is doubted and nobody missed a deadline."""
        return not (self._failures or self._misses)

    def has(self, address: str) -> bool:
        """Whether calls to the address are to be avoided."""
        return address in self._failures

    def doubt_of(self, address: str) -> Doubt | None:
        """How the address is doubted; None = not at all."""
        failure = self._failures.get(address)
        return None if failure is None else failure.doubt

    def doubted(self) -> tuple[str, ...]:
        """Every doubted address, the oldest doubt first."""
        return tuple(self._failures)

    def accusations(self) -> tuple[Sign, ...]:
        """What to tell the fleet: own fleet-wide verdicts, the newest `MAX_ACCUSATIONS`."""
        newest = islice(reversed(self._accused.values()), MAX_ACCUSATIONS)
        signs = (self._failures[address].sign for address in newest)
        return tuple(sign for sign in signs if sign is not None)

    def __len__(self) -> int:
        return len(self._failures)

    def __contains__(self, name: str) -> bool:
        """Whether a sign of life of this address or node id would say anything new here."""
        return name in self._failures or name in self._accused

    # --- what happened to calls

    def fail(self, address: str, card: Card | None, now: float) -> None:
        """Note that the address refused or broke a call; `card` is what is held of its node.

        A doubt that was judged stays judged.
        """
        held = self._failures.get(address)
        if held is not None and held.is_of(card):
            self._failures[address] = replace(held, since_at=now)
        else:
            self._forget_verdict(address)
            sign = None if card is None else Sign(card.node_id, card.incarnation)
            self._failures[address] = _Failure(now, sign)
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
        self._failures.pop(address, None)
        self._misses.pop(address, None)

    def suspect_all(self, cards: Iterable[Card], now: float) -> None:
        """Doubt everybody after this machine slept; each ends with the first sign from after it."""
        for card in cards:
            if card.grpc_address not in self._failures:
                sign = Sign(card.node_id, card.incarnation)
                self._failures[card.grpc_address] = _Failure(now, sign)

    # --- what probes found

    def hold(self, address: str) -> None:
        """Let no sign of life end the doubt while it is being judged, lest it flap."""
        self._held.add(address)

    def settle(self, card: Card, sign: Sign, doubt: Doubt, now: float) -> bool:
        """Note a verdict; `sign` is the last that is held. Returns whether it is a new accusation.

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
            return before is None
        failure = self._failures.get(address)
        if failure is not None and doubt is Doubt.ASYMMETRIC:
            self._forget_verdict(address)
            self._failures[address] = replace(failure, doubt=doubt)
        return False

    def release(self, address: str) -> None:
        """End `hold`."""
        self._held.discard(address)

    # --- what was heard

    def hear(self, card: Card, *, beat: int = 0, lived_at: float | None = None) -> None:
        """Weigh a newer card, or a later beat of it, that came through others.

        `lived_at` is when its owner beat, by default the card's stamp. A sign from before the
        failure that came round a longer way says nothing.
        """
        address = self._accused.get(card.node_id, card.grpc_address)
        failure = self._failures.get(address)
        if failure is None or not (failure.sign is None or failure.is_of(card)):
            return  # who claims the address of another says nothing of that other
        is_moved = address != card.grpc_address
        is_restarted = failure.sign is not None and card.incarnation > failure.sign.incarnation > 0
        if is_moved or is_restarted:
            self.clear(address)
        elif (card.announced_at if lived_at is None else lived_at) > failure.since_at + SLACK_S:
            self._weigh_life(address, failure, sign_of(card, beat))
        elif failure.doubt is Doubt.FLEET_WIDE:
            # Others heard this sign too; an accusation that names an older one would not be heeded.
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


def _nobody(address: str) -> None:
    pass
