"""The own card: the offer of this node, stamped, sealed and kept alive by beats.

A new body is made when the offer changes, when its chain of beats is used up and, while a node
that knows no beats is in the fleet, whenever the last body grows old: such nodes judge by stamps.
Between bodies the node beats, at most once a second. Never taken from gossip.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from kakeya.core.errors import InvalidArgument
from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import (
    DEFAULT_INTERVAL_S,
    FAREWELL_TTL_S,
    MAX_AHEAD_S,
    MAX_INCARNATION,
    Card,
    CardTrust,
    Offer,
    fault_of,
)
from kakeya.fleet.cards.convert import MalformedCard, from_wire, to_wire
from kakeya.fleet.cards.trim import trimmed
from kakeya.fleet.view.beats import MAX_BEATS, Chain

MAX_JUMP_S = 24 * 3600.0
"""Most seconds ahead of the clock at which a stamp of an earlier life is still believed."""
BEAT_S = 1.0
"""Beats within this time are one, however many peers ask."""
DEFENCE_S = 2.0
"""Least time between two beats that answer accusations; one refutes all accusations before it."""
PLAIN_AGE_S = 8.0
"""Age at which a body is renewed for nodes that judge by stamps: once in each default interval."""
PATIENCE_ROUNDS = 3
PATIENCE_S = PATIENCE_ROUNDS * DEFAULT_INTERVAL_S + 5.0
"""A process that meets its own id within this time of its start, three rounds, came second."""
MAX_JUMPS = 3
"""Jumps above one living rival after which the earlier start decides: a newcomer in its patience
makes fewer, so only two processes that lived long without a way to each other come so far."""
_STEP_S = 0.001
_KEYS_KEPT = 64


class OwnCard:
    """One life of this node. `incarnation` counts its starts; a heard card may raise it.

    `patience_s` is the time for which a process that meets its own id takes itself for the second.
    """

    def __init__(
        self,
        node_id: NodeId,
        offer: Offer,
        *,
        now: float,
        mono: float,
        incarnation: int,
        stamp: float,
        trust: CardTrust | None,
        entropy: Callable[[int], bytes],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.life = int.from_bytes(entropy(8), "little") or 1
        self.started_at, self.started_mono = now, mono
        self.patience_s = patience_s
        self.is_leaving = False
        self._jumps: Counter[int] = Counter()
        """Jumps above each living rival, by its life."""
        self._trust, self._entropy = trust, entropy
        self._stamped_at = stamp if stamp < now + MAX_JUMP_S else 0.0
        self._stamped_mono = mono
        self._addresses: set[str] = set()
        self._keys: deque[int] = deque(maxlen=_KEYS_KEPT)
        self._chain: Chain | None = None
        self._defended_mono = float("-inf")
        self.on_change: Callable[[], None] = lambda: None
        """Called when the body is new."""
        self.left_out = 0
        """Facts of the offer for which the card has no room."""
        self.announce(offer, now=now, mono=mono)

    # --- queries

    @property
    def card(self) -> Card:
        """The body as last made."""
        return self._card

    @property
    def offer(self) -> Offer:
        """The offer that was last announced."""
        return self._offer

    @property
    def number(self) -> int:
        """The latest beat of the body."""
        return self._number

    @property
    def is_proven(self) -> bool:
        """Whether the beats come with proofs: in a fleet with identities."""
        return self._chain is not None

    @property
    def proof(self) -> int:
        """The proof of the latest beat; 0 in a fleet without identities."""
        return self._chain.proof(self._number) if self._chain else 0

    @property
    def beat_mono(self) -> float:
        """When this node beat last."""
        return self._beat_mono

    @property
    def stamped_at(self) -> float:
        """The last stamp; it never goes back within an incarnation."""
        return self._stamped_at

    @property
    def addresses(self) -> frozenset[str]:
        """Every address that this life announced."""
        return frozenset(self._addresses)

    def has_key(self, key: int) -> bool:
        """Whether a body of this life, one of the last 64, has the key."""
        return key in self._keys

    # --- announcing

    def announce(self, offer: Offer, *, now: float, mono: float) -> Card:
        """Make a new body, without the facts for which it has no room (`left_out`). Raises
        InvalidArgument for an offer that peers would drop."""
        # Stamps go on at the pace of the monotonic clock at least, so a wall clock that was set
        # back neither repeats a stamp nor lets the card age out at the peers.
        elapsed_s = max(mono - self._stamped_mono, _STEP_S)
        announced_at = max(now, self._stamped_at + elapsed_s)
        chain = None if self._trust is None else Chain(self.life, self._entropy)
        told = offer
        if self.is_leaving:
            told = replace(offer, models=(), caches=(), ttl_s=FAREWELL_TTL_S)

        def make(told: Offer) -> bytes:
            wire = to_wire(
                self.node_id,
                told,
                incarnation=self.incarnation,
                announced_at=announced_at,
                life=self.life,
                anchor=b"" if chain is None else chain.anchor,
                is_leaving=self.is_leaving,
                started_at=self.started_at,
            )
            return wire if self._trust is None else self._trust.seal(wire)

        wire, left_out = trimmed(told, make)
        self._card = self._checked(wire, offer, announced_at)
        self.left_out = left_out
        self._offer, self._chain, self._number = offer, chain, 0
        self._stamped_at, self._stamped_mono = announced_at, mono
        self._beat_mono = mono
        self._addresses.add(offer.grpc_address)
        self._keys.append(self._card.key)
        self.on_change()
        return self._card

    def restamp(self, *, now: float, mono: float) -> Card:
        """Announce the same offer in a new body."""
        return self.announce(self._offer, now=now, mono=mono)

    def stamp_age_s(self, mono: float) -> float:
        """Seconds since the card was stamped."""
        return mono - self._stamped_mono

    def beat(self, *, now: float, mono: float, for_plain: bool = False) -> None:
        """Show that this node lives; with `for_plain`, to nodes that judge by stamps too.

        After a farewell it does nothing.
        """
        if self.is_leaving:
            return
        is_old = for_plain and mono - self._stamped_mono >= PLAIN_AGE_S
        if is_old or self._number >= MAX_BEATS:
            self.restamp(now=now, mono=mono)
        elif mono - self._beat_mono >= BEAT_S:
            self.beat_anew(now=now, mono=mono)

    def defend(self, *, now: float, mono: float) -> None:
        """Beat at once, against an accusation that this node does not live.

        At most once in `DEFENCE_S`: a peer that accuses all the time must not use up the chain.
        """
        if mono - self._defended_mono >= DEFENCE_S:
            self._defended_mono = mono
            self.beat_anew(now=now, mono=mono)

    def beat_anew(self, *, now: float, mono: float) -> None:
        """Beat without regard to the time of the last beat."""
        if self.is_leaving:
            return
        if self._number >= MAX_BEATS:
            self.restamp(now=now, mono=mono)
        else:
            self._number += 1
            self._beat_mono = mono

    def farewell(self, *, now: float, mono: float) -> Card:
        """Make the last body: no models, and gone from all views in ten seconds.

        Until `come_back` every body is such a one, and this node does not beat.
        """
        self.is_leaving = True
        return self.restamp(now=now, mono=mono)

    def come_back(self, *, now: float, mono: float) -> Card:
        """Announce the offer again after a farewell, as a process that starts only then."""
        self.is_leaving = False
        self.started_at, self.started_mono = now, mono
        self._jumps.clear()
        return self.restamp(now=now, mono=mono)

    def _checked(self, wire: bytes, offer: Offer, announced_at: float) -> Card:
        try:
            card = from_wire(wire)
            fault = fault_of(card, announced_at)
        except MalformedCard as failure:
            fault = failure.fault
        if fault is not None:
            raise InvalidArgument(
                f"the own card would be dropped by every peer as {fault}: {offer!r}"
            )
        return card

    # --- earlier lives

    def runs_ahead(self, now: float) -> bool:
        """Whether the stamps run ahead of the own clock by more than peers allow.

        A clock was ahead and got repaired, or it was right and has been set back.
        """
        return self._stamped_at > now + MAX_AHEAD_S

    def begin_anew(self, *, now: float, mono: float) -> None:
        """Go back to the wall clock, in a new incarnation that orders above the old stamps."""
        self.incarnation += 1
        self._stamped_at, self._stamped_mono = 0.0, mono
        self.restamp(now=now, mono=mono)

    def jump_above(self, card: Card, now: float, *, is_living: bool = False) -> bool:
        """Order above another life of this node; returns whether the stamp had to jump.

        The next body carries the new stamp. `is_living`: a process made the card that lives beside
        this one.
        """
        is_countable = math.isfinite(card.announced_at) and card.incarnation < MAX_INCARNATION - 1
        if card.life == self.life or not is_countable or not card.is_newer_than(self._card):
            return False
        self._jumps[card.life] += is_living
        self.incarnation = max(self.incarnation, card.incarnation + 1)
        # Peers that hold that card may have a clock that is ahead, and refuse a lower stamp as too
        # old: go on from that card's stamp. `begin_anew` undoes it if they do not.
        if card.announced_at < now + MAX_JUMP_S:
            self._stamped_at = max(self._stamped_at, card.announced_at)
        return True

    # --- rivals: living processes with this id

    def has_jumped(self, life: int) -> bool:
        """Whether this process ordered itself above a life before: a later card of it is alive."""
        return self._jumps[life] > 0

    def is_second_to(self, rival: Card, *, mono: float) -> bool:
        """Whether the living process that made a card with this id came first.

        Clocks may be wrong, so they decide only where nothing else does: between processes that
        started together, and between two that each jumped above the other several times.
        """
        began, rival_began = self.started_at, rival.started_at
        is_earlier = (rival_began, rival.life) < (began, self.life)
        if mono - self.started_mono > self.patience_s:
            insists = rival.is_newer_than(self._card) and self._jumps[rival.life] >= MAX_JUMPS
            return insists and is_earlier
        started_together = (
            abs(rival_began - began) <= self.patience_s
            and rival.announced_at - rival_began <= self.patience_s
        )
        return is_earlier or not started_together
