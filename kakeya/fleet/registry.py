"""The fleet as one node sees it: its own card, everybody else's, and who does not answer.

A last-writer-wins map with one writer per key. Nothing here awaits, reads a clock or logs: `now`
is wall seconds, `mono` monotonic seconds, both given. Queries change nothing; an asyncio owner
calls the mutating methods between awaits only, so no lock is needed.

    own card     announced and restamped here, never taken from gossip
    peers        the newest valid card of each, by the total order of `cards.py`
    remembered   addresses of expired cards, dialled again for 24 h so that partitions heal
    suspects     addresses that failed us; local knowledge, never gossiped
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kakeya.core.errors import InvalidArgument
from kakeya.core.ids import NodeId
from kakeya.fleet.cards import (
    FAREWELL_TTL_S,
    MAX_AHEAD_S,
    MAX_INCARNATION,
    Card,
    CardFault,
    Offer,
    fault_of,
    is_dialable,
    is_valid_node_id,
)
from kakeya.fleet.convert import MAX_BATCH_CARDS, MalformedCard, from_wire, to_wire
from kakeya.fleet.suspicion import Suspicions

REMEMBER_S = 24 * 3600.0
"""How long an expired peer's address is dialled again: a night or a day without power."""
MAX_JUMP_S = 24 * 3600.0
"""How far above our own clock an earlier life of ours is believed to have been."""
_STEP_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a batch of cards did to the view.

    `conflicts` are addresses of other nodes that speak with our id. `has_own` says that the batch
    held a card of ours, `has_jumped` that it was an earlier life's and our incarnation went above.
    """

    changed: tuple[NodeId, ...] = ()
    dropped: Mapping[CardFault, int]
    conflicts: tuple[str, ...] = ()
    has_own: bool = False
    has_jumped: bool = False


class CapabilityRegistry:
    """Cards by node, the own one first.

    `incarnation` counts this node's starts; the caller keeps it on disk, one higher per start,
    and looks at the attribute again after merges, which may raise it. `limit` bounds the cards.
    """

    def __init__(
        self,
        node_id: str,
        offer: Offer,
        *,
        now: float,
        mono: float,
        incarnation: int = 1,
        limit: int = MAX_BATCH_CARDS,
    ) -> None:
        if not is_valid_node_id(node_id):
            raise InvalidArgument(
                f"node id {node_id!r} must have 1 to 256 bytes, no control characters, no slashes",
                param="node_id",
            )
        self.node_id = NodeId(node_id)
        self.incarnation = incarnation
        self._limit = limit
        self._started_at = now
        self._stamped_at, self._stamped_mono = 0.0, mono
        self._own_addresses: set[str] = set()
        self._peers: dict[NodeId, Card] = {}
        self._known_bytes: set[bytes] = set()
        self._remembered: dict[str, float] = {}
        self._suspicions = Suspicions()
        self._own = self._stamp(offer, now=now, mono=mono)
        self._offer = offer

    # --- the own card

    def announce(self, offer: Offer, *, now: float, mono: float) -> Card:
        """Say something new of this node. Raises InvalidArgument for an offer peers would drop."""
        self._own = self._stamp(offer, now=now, mono=mono)
        self._offer = offer
        return self._own

    def restamp(self, *, now: float, mono: float) -> Card:
        """Say the same again, fresh; done before each exchange and each answer."""
        return self.announce(self._offer, now=now, mono=mono)

    def farewell(self, *, now: float, mono: float) -> Card:
        """Announce the last card: no models, and gone from all views in ten seconds."""
        return self.announce(
            replace(self._offer, models=(), ttl_s=FAREWELL_TTL_S), now=now, mono=mono
        )

    def accept_refusal(self, *, now: float, mono: float) -> bool:
        """Begin anew at the wall clock when peers do not keep our card because it runs ahead.

        A clock that was ahead and got repaired leaves stamps that peers refuse; nobody holds
        them, so a new incarnation may go back. Returns whether that was the case.
        """
        if self._stamped_at <= now + MAX_AHEAD_S:
            return False
        self.incarnation += 1
        self._stamped_at, self._stamped_mono = 0.0, mono
        self.restamp(now=now, mono=mono)
        return True

    def _stamp(self, offer: Offer, *, now: float, mono: float) -> Card:
        # Stamps go on at the pace of the monotonic clock at least, so a wall clock that was set
        # back neither repeats a stamp nor lets the card age out at the peers.
        elapsed_s = max(mono - self._stamped_mono, _STEP_S)
        announced_at = max(now, self._stamped_at + elapsed_s)
        wire = to_wire(self.node_id, offer, incarnation=self.incarnation, announced_at=announced_at)
        try:
            card = from_wire(wire)
            fault = fault_of(card, announced_at)
        except MalformedCard as failure:
            fault = failure.fault
        if fault is not None:
            raise InvalidArgument(
                f"the own card would be dropped by every peer as {fault}: {offer!r}"
            )
        self._stamped_at, self._stamped_mono = announced_at, mono
        self._own_addresses.add(offer.grpc_address)
        return card

    # --- the view

    @property
    def own(self) -> Card:
        """The own card as last stamped."""
        return self._own

    @property
    def offer(self) -> Offer:
        """What was last announced."""
        return self._offer

    def snapshot(self, now: float) -> tuple[Card, ...]:
        """The own card, then all unexpired peers by id."""
        live = [card for card in self._peers.values() if not card.is_expired(now)]
        live.sort(key=lambda card: card.node_id)
        return (self._own, *live)

    def get(self, node_id: str, now: float) -> Card | None:
        """The unexpired card of one node; the own card never expires for its owner."""
        if node_id == self.node_id:
            return self._own
        card = self._peers.get(NodeId(node_id))
        return None if card is None or card.is_expired(now) else card

    def __len__(self) -> int:
        return 1 + len(self._peers)

    def live_addresses(self, now: float) -> tuple[str, ...]:
        """Where unexpired peers can be dialled; own addresses are left out."""
        addresses = {card.grpc_address for card in self._peers.values() if not card.is_expired(now)}
        return tuple(sorted(filter(is_dialable, addresses - self._own_addresses)))

    def remembered_addresses(self, now: float) -> tuple[str, ...]:
        """Where expired peers of the last 24 h were."""
        return tuple(
            sorted(a for a, since_at in self._remembered.items() if now - since_at <= REMEMBER_S)
        )

    @property
    def own_addresses(self) -> frozenset[str]:
        """Every address that this life announced."""
        return frozenset(self._own_addresses)

    # --- merging

    def merge(self, wires: Iterable[bytes], now: float) -> MergeReport:
        """Take each card that is valid and newer than what is held; count the others by fault."""
        changed: list[NodeId] = []
        dropped: Counter[CardFault] = Counter()
        own: list[Card] = []
        known = self._known_bytes
        for wire in wires:
            if wire in known:
                continue
            try:
                card = from_wire(wire)
            except MalformedCard as failure:
                dropped[failure.fault] += 1
                continue
            if card.node_id == self.node_id:
                own.append(card)
                continue
            held = self._peers.get(card.node_id)
            fault = fault_of(card, now) or self._fault_of_room(held)
            if fault is not None:
                dropped[fault] += 1
            elif held is None or card.is_newer_than(held):
                self._keep(card, held)
                changed.append(card.node_id)
        jumps = [self._jump_above(card, now) for card in own]
        return MergeReport(
            changed=tuple(changed),
            dropped=dropped,
            conflicts=tuple(card.grpc_address for card in own if self._is_impostor(card)),
            has_own=bool(own),
            has_jumped=True in jumps,
        )

    def expire(self, now: float) -> tuple[NodeId, ...]:
        """Drop expired cards, remember where they were, forget what was remembered too long."""
        gone = tuple(node_id for node_id, card in self._peers.items() if card.is_expired(now))
        for node_id in gone:
            card = self._peers.pop(node_id)
            self._known_bytes.discard(card.wire)
            if is_dialable(card.grpc_address) and len(self._remembered) < self._limit:
                self._remembered[card.grpc_address] = now
        for address in [a for a, at in self._remembered.items() if now - at > REMEMBER_S]:
            del self._remembered[address]
        in_reach = {card.grpc_address for card in self._peers.values()}
        self._suspicions.keep_only(in_reach.union(self._remembered))
        return gone

    def _fault_of_room(self, held: Card | None) -> CardFault | None:
        # Known members stay and are renewed; a flood of strangers finds no room.
        return CardFault.REGISTRY_FULL if held is None and len(self) >= self._limit else None

    def _keep(self, card: Card, held: Card | None) -> None:
        if held is not None:
            self._known_bytes.discard(held.wire)
        self._peers[card.node_id] = card
        self._known_bytes.add(card.wire)
        self._remembered.pop(card.grpc_address, None)
        self._suspicions.hear(card)

    def _is_impostor(self, card: Card) -> bool:
        # An earlier life of ours may have had another address; it was not stamped in this life.
        return card.grpc_address not in self._own_addresses and card.announced_at > self._started_at

    def _jump_above(self, card: Card, now: float) -> bool:
        is_countable = math.isfinite(card.announced_at) and card.incarnation < MAX_INCARNATION - 1
        if not is_countable or self._is_impostor(card) or not card.is_newer_than(self._own):
            return False
        self.incarnation = max(self.incarnation, card.incarnation + 1)
        # Peers that hold that card live by a clock that is ahead of ours; to be live for them the
        # stamp must go on from there. `accept_refusal` undoes it if they do not.
        if card.announced_at < now + MAX_JUMP_S:
            self._stamped_at = max(self._stamped_at, card.announced_at)
        return True

    # --- who does not answer

    def mark_failed(self, peer: str, now: float) -> None:
        """Suspect a peer (node id or address) that refused or broke a call."""
        card = self._find(peer)
        self._suspicions.fail(card.grpc_address if card else peer, card, now)

    def mark_missed(self, peer: str, now: float) -> None:
        """Count a missed deadline of a peer; the second in a row makes it suspect."""
        card = self._find(peer)
        self._suspicions.miss(card.grpc_address if card else peer, card, now)

    def mark_alive(self, peer: str) -> None:
        """Take back all suspicion: the peer (node id or address) answered."""
        card = self._find(peer)
        self._suspicions.clear(card.grpc_address if card else peer)

    def is_suspect(self, peer: str) -> bool:
        """Whether new work should avoid a peer (node id or address)."""
        card = self._find(peer)
        return self._suspicions.has(card.grpc_address if card else peer)

    def suspects(self) -> frozenset[NodeId]:
        """The nodes that placement should leave out."""
        has = self._suspicions.has
        return frozenset(n for n, card in self._peers.items() if has(card.grpc_address))

    def _find(self, peer: str) -> Card | None:
        card = self._peers.get(NodeId(peer))
        if card is not None:
            return card
        return next((c for c in self._peers.values() if c.grpc_address == peer), None)
