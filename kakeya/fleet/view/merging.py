"""Takes batches of cards and beats into a view, and finds in them claims about this node.

It holds no state: cards of peers go to `peers.py`, and a card of this node that another process
made, or that an earlier life left behind, goes to `own_card.py`. Nothing here awaits, reads a clock
or logs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Card, CardFault, CardTrust, is_liars, with_bounded_ttl
from kakeya.fleet.cards.convert import MalformedCard, from_wire
from kakeya.fleet.view.beats import MAX_BEATS, Beats, Told
from kakeya.fleet.view.own_card import OwnCard
from kakeya.fleet.view.peers import Peers
from kakeya.fleet.view.slices import Slices

SLICE_CARDS = 64
"""Cards that are read and judged between two pauses: 1 to 5 ms."""
LATENCY_S = 5.0
"""By how much a beat may seem too young: the longest time that an exchange takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """Effects of a batch of cards and beats on the view.

    `beaten` counts the nodes that beat anew, `clamped` the changed cards whose TTL was out of
    bounds. `conflicts` are newly found addresses of other
    processes that use this node's id. `has_own`: the batch held a card of this node. `has_jumped`:
    an earlier life or a rival that came later made it, and the incarnation was raised above it.
    """

    changed: tuple[NodeId, ...] = ()
    dropped: Mapping[CardFault, int] = field(default_factory=dict)
    beaten: int = 0
    clamped: int = 0
    conflicts: tuple[str, ...] = ()
    has_own: bool = False
    has_jumped: bool = False


class Merger:
    """Merges into the peers of one own card; with `trust`, only signed cards and proven beats."""

    def __init__(self, own_card: OwnCard, peers: Peers, trust: CardTrust | None) -> None:
        self._own_card = own_card
        self._peers = peers
        self._trust = trust

    def merging(
        self, wires: Iterable[bytes], beats: Beats, *, now: float, mono: float
    ) -> Slices[MergeReport]:
        """Take each card that is valid and newer than the held one, then the beats."""
        places: dict[int, int] | None = None
        changed: list[NodeId] = []
        clamped = 0
        dropped: Counter[CardFault] = Counter()
        own: list[tuple[Card, Told | None]] = []
        for count, card in enumerate(self._read(wires, dropped, mono), 1):
            if count % SLICE_CARDS == 0:
                yield
            places = beats.places() if places is None else places
            told = beats.entry(places.get(card.key, len(beats)))
            if card.node_id == self._own_card.node_id:
                taken: bool | CardFault = self._fault_of_own(card, now, mono) or False
                if not taken:
                    own.append((card, told))
            else:
                bounded = with_bounded_ttl(card)
                taken = self._peers.take(bounded, told, now=now, mono=mono)
                clamped += taken is True and bounded is not card
            if isinstance(taken, CardFault):
                dropped[taken] += 1
            elif taken:
                changed.append(card.node_id)
        beaten = self._peers.hear(beats, now=now, mono=mono)
        heard = [self._hear_own(card, told, now, mono) for card, told in own]
        conflicts = self._news_of_impostors([c for c, other in heard if other], now, mono)
        has_jumped = self._jump_above(heard, now, mono)
        return MergeReport(
            changed=tuple(changed),
            dropped=dropped,
            beaten=beaten,
            clamped=clamped,
            conflicts=conflicts,
            has_own=bool(own),
            has_jumped=has_jumped,
        )

    def _read(
        self, wires: Iterable[bytes], dropped: Counter[CardFault], mono: float
    ) -> Iterator[Card]:
        """The cards that are not held, up to the card that shows that a liar made the batch.

        In a fleet with identities no honest node passes on two cards of one node, nor forged ones.
        """
        met: set[NodeId] = set()
        for wire in wires:
            card, is_held = self._peers.known(wire)
            if is_held:
                continue
            if self._trust is not None and is_liars(dropped):
                return
            try:
                card = card or from_wire(wire)
            except MalformedCard as failure:
                dropped[failure.fault] += 1
                self._peers.unwanted.refuse(_key_of(wire), MAX_BEATS, mono)
                continue
            if self._trust is not None and card.node_id in met:
                dropped[CardFault.REPEATED] += 1
                continue
            met.add(card.node_id)
            yield card

    # --- claims about this node

    def _fault_of_own(self, card: Card, now: float, mono: float) -> CardFault | None:
        # A sender without the fleet's key must not fake a second process or an earlier life here.
        fault = None if self._trust is None else self._trust.fault_of(card, now)
        if fault is not None:
            self._peers.unwanted.refuse(card.key, MAX_BEATS, mono)
        return fault

    def _hear_own(
        self, card: Card, told: Told | None, now: float, mono: float
    ) -> tuple[Card, bool]:
        """The card, and whether another living process made it rather than an earlier life."""
        own = self._own_card
        if card.life == own.life or card.grpc_address in own.addresses:
            self._peers.unwanted.refuse(card.key, MAX_BEATS, mono)
            return card, False
        if own.has_jumped(card.life) and card.is_newer_than(own.card):
            return card, True  # it answered a card of this life
        if told is None or not self._is_vouched_for(card, told):
            return card, card.announced_at > own.started_at
        return card, mono - told.age_s > own.started_mono + LATENCY_S

    def _is_vouched_for(self, card: Card, told: Told) -> bool:
        # Any relay can claim any age; only the owner can make a beat after the card itself.
        if self._trust is None:
            return True
        return told.number > 0 and self._peers.held.proves(card, told)

    def _news_of_impostors(self, cards: list[Card], now: float, mono: float) -> tuple[str, ...]:
        own, note = self._own_card, self._peers.conflicts.note
        found: dict[str, bool] = {}
        for card in cards:
            is_first = not card.is_leaving and own.is_second_to(card, mono=mono)
            found[card.grpc_address] = is_first or found.get(card.grpc_address, False)
        return tuple(
            address
            for address, is_first in found.items()
            if note(own.node_id, address, is_own=True, is_first=is_first, now=now)
        )

    def _jump_above(self, heard: list[tuple[Card, bool]], now: float, mono: float) -> bool:
        """Order above earlier lives, and above rivals that came later; returns whether it did."""
        own, has_jumped = self._own_card, False
        if own.is_leaving:
            return False
        for card, is_other in heard:
            is_rival = is_other and not card.is_leaving
            if not (is_rival and own.is_second_to(card, mono=mono)):
                has_jumped |= own.jump_above(card, now, is_living=is_rival)
        if has_jumped:
            own.restamp(now=now, mono=mono)
        return has_jumped


def _key_of(wire: bytes) -> int:
    return int.from_bytes(hashlib.sha256(wire).digest()[:8], "little")
