"""The fleet as one node sees it: its own card, everybody else's, and who does not answer.

A last-writer-wins map with one writer per key. Nothing here awaits, reads a clock or logs: `now`
is wall seconds, `mono` monotonic seconds, both given. Queries change nothing; an asyncio owner
calls the mutating methods between awaits only, so no lock is needed.

    own card     `own.py`: announced and beaten here, never taken from gossip
    peers        `held.py`: the newest valid card of each, by the total order of `cards.py`, and
                 how long ago its owner lived
    over         `memory.py`: where expired peers were, and how far they had come
    conflicts    `conflicts.py`: two processes with one id
    suspects     `suspicion.py`: who does not answer us
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kakeya.core.errors import InvalidArgument
from kakeya.core.ids import NodeId
from kakeya.fleet import suspicion
from kakeya.fleet.beats import MAX_BEATS, Beats, Floats, Keys, Told, no_beats
from kakeya.fleet.cards import Card, CardFault, CardTrust, Offer, fault_of, is_valid_node_id
from kakeya.fleet.cards import is_dialable as is_dialable_address
from kakeya.fleet.conflicts import Conflict, Conflicts
from kakeya.fleet.convert import MAX_BATCH_CARDS, MalformedCard, from_wire, scan_cards
from kakeya.fleet.held import CardIndex, HeldCards
from kakeya.fleet.memory import (
    REMEMBER_S,
    Memory,
    Remembered,
    Sighting,
    Tombstones,
    Unwanted,
)
from kakeya.fleet.own import OwnCard
from kakeya.fleet.suspicion import Suspicions

LATENCY_S = 5.0
"""How much younger than it was a beat may seem: the longest that an exchange takes."""
MANY_UNKNOWN = 8
"""Cards whose signatures are verified between two awaits: about a millisecond."""
MIN_SIGNED_BYTES = 300

__all__ = ["REMEMBER_S", "CapabilityRegistry", "MergeReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a batch of cards and beats did to the view.

    `beaten` counts the nodes that beat anew. `conflicts` are newly found addresses of other nodes
    that speak with our id. `has_own` says that the batch held a card of ours, `has_jumped` that it
    was an earlier life's and our incarnation went above.
    """

    changed: tuple[NodeId, ...] = ()
    dropped: Mapping[CardFault, int] = field(default_factory=dict)
    beaten: int = 0
    conflicts: tuple[str, ...] = ()
    has_own: bool = False
    has_jumped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """What happened since the last round; `slept_s` 0 = this machine did not sleep."""

    gone: tuple[NodeId, ...]
    slept_s: float


class CapabilityRegistry:
    """Cards by node, the own one first.

    `incarnation` counts this node's starts; the caller keeps it on disk, one higher per start, and
    looks at the property again after merges, which may raise it; `memory` is what `memory()` gave
    in an earlier life. `limit` bounds the cards. With `trust`, only signed cards and proven beats
    count. `entropy` draws secret bytes. Registries of one process may share an `index`.
    """

    def __init__(
        self,
        node_id: str,
        offer: Offer,
        *,
        now: float,
        mono: float,
        incarnation: int = 1,
        memory: Memory | None = None,
        limit: int = MAX_BATCH_CARDS,
        trust: CardTrust | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        index: CardIndex | None = None,
    ) -> None:
        if not is_valid_node_id(node_id):
            raise InvalidArgument(
                f"node id {node_id!r} must have 1 to 256 bytes, no control characters, no slashes",
                param="node_id",
            )
        memory = memory or Memory()
        self.node_id = NodeId(node_id)
        self.suspicions = Suspicions()
        self._limit = limit
        self._trust = trust
        self._own = OwnCard(
            self.node_id,
            offer,
            now=now,
            mono=mono,
            incarnation=max(incarnation, memory.incarnation + 1),
            stamp=memory.stamp,
            trust=trust,
            entropy=entropy,
        )
        self._held = HeldCards(index or CardIndex(), needs_proofs=trust is not None)
        self._remembered = Remembered(limit)
        for sighting in memory.peers:
            self._remembered.add(sighting)
        self._tombstones = Tombstones(limit)
        self._unwanted = Unwanted(2 * limit)
        self._conflicts = Conflicts()
        self._round_times: tuple[float, float] | None = None

    # --- the own card

    @property
    def own(self) -> Card:
        """The own card as last made."""
        return self._own.card

    @property
    def offer(self) -> Offer:
        """What was last announced."""
        return self._own.offer

    @property
    def incarnation(self) -> int:
        """Which start of this node this is, or higher if peers knew a higher one."""
        return self._own.incarnation

    @property
    def own_addresses(self) -> frozenset[str]:
        """Every address that this life announced."""
        return self._own.addresses

    def announce(self, offer: Offer, *, now: float, mono: float) -> Card:
        """Say something new of this node. Raises InvalidArgument for an offer peers would drop."""
        return self._own.announce(offer, now=now, mono=mono)

    def restamp(self, *, now: float, mono: float) -> Card:
        """Say the same again in a new body."""
        return self._own.restamp(now=now, mono=mono)

    def beat(self, *, now: float, mono: float, is_forced: bool = False) -> None:
        """Show that this node lives; done before each exchange and each answer.

        Beats within a second are one unless `is_forced`.
        """
        if is_forced:
            self._own.beat_anew(now=now, mono=mono)
        else:
            self._own.beat(now=now, mono=mono, for_plain=self._held.has_plain)

    def refresh(self, *, now: float, mono: float) -> Card:
        """Beat, in a new body if the last one is old: somebody asks who goes by its stamp."""
        self._own.beat(now=now, mono=mono, for_plain=True)
        return self._own.card

    def farewell(self, *, now: float, mono: float) -> Card:
        """Announce the last card: no models, gone from all views in ten seconds; then silence."""
        return self._own.farewell(now=now, mono=mono)

    def accept_refusal(self, *, now: float, mono: float) -> bool:
        """Begin anew at the wall clock when peers do not keep our card because it runs ahead.

        A clock that was ahead and got repaired leaves stamps that peers refuse; nobody holds
        them, so a new incarnation may go back. Returns whether that was the case.
        """
        if not self._own.runs_ahead(now):
            return False
        self._own.begin_anew(now=now, mono=mono)
        return True

    # --- the view

    def snapshot(self, *, mono: float) -> tuple[Card, ...]:
        """The own card, then those of all live peers by id."""
        live = self._held.lively(mono)
        live.sort(key=lambda card: card.node_id)
        return (self._own.card, *live)

    def get(self, node_id: str, *, mono: float) -> Card | None:
        """The card of one live node; the own card never expires for its owner."""
        if node_id == self.node_id:
            return self._own.card
        card = self._held.card(node_id)
        return card if card is not None and self._held.is_live(card, mono) else None

    def age_s(self, node_id: str, *, mono: float) -> float | None:
        """Seconds since a node lived, as best known; None = not held."""
        if node_id == self.node_id:
            return mono - self._own.beat_mono
        card = self._held.card(node_id)
        return None if card is None else mono - self._held.lived_mono(card)

    def ages(self, *, mono: float) -> Floats:
        """Seconds since each held peer lived, expired ones that were not yet dropped included."""
        return self._held.ages(mono)

    def __len__(self) -> int:
        return 1 + len(self._held)

    def live_addresses(self, *, mono: float) -> tuple[str, ...]:
        """Where live peers can be dialled; own addresses are left out."""
        addresses = {card.grpc_address for card in self._held.lively(mono)}
        return tuple(sorted(filter(is_dialable_address, addresses - self._own.addresses)))

    def remembered_addresses(self, now: float) -> tuple[str, ...]:
        """Where expired peers of the last 24 h were."""
        return tuple(sorted(sighting.address for sighting in self._remembered.at(now)))

    def memory(self, *, now: float, mono: float) -> Memory:
        """What to write to disk: the own order, and where everybody is or was."""
        live = [
            Sighting(card.node_id, card.grpc_address, now)
            for card in self._held.lively(mono)
            if is_dialable_address(card.grpc_address)
        ]
        return Memory(
            stamp=self._own.stamped_at,
            incarnation=self._own.incarnation,
            peers=(*self._remembered.at(now), *live),
        )

    def conflicts(self, now: float) -> tuple[Conflict, ...]:
        """Ids that two processes used in the last ten minutes; the own id first."""
        return self._conflicts.fresh(now)

    # --- merging

    def merge(
        self, wires: Iterable[bytes], *, now: float, mono: float, beats: Beats | None = None
    ) -> MergeReport:
        """Take each card that is valid and newer than what is held, then the beats.

        A card without an entry in `beats` is as old as its stamp says. Others are counted by fault.
        """
        beats = beats or no_beats()
        entries: dict[int, Told] | None = None
        changed: list[NodeId] = []
        dropped: Counter[CardFault] = Counter()
        own: list[tuple[Card, Told | None]] = []
        for wire in wires:
            card = self._held.index.card(wire)
            if card is not None and self._held.card(card.node_id) is card:
                continue
            try:
                card = card or from_wire(wire)
            except MalformedCard as failure:
                dropped[failure.fault] += 1
                self._unwanted.refuse(_key_of(wire), 0, mono)
                continue
            entries = beats.entries() if entries is None else entries
            told = entries.get(card.key)
            if card.node_id == self.node_id:
                own.append((card, told))
                continue
            fault = self._fault_of(card, told, now, mono)
            if fault is not None:
                dropped[fault] += 1
                self._unwanted.refuse(card.key, told.number if told else 0, mono)
            elif self._take(card, told, now, mono):
                changed.append(card.node_id)
        beaten = self.hear(beats, now=now, mono=mono)
        heard = [self._hear_own(card, told, now, mono) for card, told in own]
        has_jumped = any(
            self._own.jump_above(card, now) for card, is_other in heard if not is_other
        )
        if has_jumped:
            self._own.restamp(now=now, mono=mono)
        return MergeReport(
            changed=tuple(changed),
            dropped=dropped,
            beaten=beaten,
            conflicts=self._news_of_impostors([card for card, other in heard if other], now),
            has_own=bool(own),
            has_jumped=has_jumped,
        )

    def hear(self, beats: Beats, *, now: float, mono: float) -> int:
        """Take beats of cards that are held; returns how many nodes beat anew."""
        places = self._held.places(beats.keys)
        beaten = self._held.hear(beats, places, mono)
        for card in beaten:
            self._tell_book(card)
        for at in np.flatnonzero(places[: beats.told] < 0).tolist():
            self._hear_replaced(int(beats.keys[at]), beats.entry(at), now, mono)
        return len(beaten)

    def begin_round(self, *, now: float, mono: float) -> RoundStart:
        """Drop what expired, and doubt everybody if this machine slept since the last round.

        The monotonic clock of some systems stands still in sleep: then nobody looks older, though
        nobody was heard of. Each beat that is heard after it clears its node.
        """
        slept_s = 0.0
        if self._round_times is not None:
            last_at, last_mono = self._round_times
            slept_s = (now - last_at) - (mono - last_mono)
        self._round_times = (now, mono)
        has_slept = slept_s > self._own.offer.ttl_s
        if has_slept:
            self.suspect_all(mono=mono)
        gone = self.expire(now=now, mono=mono)
        return RoundStart(gone=gone, slept_s=slept_s if has_slept else 0.0)

    def expire(self, *, now: float, mono: float) -> tuple[NodeId, ...]:
        """Drop expired cards, remember where and how far they were, forget what is too old."""
        gone = self._held.expired(mono)
        for card in gone:
            lived_s = mono - self._held.lived_mono(card)
            self._tombstones.bury(card, self._held.number(card), mono)
            self._remembered.add(Sighting(card.node_id, card.grpc_address, now - lived_s))
            self._held.drop(card)
        self._remembered.forget_old(now)
        self._tombstones.forget_old(mono)
        in_reach = {card.grpc_address for card in self._held}
        self.suspicions.keep_only(in_reach.union(self.remembered_addresses(now)))
        return tuple(card.node_id for card in gone)

    def recheck(self, now: float, *, mono: float) -> tuple[NodeId, ...]:
        """Drop the cards that `trust` believes no more: somebody was revoked."""
        if self._trust is None:
            return ()
        fallen = [card for card in self._held if self._trust.fault_of(card, now) is not None]
        for card in fallen:
            self._unwanted.refuse(card.key, MAX_BEATS, mono)
            self._remembered.drop(card.grpc_address)
            self._held.drop(card)
        return tuple(card.node_id for card in fallen)

    def _fault_of(self, card: Card, told: Told | None, now: float, mono: float) -> CardFault | None:
        fault = fault_of(card, now, is_beating=told is not None)
        if fault is not None:
            return fault
        if told is not None and told.age_s > card.ttl_s:
            return CardFault.EXPIRED
        held = self._held.card(card.node_id)
        # Known members stay and are renewed; a flood of strangers finds no room.
        if held is None and len(self) >= self._limit:
            return CardFault.REGISTRY_FULL
        if self._trust is not None:
            fault = self._trust.fault_of(card, now)
            if fault is not None:
                return fault
        if held is None:
            is_proven = told is not None and self._held.proves(card, told)
            number = told.number if told is not None and is_proven else 0
            return CardFault.STALE if self._tombstones.holds_down(card, number, mono) else None
        return self._fault_of_rival(card, held, now, mono)

    def _fault_of_rival(self, card: Card, held: Card, now: float, mono: float) -> CardFault | None:
        is_rival = (
            card.incarnation == held.incarnation
            and card.life != held.life
            and card.grpc_address != held.grpc_address
            and self._held.is_live(held, mono)
        )
        if not is_rival:
            return None
        for side in (card, held):
            self._conflicts.note(card.node_id, side.grpc_address, is_own=False, now=now)
        return None if card.is_newer_than(held) else CardFault.CONFLICT

    def _take(self, card: Card, told: Told | None, now: float, mono: float) -> bool:
        held = self._held.card(card.node_id)
        if held is not None:
            if not card.is_newer_than(held):
                self._unwanted.replace(card, MAX_BEATS, mono)
                return False
            self._unwanted.replace(held, self._held.number(held), mono)
        age_s = max(0.0, now - card.announced_at) if told is None else told.age_s
        self._held.keep(card, age_s=age_s, mono=mono)
        self._tombstones.raise_up(card.node_id)
        self._remembered.drop(card.grpc_address)
        self._tell_book(card)
        return True

    def _tell_book(self, card: Card) -> None:
        book = self.suspicions
        if card.grpc_address in book or card.node_id in book:
            lived_mono = self._held.lived_mono(card)
            book.hear(card, beat=self._held.number(card), lived_at=lived_mono)

    def _hear_replaced(self, key: int, told: Told | None, now: float, mono: float) -> None:
        # An earlier life of a node is over once a new one was heard of; if it beats on, two
        # processes share the id.
        replaced = self._unwanted.replaced(key)
        if replaced is None or told is None or told.number <= replaced.number:
            return
        held = self._held.card(replaced.card.node_id)
        is_after = mono - told.age_s > replaced.since_mono
        if held is None or held.life == replaced.card.life or not is_after:
            return
        if self._held.proves(replaced.card, told):
            for side in (replaced.card, held):
                self._conflicts.note(side.node_id, side.grpc_address, is_own=False, now=now)

    # --- hearing of ourselves

    def _hear_own(
        self, card: Card, told: Told | None, now: float, mono: float
    ) -> tuple[Card, bool]:
        """The card and whether another process speaks by it, rather than an earlier life."""
        own = self._own
        if card.life == own.life or card.grpc_address in own.addresses:
            self._unwanted.refuse(card.key, MAX_BEATS, mono)
            return card, False
        if told is None:
            return card, card.announced_at > own.started_at
        return card, mono - told.age_s > own.started_mono + LATENCY_S

    def _news_of_impostors(self, cards: list[Card], now: float) -> tuple[str, ...]:
        note = self._conflicts.note
        addresses = dict.fromkeys(card.grpc_address for card in cards)
        return tuple(a for a in addresses if note(self.node_id, a, is_own=True, now=now))

    # --- for sync

    def beats(self, *, mono: float) -> Beats:
        """The own beat, then those of all live peers, the latest first."""
        return self._with_own(self._held.beats(mono), mono)

    def beats_of(self, cards: list[Card], *, mono: float) -> Beats:
        """The own beat, then those of these held cards."""
        return self._with_own(self._held.beats_of(cards, mono), mono)

    def cards_of(self, keys: Keys) -> list[Card]:
        """The cards with these keys, the own one included; keys of others are passed over."""
        own = self._own.card
        places = zip(keys.tolist(), self._held.places(keys).tolist(), strict=True)
        return [
            own if key == own.key else self._held.card_at(place)
            for key, place in places
            if key == own.key or place >= 0
        ]

    def unknown(self, beats: Beats, *, mono: float) -> Keys:
        """Keys of the cards to ask for: neither held nor looked at before."""
        wants, has_own = self._unwanted.wants, self._own.has_key
        missing = np.flatnonzero(self._held.places(beats.keys) < 0)
        keys, numbers = beats.keys[missing].tolist(), beats.numbers[missing].tolist()
        wanted = [
            key
            for key, number in zip(keys, numbers, strict=True)
            if not has_own(key) and wants(key, number, mono)
        ]
        return np.array(wanted, np.uint64)

    def verification(self, message: bytes, field: int) -> Callable[[], None] | None:
        """Signatures to be verified in a thread before many unknown cards are merged."""
        if self._trust is None or len(message) < MANY_UNKNOWN * MIN_SIGNED_BYTES:
            return None
        unknown = [w for w in scan_cards(message, field) if self._held.index.card(w) is None]
        return partial(self._trust.warm, unknown) if len(unknown) > MANY_UNKNOWN else None

    def is_plain_at(self, address: str) -> bool:
        """Whether the node with this address knows none of our extensions."""
        card = self._find(address)
        return card is not None and card.is_plain

    def _with_own(self, held: Beats, mono: float) -> Beats:
        own = self._own
        proofs = held.proofs
        if self._trust is not None:
            proofs = np.concatenate((np.array([own.proof], np.uint64), held.proofs))
        return Beats(
            np.concatenate((np.array([own.card.key], np.uint64), held.keys)),
            np.concatenate((np.array([own.number], np.uint32), held.numbers)),
            np.concatenate(([mono - own.beat_mono], held.ages_s)),
            proofs,
        )

    # --- who does not answer

    def mark_failed(self, peer: str, *, mono: float) -> None:
        """Suspect a peer (node id or address) that refused or broke a call."""
        card = self._find(peer)
        self.suspicions.fail(card.grpc_address if card else peer, card, mono)

    def mark_missed(self, peer: str, *, mono: float) -> None:
        """Count a missed deadline of a peer; the second in a row makes it suspect."""
        card = self._find(peer)
        self.suspicions.miss(card.grpc_address if card else peer, card, mono)

    def mark_alive(self, peer: str) -> None:
        """Take back all suspicion: the peer (node id or address) answered."""
        card = self._find(peer)
        self.suspicions.clear(card.grpc_address if card else peer)

    def suspect_all(self, *, mono: float) -> None:
        """Doubt everybody: this machine slept, and nobody was heard meanwhile."""
        self.suspicions.suspect_all(self._held.lively(mono), mono)

    def is_suspect(self, peer: str) -> bool:
        """Whether new work should avoid a peer (node id or address)."""
        card = self._find(peer)
        return self.suspicions.has(card.grpc_address if card else peer)

    def suspects(self) -> frozenset[NodeId]:
        """The nodes that placement should leave out."""
        has = self.suspicions.has
        return frozenset(card.node_id for card in self._held if has(card.grpc_address))

    def is_accused(self, accusations: Iterable[suspicion.Sign]) -> bool:
        """Whether this node is said not to have lived since its latest beat."""
        latest = suspicion.sign_of(self._own.card, self._own.number)
        mine = [sign for sign in accusations if sign.node_id == self.node_id]
        return any(not suspicion.is_refuted(sign, latest) for sign in mine)

    def sign_of(self, node_id: str) -> suspicion.Sign | None:
        """The latest sign of life of a node, the own included; None = not held."""
        if node_id == self.node_id:
            return suspicion.sign_of(self._own.card, self._own.number)
        card = self._held.card(node_id)
        return None if card is None else suspicion.sign_of(card, self._held.number(card))

    def _find(self, peer: str) -> Card | None:
        card = self._held.card(peer)
        if card is not None:
            return card
        return next((c for c in self._held if c.grpc_address == peer), None)


def _key_of(wire: bytes) -> int:
    return int.from_bytes(hashlib.sha256(wire).digest()[:8], "little")
