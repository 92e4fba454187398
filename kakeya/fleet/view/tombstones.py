"""Memory of nodes that a registry does not hold: their addresses and their last cards.

remembered      addresses of expired peers, dialled again for a day, so that partitions heal
tombstones      the last card and beat of each life of a node that expired, left or was replaced;
                relays alone kept any card of it alive that is no later, and it does not return
unwanted        keys of cards that were replaced or refused, not to be asked for again
RegistryState   the part that a node writes to disk: enough to find the fleet and order its cards
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import MAX_TTL_S, Card, is_dialable

REMEMBER_S = 24 * 3600.0
"""Time for which an expired peer's address is dialled again: a day without power."""
TOMBSTONE_S = 2 * MAX_TTL_S
"""Longer than any relay can hold the card of a node that is gone."""
REFUSED_S = 300.0
"""Time after which a refused card is looked at again: the reason may have passed."""
MAX_LIVES = 4
"""Lives remembered of one node: starts within `TOMBSTONE_S`, and copies of it."""
MAX_REPLACED = 16
"""Replaced cards remembered of one node: more bodies than a node makes in a TTL."""


class Sighting(NamedTuple):
    """The address of a peer, and the time (wall clock) when it was last known to live."""

    node_id: NodeId
    address: str
    last_seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryState:
    """State of a registry for its next start. `stamp` is that of its last card."""

    stamp: float = 0.0
    incarnation: int = 0
    peers: tuple[Sighting, ...] = ()


class Remembered:
    """Addresses of nodes that are gone, bounded: the longest gone is forgotten first.

    Each node has one entry, so a node that claims foreign addresses, or many in turn, displaces no
    other node.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: OrderedDict[NodeId, Sighting] = OrderedDict()

    def add(self, sighting: Sighting) -> None:
        """Remember the address of a node, if it can be dialled."""
        if is_dialable(sighting.address):
            self._places[sighting.node_id] = sighting
            self._places.move_to_end(sighting.node_id)
            while len(self._places) > self._limit:
                self._places.popitem(last=False)

    def drop(self, node_id: NodeId) -> None:
        """Forget a node: it lives, or is to be forgotten."""
        self._places.pop(node_id, None)

    def forget_old(self, now: float) -> None:
        """Forget sightings of more than 24 h ago."""
        for node_id in [n for n, s in self._places.items() if now - s.last_seen_at > REMEMBER_S]:
            del self._places[node_id]

    def at(self, now: float) -> tuple[Sighting, ...]:
        """The sightings of the last 24 h."""
        return tuple(s for s in self._places.values() if now - s.last_seen_at <= REMEMBER_S)


class Tombstone(NamedTuple):
    """The last card and beat of one life of a node."""

    incarnation: int
    announced_at: float
    key: int
    number: int
    until_mono: float


class Tombstones:
    """Lives of nodes that are over, bounded: the node whose life ended longest ago is forgotten.

    A life is over at its last known card and beat; a process that lives shows a later one. A stone
    counts for its own life only, so the end of a copy with the same id buries no other process.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stones: OrderedDict[NodeId, dict[int, Tombstone]] = OrderedDict()

    def bury(self, card: Card, number: int, mono: float) -> None:
        """Note that a life of a node ended with this card at this beat."""
        lives = self._stones.setdefault(card.node_id, {})
        stone = Tombstone(card.incarnation, card.announced_at, card.key, number, mono + TOMBSTONE_S)
        known = lives.pop(card.life, stone)
        later = max(stone, known, key=lambda s: (s.incarnation, s.announced_at, s.number))
        lives[card.life] = later._replace(until_mono=stone.until_mono)
        if len(lives) > MAX_LIVES:
            del lives[next(iter(lives))]
        self._stones.move_to_end(card.node_id)
        while len(self._stones) > self._limit:
            self._stones.popitem(last=False)

    def has(self, card: Card) -> bool:
        """Whether the life that made a card was taken for over."""
        return card.life in self._stones.get(card.node_id, {})

    def holds_down(self, card: Card, number: int, mono: float) -> bool:
        """Whether a card at a (proven) beat is no later than the last one of its life."""
        stone = self._stones.get(card.node_id, {}).get(card.life)
        if stone is None or mono > stone.until_mono:
            return False
        if card.key == stone.key:
            return number <= stone.number
        mine, theirs = card.incarnation, card.announced_at
        return (mine, theirs) <= (stone.incarnation, stone.announced_at)

    def raise_up(self, card: Card) -> None:
        """Forget the tombstone of a life that is back."""
        lives = self._stones.get(card.node_id, {})
        if lives.pop(card.life, None) is not None and not lives:
            del self._stones[card.node_id]

    def forget_old(self, mono: float) -> None:
        """Forget nodes whose last life ended long ago."""
        while self._stones:
            node_id, lives = next(iter(self._stones.items()))
            if mono <= max(stone.until_mono for stone in lives.values()):
                return
            del self._stones[node_id]


class _Refused(NamedTuple):
    above: int
    until_mono: float


class Replaced(NamedTuple):
    """The remains of a card that a newer one replaced: enough to prove later beats of it."""

    node_id: NodeId
    life: int
    grpc_address: str
    anchor: int | None
    number: int
    since_mono: float


class Unwanted:
    """Keys of cards that were looked at and are not asked for again, bounded.

    A replaced card is not wanted while another life of its node is held; a refused card is wanted
    once it beat again or `REFUSED_S` went by. Of one node's replaced cards only the latest are
    kept: a node that makes new cards all the time displaces only its own.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._refused: OrderedDict[int, _Refused] = OrderedDict()
        self._replaced: OrderedDict[int, Replaced] = OrderedDict()
        self._keys: dict[NodeId, deque[int]] = {}
        """Replaced cards by node, the longest known first."""

    def refuse(self, key: int, number: int, mono: float) -> None:
        """Note that a card at this beat was dropped."""
        self._refused[key] = _Refused(number, mono + REFUSED_S)
        while len(self._refused) > self._limit:
            self._refused.popitem(last=False)

    def forgive(self) -> None:
        """Forget all refusals: the reason lay at this node."""
        self._refused.clear()

    def replace(self, card: Card, number: int, mono: float) -> None:
        """Note that a newer card replaced this one."""
        if card.key not in self._replaced:
            keys = self._keys.setdefault(card.node_id, deque())
            keys.append(card.key)
            if len(keys) > MAX_REPLACED:
                del self._replaced[keys.popleft()]
        self._replaced[card.key] = Replaced(
            card.node_id, card.life, card.grpc_address, card.anchor, number, mono
        )
        while len(self._replaced) > self._limit:
            _, oldest = self._replaced.popitem(last=False)
            self._keep_keys(oldest.node_id)

    def _keep_keys(self, node_id: NodeId) -> None:
        """Keep of a node's keys those of cards that are remembered."""
        left = deque(key for key in self._keys.pop(node_id, ()) if key in self._replaced)
        if left:
            self._keys[node_id] = left

    def reopen(self, card: Card, mono: float) -> None:
        """Want the cards that a node's other lives left, once they beat again: this life ended."""
        keys = self._keys.get(card.node_id, ())
        for key in [key for key in keys if self._replaced[key].life != card.life]:
            self.refuse(key, self._replaced.pop(key).number, mono)
        self._keep_keys(card.node_id)

    def replaced(self, key: int) -> Replaced | None:
        """The replaced card with a key."""
        return self._replaced.get(key)

    def wants(self, key: int, number: int, mono: float) -> bool:
        """Whether to ask for a card that a peer holds at this beat."""
        if key in self._replaced:
            return False
        refused = self._refused.get(key)
        return refused is None or number > refused.above or mono > refused.until_mono
