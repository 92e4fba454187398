"""The fleet as one node sees it: its own card, those of its peers, peers that do not answer.

A last-writer-wins map with one writer per key. Nothing here awaits, reads a clock or logs: `now`
is wall seconds, `mono` monotonic seconds, both given. Queries change nothing; an asyncio owner
calls the mutating methods between awaits only, so no lock is needed.

    own_card     `own_card.py`: announced and beaten here, never taken from gossip
    peers        `peers.py`: the newest valid card of each peer, by the total order of `cards.py`,
                 how long ago its owner lived, and which nodes are gone
    suspicions   `suspicion.py`: the peers that do not answer this node

`merging.py` takes cards and beats of other nodes into the first two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kakeya.core.errors import InvalidArgument
from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Card, CardTrust, Offer, is_valid_node_id
from kakeya.fleet.cards.cards import is_dialable as is_dialable_address
from kakeya.fleet.cards.convert import MAX_BATCH_CARDS
from kakeya.fleet.view import suspicion
from kakeya.fleet.view.beats import Beats, Floats, no_beats
from kakeya.fleet.view.card_table import CardIndex
from kakeya.fleet.view.conflicts import IdConflict
from kakeya.fleet.view.merging import Merger, MergeReport
from kakeya.fleet.view.own_card import PATIENCE_S, OwnCard
from kakeya.fleet.view.peers import Peers
from kakeya.fleet.view.slices import Slices, finish
from kakeya.fleet.view.suspicion import Suspicions
from kakeya.fleet.view.tombstones import REMEMBER_S, RegistryState, Sighting

__all__ = ["REMEMBER_S", "CapabilityRegistry", "MergeReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """Changes since the last round; `slept_s` 0 = this machine did not sleep."""

    gone: tuple[NodeId, ...]
    slept_s: float


class CapabilityRegistry:
    """Cards by node, the own one first.

    `incarnation` counts this node's starts; the caller keeps it on disk, one higher per start, and
    reads the property again after merges, which may raise it; `memory` is the value of `memory()`
    from an earlier life. `limit` bounds the cards. With `trust`, only signed cards and proven beats
    count. `entropy` draws secret bytes. Registries of one process may share an `index`. A process
    that meets its own id within `patience_s` of its start came second.
    """

    def __init__(
        self,
        node_id: str,
        offer: Offer,
        *,
        now: float,
        mono: float,
        incarnation: int = 1,
        memory: RegistryState | None = None,
        limit: int = MAX_BATCH_CARDS,
        trust: CardTrust | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        index: CardIndex | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if not is_valid_node_id(node_id):
            raise InvalidArgument(
                f"node id {node_id!r} must have 1 to 256 bytes, no control characters, no slashes",
                param="node_id",
            )
        memory = memory or RegistryState()
        self.node_id = NodeId(node_id)
        self.trust = trust
        self.own_card = OwnCard(
            self.node_id,
            offer,
            now=now,
            mono=mono,
            incarnation=max(incarnation, memory.incarnation + 1),
            stamp=memory.stamp,
            trust=trust,
            entropy=entropy,
            patience_s=patience_s,
        )
        self.peers = Peers(limit=limit, trust=trust, index=index or CardIndex())
        self._held = self.peers.held
        self._merger = Merger(self.own_card, self.peers, trust)
        for sighting in memory.peers:
            self.peers.remembered.add(sighting)
        self._looked = (now, mono)
        self._listeners: list[Callable[[], None]] = []

    @property
    def suspicions(self) -> Suspicions:
        """The peers that do not answer; times are those of the monotonic clock."""
        return self.peers.suspicions

    # --- the own card

    @property
    def own(self) -> Card:
        """The own card as last made."""
        return self.own_card.card

    @property
    def offer(self) -> Offer:
        """The offer that was last announced."""
        return self.own_card.offer

    @property
    def incarnation(self) -> int:
        """The count of this node's starts, or more if peers knew a higher one."""
        return self.own_card.incarnation

    @property
    def own_addresses(self) -> frozenset[str]:
        """Every address that this life announced."""
        return self.own_card.addresses

    def announce(self, offer: Offer, *, now: float, mono: float) -> Card:
        """Announce a new offer. Raises InvalidArgument for an offer that peers would drop."""
        return self.own_card.announce(offer, now=now, mono=mono)

    def restamp(self, *, now: float, mono: float) -> Card:
        """Announce the same offer in a new body."""
        return self.own_card.restamp(now=now, mono=mono)

    def beat(self, *, now: float, mono: float) -> None:
        """Show that this node lives; done before each exchange and each answer.

        Beats within a second are one.
        """
        self.own_card.beat(now=now, mono=mono, for_plain=self._held.has_plain)

    def refresh(self, *, now: float, mono: float) -> Card:
        """Beat, in a new body if the last one is old: the caller judges cards by their stamps."""
        self.own_card.beat(now=now, mono=mono, for_plain=True)
        return self.own_card.card

    def describe(self, *, now: float, mono: float) -> Card:
        """The own card, for a caller that asks for it alone and may judge it by its stamp.

        Peers ask every few seconds to see whether this node answers. Each new body would travel to
        the whole fleet, so a new one is made only once half of the TTL is over.
        """
        if self._held.has_plain or self.own_card.stamp_age_s(mono) > self.offer.ttl_s / 2:
            return self.refresh(now=now, mono=mono)
        self.own_card.beat(now=now, mono=mono)
        return self.own_card.card

    def farewell(self, *, now: float, mono: float) -> Card:
        """Announce the last card: no models, gone from all views in ten seconds; then silence."""
        return self.own_card.farewell(now=now, mono=mono)

    def give_way(self, *, now: float, mono: float) -> None:
        """Leave the fleet to the process that had this id first, and go on listening."""
        if not self.own_card.is_leaving:
            self.own_card.farewell(now=now, mono=mono)

    def come_back(self, *, now: float, mono: float) -> None:
        """Be a node of the fleet again after `give_way`: the other process is gone."""
        self.own_card.come_back(now=now, mono=mono)

    def accept_refusal(self, *, now: float, mono: float) -> bool:
        """Begin again at the wall clock when peers refuse this card because its stamp is ahead.

        A clock that was ahead and got repaired leaves stamps that peers refuse. No peer holds
        such a card, so a new incarnation may go back. Cards that this node refused meanwhile are
        looked at again. Returns whether the stamp was ahead.
        """
        if not self.own_card.runs_ahead(now):
            return False
        self.peers.unwanted.forgive()
        self.own_card.begin_anew(now=now, mono=mono)
        return True

    # --- the view

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Tell a listener of each change of `snapshot` and `suspects`; it must not raise.

        Cards that expire change the view when `expire` drops them.
        """
        self._listeners.append(listener)
        for part in (self.own_card, self._held, self.suspicions):
            part.on_change = self._changed

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def snapshot(self, *, mono: float) -> tuple[Card, ...]:
        """The own card, then those of all live peers by id."""
        live = self._held.lively(mono)
        live.sort(key=lambda card: card.node_id)
        return (self.own_card.card, *live)

    def live_peers(self, *, mono: float) -> Sequence[Card]:
        """The cards of all live peers, unordered; valid until the next change of the registry."""
        return self._held.living(mono)

    def get(self, node_id: str, *, mono: float) -> Card | None:
        """The card of one live node; the own card never expires for its owner."""
        if node_id == self.node_id:
            return self.own_card.card
        card = self._held.card(node_id)
        return card if card is not None and self._held.is_live(card, mono) else None

    def age_s(self, node_id: str, *, mono: float) -> float | None:
        """Seconds since a node lived, as best known; None = not held."""
        if node_id == self.node_id:
            return mono - self.own_card.beat_mono
        card = self._held.card(node_id)
        return None if card is None else mono - self._held.lived_mono(card)

    def ages(self, *, mono: float) -> Floats:
        """Seconds since each held peer lived, expired ones that were not yet dropped included."""
        return self._held.ages(mono)

    def __len__(self) -> int:
        return 1 + len(self._held)

    def remembered_addresses(self, now: float) -> tuple[str, ...]:
        """The addresses of peers that expired in the last 24 h."""
        return tuple(sorted({sighting.address for sighting in self.peers.remembered.at(now)}))

    def memory(self, *, now: float, mono: float) -> RegistryState:
        """The state to write to disk: own stamp and incarnation, addresses of peers."""
        live = [
            Sighting(card.node_id, card.grpc_address, now)
            for card in self._held.lively(mono)
            if is_dialable_address(card.grpc_address)
        ]
        return RegistryState(
            stamp=self.own_card.stamped_at,
            incarnation=self.own_card.incarnation,
            peers=(*self.peers.remembered.at(now), *live),
        )

    def conflicts(self, now: float) -> tuple[IdConflict, ...]:
        """Ids that two processes used in the last ten minutes; the own id first."""
        return self.peers.conflicts.fresh(now)

    # --- merging

    def merge(
        self, wires: Iterable[bytes], *, now: float, mono: float, beats: Beats | None = None
    ) -> MergeReport:
        """Take each card that is valid and newer than the held one, then the beats.

        A card without an entry in `beats` is as old as its stamp says. Refused cards are counted
        by fault.
        """
        return finish(self.merging(wires, beats or no_beats(), now=now, mono=mono))

    def merging(
        self, wires: Iterable[bytes], beats: Beats, *, now: float, mono: float
    ) -> Slices[MergeReport]:
        """Merge in slices of a few milliseconds; other merges may come between them."""
        return self._merger.merging(wires, beats, now=now, mono=mono)

    def begin_round(self, *, now: float, mono: float) -> RoundStart:
        """Drop expired cards; notice whether this machine slept."""
        slept_s = self.notice_sleep(now=now, mono=mono)
        return RoundStart(gone=self.expire(now=now, mono=mono), slept_s=slept_s)

    def notice_sleep(self, *, now: float, mono: float) -> float:
        """Suspect all peers if this machine slept since the last call; returns for how long.

        The monotonic clock of some systems stands still in sleep: then no card looks older, though
        no peer was heard. Each later beat clears its node. A wall clock that is set ahead looks
        the same, and costs as little.
        """
        last_at, last_mono = self._looked
        self._looked = (now, mono)
        slept_s = (now - last_at) - (mono - last_mono)
        if slept_s <= self.own_card.offer.ttl_s:
            return 0.0
        self._held.sleep(slept_s)
        self.suspect_all(mono=mono)
        return slept_s

    def hear(self, beats: Beats, *, now: float, mono: float) -> int:
        """Take beats of cards that are held; returns how many nodes beat anew."""
        return self.peers.hear(beats, now=now, mono=mono)

    def expire(self, *, now: float, mono: float) -> tuple[NodeId, ...]:
        """Drop expired cards, remember their addresses and last beats, forget old memories."""
        return self.peers.expire(now=now, mono=mono)

    def recheck(self, now: float, *, mono: float) -> tuple[NodeId, ...]:
        """Drop the cards that `trust` refuses since a revocation."""
        if self.trust is None:
            return ()
        fallen = [card for card in self._held if self.trust.fault_of(card, now) is not None]
        self.peers.drop(fallen, mono=mono)
        return tuple(card.node_id for card in fallen)

    def is_plain_at(self, address: str) -> bool:
        """Whether the node with this address knows only the original protocol."""
        card = self.peers.find(address)
        return card is not None and card.is_plain

    # --- peers that do not answer

    def mark_failed(self, peer: str, *, mono: float) -> None:
        """Suspect a peer (node id or address) that refused or broke a call."""
        card = self.peers.find(peer)
        self.suspicions.fail(card.grpc_address if card else peer, card, mono)

    def mark_missed(self, peer: str, *, mono: float) -> None:
        """Count a missed deadline of a peer; the second in a row makes it suspect."""
        card = self.peers.find(peer)
        self.suspicions.miss(card.grpc_address if card else peer, card, mono)

    def mark_alive(self, peer: str) -> None:
        """Take back all suspicion: the peer (node id or address) answered."""
        card = self.peers.find(peer)
        self.suspicions.clear(card.grpc_address if card else peer)

    def suspect_all(self, *, mono: float) -> None:
        """Suspect all peers: this machine slept, and no peer was heard meanwhile."""
        self.suspicions.suspect_all(self._held.lively(mono), mono)

    def is_suspect(self, peer: str) -> bool:
        """Whether new work should avoid a peer (node id or address)."""
        card = self.peers.find(peer)
        if card is not None and self.peers.is_hearsay(card):
            return True
        return self.suspicions.has(card.grpc_address if card else peer)

    def suspects(self) -> frozenset[NodeId]:
        """The nodes that placement should leave out.

        These are nodes that do not answer and, in a fleet with identities, nodes known from relays
        alone: such a node may be long gone.
        """
        has, is_hearsay = self.suspicions.has, self.peers.is_hearsay
        return frozenset(
            card.node_id for card in self._held if has(card.grpc_address) or is_hearsay(card)
        )

    def meet(self, node_id: str, address: str = "") -> None:
        """Note that a node called here, or answered at an address, under its own certificate."""
        self.peers.meet(NodeId(node_id), address)

    def miss(self, node_id: str, address: str) -> None:
        """Note that a node no longer answers at an address."""
        self.peers.contacts.missed(NodeId(node_id), address)

    def unmet(self, *, mono: float) -> tuple[Card, ...]:
        """Live nodes that offer a model and are known from relays alone."""
        return tuple(filter(self.peers.is_hearsay, self._held.lively(mono)))

    def met_at(self, address: str) -> NodeId | None:
        """The node that answered at an address under its own certificate and still claims it."""
        node_id = self.peers.contacts.at(address)
        card = None if node_id is None else self._held.card(node_id)
        return card.node_id if card is not None and address in card.addresses else None

    def node_at(self, address: str) -> str:
        """The node id behind an answer from an address; "" = not known.

        Without identities the node that claims the address is believed to be there.
        """
        if self.trust is not None:
            return self.met_at(address) or ""
        card = self.peers.find(address)
        return "" if card is None else card.node_id

    def is_accused(self, accusations: Iterable[suspicion.Sign]) -> bool:
        """Whether an accusation says that this node has not lived since its latest beat."""
        latest = suspicion.sign_of(self.own_card.card, self.own_card.number)
        mine = [sign for sign in accusations if sign.node_id == self.node_id]
        return any(not suspicion.is_refuted(sign, latest) for sign in mine)

    def sign_of(self, node_id: str) -> suspicion.Sign | None:
        """The latest sign of life of a node, the own included; None = not held."""
        if node_id == self.node_id:
            return suspicion.sign_of(self.own_card.card, self.own_card.number)
        card = self._held.card(node_id)
        return None if card is None else suspicion.sign_of(card, self._held.number(card))
