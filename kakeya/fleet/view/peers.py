"""The peers as one node sees them: cards that are kept, nodes that are gone, nodes in doubt.

Decides on each card and beat that reaches the registry; `card_table.py` stores the kept cards,
`tombstones.py` the nodes that are gone. Never looks at the own card.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Card, CardFault, CardTrust, fault_of
from kakeya.fleet.view.beats import MAX_BEATS, Beats, Keys, Told
from kakeya.fleet.view.card_table import MAX_STEPS, CardIndex, CardTable
from kakeya.fleet.view.conflicts import Conflicts
from kakeya.fleet.view.contacts import FirstHandContacts
from kakeya.fleet.view.keys import Places
from kakeya.fleet.view.suspicion import Suspicions
from kakeya.fleet.view.tombstones import Remembered, Replaced, Sighting, Tombstones, Unwanted

_MENDED_BY_BEATS = (CardFault.EXPIRED, CardFault.STALE, CardFault.FUTURE)
"""Faults of a card that a later beat, or any beat, would mend. A relay can claim any age and number
of a beat, so such a refusal does not hold back a later beat; a tombstone remembers only the last
proven beat of a node that is gone."""
_MAX_PROOFS = 16
"""Proofs of beats of replaced cards that one message may cost, each up to 512 hashes."""


class Peers:
    """The newest valid card of each other node, at most `limit` of them."""

    def __init__(self, *, limit: int, trust: CardTrust | None, index: CardIndex) -> None:
        self.held = CardTable(index, needs_proofs=trust is not None)
        self.remembered = Remembered(limit)
        self.unwanted = Unwanted(2 * limit)
        self.conflicts = Conflicts()
        self.suspicions = Suspicions()
        self.contacts = FirstHandContacts()
        self._tombstones = Tombstones(limit)
        self._limit = limit
        self._trust = trust
        self._proving_mono, self._steps_left = float("-inf"), 0

    def known(self, wire: bytes) -> tuple[Card | None, bool]:
        """The card with these bytes if it was read before, and whether it is the one held."""
        card = self.held.index.card(wire)
        return card, card is not None and self.held.card(card.node_id) is card

    def find(self, peer: str) -> Card | None:
        """The card of a node, by id or by address."""
        return self.held.card(peer) or self.held.card_with(peer)

    # --- first-hand contacts

    def is_hearsay(self, card: Card) -> bool:
        """Whether a held card offers models and only relays vouch for its node."""
        return bool(card.models) and self._trust is not None and not self.contacts.has(card.node_id)

    def meet(self, node_id: NodeId, address: str = "") -> None:
        """Note that a held node called here, or answered at an address."""
        if self._trust is None or self.held.card(node_id) is None:
            return
        is_first = not self.contacts.has(node_id)
        if address:
            self.contacts.answered(node_id, address)
        else:
            self.contacts.met(node_id)
        if is_first:
            self.held.on_change()  # it may have been hearsay, and so a suspect

    # --- cards

    def take(self, card: Card, told: Told | None, *, now: float, mono: float) -> bool | CardFault:
        """Keep a card that is valid and newer than the held one; returns whether it was newer, or
        the fault. `told` is the beat that came with the card."""
        fault = self._fault_of(card, told, now, mono)
        if fault is not None:
            if fault not in _MENDED_BY_BEATS:
                self.unwanted.refuse(card.key, MAX_BEATS, mono)
            return fault
        held = self.held.card(card.node_id)
        if held is not None and not _replaces(card, held):
            if self.unwanted.replaced(card.key) is None:
                self.unwanted.replace(card, told.number if told else MAX_BEATS, mono)
            if card.is_leaving and card.life != held.life:
                self._tombstones.bury(card, MAX_BEATS, mono)
            return False
        if held is not None:
            self._replace(held, card, now, mono)
        age_s = max(0.0, now - card.announced_at) if told is None else told.age_s
        self.held.keep(card, age_s=age_s, mono=mono)
        self._tombstones.raise_up(card)
        if card.is_leaving:
            self.unwanted.reopen(card, mono)
        self.remembered.drop(card.node_id)
        self._tell_suspicions(card)
        if self.is_hearsay(card):
            self.suspicions.look_at(card.grpc_address)
        return True

    def _replace(self, held: Card, card: Card, now: float, mono: float) -> None:
        """Let go of the held card for another one of its node."""
        number = self.held.number(held)
        self.unwanted.replace(held, number, mono)
        if held.life == card.life:
            return
        if self._tombstones.has(card) and not held.is_leaving and self.held.is_live(held, mono):
            # A start draws a new life: one that comes back above another lived on beside it.
            self._note_conflict(card, held, now)
        self._tombstones.bury(held, number, mono)

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
        if held is not None and (card.life == held.life or not held.is_leaving):
            return self._fault_of_rival(card, held, now, mono)
        if not self._tombstones.holds_down(card, 0, mono):
            return None
        number = 0 if told is None else self._proven_number(card, told, mono)
        if not self._tombstones.holds_down(card, number, mono):
            return None
        self.unwanted.refuse(card.key, number, mono)
        return CardFault.STALE

    def _proven_number(self, card: Card, told: Told, mono: float) -> int:
        # A proof is up to 512 hashes, and messages can name thousands that are over.
        if mono - self._proving_mono >= 1.0:
            self._proving_mono, self._steps_left = mono, MAX_STEPS
        if told.number > self._steps_left:
            return 0
        self._steps_left -= told.number
        return told.number if self.held.proves(card, told) else 0

    def _fault_of_rival(self, card: Card, held: Card, now: float, mono: float) -> CardFault | None:
        is_rival = (
            card.incarnation == held.incarnation
            and card.life != held.life
            and card.grpc_address != held.grpc_address
            and not card.is_leaving
            and self.held.is_live(held, mono)
        )
        if not is_rival:
            return None
        self._note_conflict(card, held, now)
        return None if card.is_newer_than(held) else CardFault.CONFLICT

    def _note_conflict(self, one: Card | Replaced, other: Card, now: float) -> None:
        for side in (one, other):
            self.conflicts.note(side.node_id, side.grpc_address, is_own=False, now=now)

    # --- beats

    def hear(self, beats: Beats, *, now: float, mono: float) -> int:
        """Take beats of cards that are held; returns how many nodes beat anew."""
        places = self.held.places(beats.keys)
        beaten = self.held.hear(beats, places, mono)
        if not self.suspicions.is_empty:
            for slot in beaten.tolist():
                self._tell_suspicions(self.held.card_at(slot))
        proofs = 0
        others = (places[: beats.told] < 0).nonzero()[0]
        for at, key in zip(others.tolist(), beats.keys[others].tolist(), strict=True):
            if self.unwanted.replaced(key) is None:
                continue
            told = beats.entry(at)
            rivals = None if told is None else self._rivals(key, told, mono)
            if told is not None and rivals is not None and proofs < _MAX_PROOFS:
                proofs += 1
                if self.held.proves(rivals[0], told):
                    self._note_conflict(*rivals, now)
        return len(beaten)

    def _rivals(self, key: int, told: Told, mono: float) -> tuple[Replaced, Card] | None:
        """A replaced card that seems to beat on, and the card that replaced it.

        A new life of a node ends the earlier one; if the earlier one beats on, two processes share
        the id.
        """
        replaced = self.unwanted.replaced(key)
        if replaced is None or told.number <= replaced.number:
            return None
        held = self.held.card(replaced.node_id)
        is_after = mono - told.age_s > replaced.since_mono
        if held is None or held.life == replaced.life or not is_after:
            return None
        return replaced, held

    def _tell_suspicions(self, card: Card) -> None:
        suspicions = self.suspicions
        if card.grpc_address in suspicions or card.node_id in suspicions:
            lived_mono = self.held.lived_mono(card)
            suspicions.hear(card, beat=self.held.number(card), lived_at=lived_mono)

    def unknown(self, beats: Beats, places: Places, *, mono: float) -> Keys:
        """Keys of the cards to ask for: neither held (by `places`) nor looked at before."""
        wants = self.unwanted.wants
        missing = (places < 0).nonzero()[0]
        keys, numbers = beats.keys[missing].tolist(), beats.numbers[missing].tolist()
        return np.array(
            [k for k, number in zip(keys, numbers, strict=True) if wants(k, number, mono)],
            np.uint64,
        )

    # --- the end

    def expire(self, *, now: float, mono: float) -> tuple[NodeId, ...]:
        """Drop expired cards, remember their addresses and last beats, forget old memories."""
        gone = self.held.expired(mono)
        for card in gone:
            lived_s = mono - self.held.lived_mono(card)
            self._tombstones.bury(card, self.held.number(card), mono)
            self.unwanted.reopen(card, mono)
            self.remembered.add(Sighting(card.node_id, card.grpc_address, now - lived_s))
            self._let_go(card)
        self.remembered.forget_old(now)
        self._tombstones.forget_old(mono)
        if not self.suspicions.is_empty:
            in_reach = {card.grpc_address for card in self.held}
            in_reach.update(sighting.address for sighting in self.remembered.at(now))
            self.suspicions.keep_only(in_reach)
        return tuple(card.node_id for card in gone)

    def drop(self, cards: Iterable[Card], *, mono: float) -> None:
        """Drop cards that lost their trust, and remember nothing of them."""
        for card in cards:
            self.unwanted.refuse(card.key, MAX_BEATS, mono)
            self.remembered.drop(card.node_id)
            self._let_go(card)

    def _let_go(self, card: Card) -> None:
        self.contacts.forget(card.node_id)
        self.held.drop(card)


def _replaces(card: Card, held: Card) -> bool:
    """Whether a card takes the place of the held one: a life that ended keeps none from another."""
    if card.life != held.life and card.is_leaving != held.is_leaving:
        return held.is_leaving
    return card.is_newer_than(held)
