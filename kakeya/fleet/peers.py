"""Everybody else, as one node sees them: which cards are taken, which are over, which are doubted.

Decides on each card and beat that the registry is told of; `held.py` stores what is taken,
`memory.py` what is over. Never looks at the own card.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kakeya.core.ids import NodeId
from kakeya.fleet.beats import MAX_BEATS, Beats, Keys, Told
from kakeya.fleet.cards import Card, CardFault, CardTrust, fault_of
from kakeya.fleet.conflicts import Conflicts
from kakeya.fleet.held import CardIndex, HeldCards
from kakeya.fleet.memory import Remembered, Sighting, Tombstones, Unwanted
from kakeya.fleet.suspicion import Suspicions

_MENDED_BY_BEATS = (CardFault.EXPIRED, CardFault.STALE, CardFault.FUTURE)
"""Why a card is refused that would be taken with a later beat, or with any."""
_MAX_PROOFS = 16
"""Of beats of replaced cards that one message may cost, each up to 512 hashes."""


class Peers:
    """The newest valid card of each other node, at most `limit` of them."""

    def __init__(self, *, limit: int, trust: CardTrust | None, index: CardIndex) -> None:
        self.held = HeldCards(index, needs_proofs=trust is not None)
        self.remembered = Remembered(limit)
        self.unwanted = Unwanted(2 * limit)
        self.conflicts = Conflicts()
        self.suspicions = Suspicions()
        self._tombstones = Tombstones(limit)
        self._limit = limit
        self._trust = trust

    def known(self, wire: bytes) -> tuple[Card | None, bool]:
        """The card with these bytes if it was read before, and whether it is the one held."""
        card = self.held.index.card(wire)
        return card, card is not None and self.held.card(card.node_id) is card

    def find(self, peer: str) -> Card | None:
        """The card of a node, by id or by address."""
        card = self.held.card(peer)
        if card is not None:
            return card
        return next((card for card in self.held if card.grpc_address == peer), None)

    # --- cards

    def take(self, card: Card, told: Told | None, *, now: float, mono: float) -> bool | CardFault:
        """Keep a card that is valid and newer than what is held; returns whether it was, or why
        not. `told` is the beat that came with it."""
        fault = self._fault_of(card, told, now, mono)
        if fault is not None:
            told_number = told.number if told else -1
            self.unwanted.refuse(
                card.key, told_number if fault in _MENDED_BY_BEATS else MAX_BEATS, mono
            )
            return fault
        held = self.held.card(card.node_id)
        if held is not None and not card.is_newer_than(held):
            if self.unwanted.replaced(card.key) is None:
                self.unwanted.replace(card, told.number if told else MAX_BEATS, mono)
            return False
        if held is not None:
            self.unwanted.replace(held, self.held.number(held), mono)
        age_s = max(0.0, now - card.announced_at) if told is None else told.age_s
        self.held.keep(card, age_s=age_s, mono=mono)
        self._tombstones.raise_up(card.node_id)
        self.remembered.drop(card.grpc_address)
        self._tell_book(card)
        return True

    def _fault_of(self, card: Card, told: Told | None, now: float, mono: float) -> CardFault | None:
        fault = fault_of(card, now, is_beating=told is not None)
        if fault is not None:
            return fault
        if told is not None and told.age_s > card.ttl_s:
            return CardFault.EXPIRED
        held = self.held.card(card.node_id)
        # Known members stay and are renewed; a flood of strangers finds no room.
        if held is None and len(self.held) >= self._limit - 1:
            return CardFault.REGISTRY_FULL
        # Signatures cost most, so they are looked at last.
        if self._trust is not None:
            fault = self._trust.fault_of(card, now)
            if fault is not None:
                return fault
        if held is not None:
            return self._fault_of_rival(card, held, now, mono)
        if not self._tombstones.holds_down(card, 0, mono):
            return None
        # Only now: a proof is up to 512 hashes, and a node that starts hears of everybody at once.
        is_proven = told is not None and self.held.proves(card, told)
        number = told.number if told is not None and is_proven else 0
        return CardFault.STALE if self._tombstones.holds_down(card, number, mono) else None

    def _fault_of_rival(self, card: Card, held: Card, now: float, mono: float) -> CardFault | None:
        is_rival = (
            card.incarnation == held.incarnation
            and card.life != held.life
            and card.grpc_address != held.grpc_address
            and self.held.is_live(held, mono)
        )
        if not is_rival:
            return None
        self._note_conflict(card, held, now)
        return None if card.is_newer_than(held) else CardFault.CONFLICT

    def _note_conflict(self, one: Card, other: Card, now: float) -> None:
        for side in (one, other):
            self.conflicts.note(side.node_id, side.grpc_address, is_own=False, now=now)

    # --- beats

    def hear(self, beats: Beats, *, now: float, mono: float) -> int:
        """Take beats of cards that are held; returns how many nodes beat anew."""
        places = self.held.places(beats.keys)
        beaten = self.held.hear(beats, places, mono)
        for card in beaten:
            self._tell_book(card)
        proofs = 0
        for at in np.flatnonzero(places[: beats.told] < 0).tolist():
            told = beats.entry(at)
            rivals = None if told is None else self._rivals(int(beats.keys[at]), told, mono)
            if told is not None and rivals is not None and proofs < _MAX_PROOFS:
                proofs += 1
                if self.held.proves(rivals[0], told):
                    self._note_conflict(*rivals, now)
        return len(beaten)

    def _rivals(self, key: int, told: Told, mono: float) -> tuple[Card, Card] | None:
        """A replaced card that is said to beat on, and the one that replaced it.

        An earlier life of a node is over once a new one was heard of; if it beats on, two
        processes share the id.
        """
        replaced = self.unwanted.replaced(key)
        if replaced is None or told.number <= replaced.number:
            return None
        held = self.held.card(replaced.card.node_id)
        is_after = mono - told.age_s > replaced.since_mono
        if held is None or held.life == replaced.card.life or not is_after:
            return None
        return replaced.card, held

    def _tell_book(self, card: Card) -> None:
        book = self.suspicions
        if card.grpc_address in book or card.node_id in book:
            lived_mono = self.held.lived_mono(card)
            book.hear(card, beat=self.held.number(card), lived_at=lived_mono)

    def unknown(self, beats: Beats, *, mono: float) -> Keys:
        """Keys of the cards to ask for: neither held nor looked at before."""
        wants = self.unwanted.wants
        missing = np.flatnonzero(self.held.places(beats.keys) < 0)
        keys, numbers = beats.keys[missing].tolist(), beats.numbers[missing].tolist()
        return np.array(
            [k for k, number in zip(keys, numbers, strict=True) if wants(k, number, mono)],
            np.uint64,
        )

    # --- the end

    def expire(self, *, now: float, mono: float) -> tuple[NodeId, ...]:
        """Drop expired cards, remember where and how far they were, forget what is too old."""
        gone = self.held.expired(mono)
        for card in gone:
            lived_s = mono - self.held.lived_mono(card)
            self._tombstones.bury(card, self.held.number(card), mono)
            self.remembered.add(Sighting(card.node_id, card.grpc_address, now - lived_s))
            self.held.drop(card)
        self.remembered.forget_old(now)
        self._tombstones.forget_old(mono)
        in_reach = {card.grpc_address for card in self.held}
        in_reach.update(sighting.address for sighting in self.remembered.at(now))
        self.suspicions.keep_only(in_reach)
        return tuple(card.node_id for card in gone)

    def drop(self, cards: Iterable[Card], *, mono: float) -> None:
        """Drop cards that are trusted no more, and remember nothing of them."""
        for card in cards:
            self.unwanted.refuse(card.key, MAX_BEATS, mono)
            self.remembered.drop(card.grpc_address)
            self.held.drop(card)
