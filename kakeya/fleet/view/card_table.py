"""The cards of other nodes, in columns, and how long ago each owner lived.

A node has a slot; column entry i is the state of the node in slot i. Ages follow one rule:

    heard   when this (card, beat) was first heard here, monotonic
    lived   when the owner beat it, as best known: min(heard, latest of (now - told age))

so no report can make a card younger than the first hearing of its beat, nor, once one honest report
came, older. A card lives while `now - lived <= ttl`. The wall clock has no part in it.

Columns and the key table are there for fleets of 1,000 nodes and more, where a message names all
cards at once; for a shelf of 2 to 50 nodes a dictionary of cards would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.view.beats import MAX_BEATS, Beats, Floats, Keys, Told, leads_to
from kakeya.fleet.view.keys import KeyTable, Places

MAX_STEPS = 20_000
"""Steps of hash chains that one message may cost: 10 ms. Later messages prove the other beats."""

_MIN_GROWTH = 32
Number = TypeVar("Number", bound=np.generic)


class Anchored(Protocol):
    """The chain that proves beats: of a card, or of a replaced card."""

    @property
    def life(self) -> int:
        """The life that the chain belongs to."""
        ...

    @property
    def anchor(self) -> int | None:
        """The end of the chain; None = its beats are not proven."""
        ...


class CardIndex:
    """Slots of nodes, and every held card by its bytes and by its key.

    Each registry has one. Registries of one process may share one, as a simulation's do: each card
    is then in memory once, and stays there.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._slot_by_id: dict[NodeId, int] = {}
        self._slot_by_key = KeyTable()
        self._slots_by_address: dict[str, set[int]] = {}
        self._card_by_wire: dict[bytes, Card] = {}
        self._free: list[int] = []
        self.size = 0
        """Slots ever given out at once."""

    def card(self, wire: bytes) -> Card | None:
        """The card with exactly these bytes."""
        return self._card_by_wire.get(wire)

    def slot(self, node_id: str) -> int | None:
        """The slot of a node."""
        return self._slot_by_id.get(NodeId(node_id))

    def slots(self, keys: Keys) -> Places:
        """The slot by each key; -1 = no held card has it."""
        return self._slot_by_key.find(keys)

    def slots_at(self, address: str) -> list[int]:
        """The slots of the nodes that claim an address, in their order."""
        return sorted(self._slots_by_address.get(address, ()))

    def hold(self, card: Card) -> int:
        """Add a card; returns its node's slot."""
        slot = self._slot_by_id.get(card.node_id)
        if slot is None:
            slot = self._free.pop() if self._free else self.size
            self.size = max(self.size, slot + 1)
            self._slot_by_id[card.node_id] = slot
        self._slot_by_key.put(card.key, slot)
        self._slots_by_address.setdefault(card.grpc_address, set()).add(slot)
        self._card_by_wire[card.wire] = card
        return slot

    def let_go(self, card: Card, *, is_gone: bool) -> None:
        """Forget a replaced card, or the card of a node that is gone."""
        if self._is_shared:
            return
        self._slot_by_key.drop(card.key)
        del self._card_by_wire[card.wire]
        claimants = self._slots_by_address[card.grpc_address]
        claimants.discard(self._slot_by_id[card.node_id])
        if not claimants:
            del self._slots_by_address[card.grpc_address]
        if is_gone:
            self._free.append(self._slot_by_id.pop(card.node_id))


class CardTable:
    """Columns over the slots of an index."""

    def __init__(self, index: CardIndex, *, needs_proofs: bool) -> None:
        self.index = index
        self._needs_proofs = needs_proofs
        self._count = 0
        self._plain = 0
        self._cards: list[Card | None] = []
        self._keys: Keys = np.zeros(0, np.uint64)
        self._numbers = np.zeros(0, np.uint16)
        self._heard: Floats = np.zeros(0)
        self._lived: Floats = np.zeros(0)
        self._missed = np.zeros(0, np.float32)
        self._ttl = np.zeros(0, np.float32)
        self._since = np.zeros(0, np.float32)
        self._proofs: Keys = np.zeros(0, np.uint64)
        self.on_change: Callable[[], None] = lambda: None
        """Called when a card came, changed or went; not for a beat."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Card]:
        return (card for card in self._cards if card is not None)

    # --- one card

    def card(self, node_id: str) -> Card | None:
        """The card of a node, lively or not."""
        slot = self.index.slot(node_id)
        return None if slot is None or slot >= len(self._cards) else self._cards[slot]

    def card_with(self, address: str) -> Card | None:
        """The card of a node that claims an address, lively or not."""
        for slot in self.index.slots_at(address):
            card = self._cards[slot] if slot < len(self._cards) else None
            if card is not None and card.grpc_address == address:
                return card  # in a shared index this registry may hold another card there
        return None

    def number(self, card: Card) -> int:
        """The latest beat of a held card."""
        return int(self._numbers[self._slot(card)])

    def since_mono(self, card: Card) -> float:
        """When a held card came here, to a few tenths of a second."""
        return float(self._since[self._slot(card)])

    def lived_mono(self, card: Card) -> float:
        """When the owner of a held card lived last."""
        return float(self._lived[self._slot(card)])

    def keep(self, card: Card, *, age_s: float, mono: float) -> Card | None:
        """Put a body in its node's slot, at beat 0; returns the one that it replaces."""
        held = self.card(card.node_id)
        if held is None:
            self._count += 1
        else:
            self._plain -= held.is_plain
            self.index.let_go(held, is_gone=False)
        slot = self.index.hold(card)
        self._grow()
        self._plain += card.is_plain
        self._cards[slot] = card
        self._keys[slot] = card.key
        self._numbers[slot] = 0
        self._heard[slot] = mono
        self._lived[slot] = mono - max(0.0, age_s)
        self._missed[slot] = 0.0
        self._ttl[slot] = card.ttl_s
        self._since[slot] = mono
        if len(self._proofs):
            self._proofs[slot] = card.anchor or 0
        self.on_change()
        return held

    def drop(self, card: Card) -> None:
        """Forget a node."""
        slot = self._slot(card)
        self._cards[slot] = None
        self._keys[slot] = 0
        self._count -= 1
        self._plain -= card.is_plain
        self.index.let_go(card, is_gone=True)
        self.on_change()

    def proves(self, card: Anchored, told: Told) -> bool:
        """Whether a beat that was told of a card, held or not, is its owner's doing."""
        if told.number == 0:
            return True
        if told.number > MAX_BEATS:
            return False
        if card.anchor is None:
            return not self._needs_proofs
        return told.proof is not None and leads_to(card.life, told.proof, told.number, card.anchor)

    # --- all of them

    @property
    def has_plain(self) -> bool:
        """Whether a node is held that judges cards by their stamps.

        Never where cards are signed: a node that can sign knows beats, and a liar that denies it
        would make the whole fleet renew bodies all the time.
        """
        return self._plain > 0 and not self._needs_proofs

    def living(self, mono: float) -> Sequence[Card]:
        """The cards of live nodes, each read on access: for callers that draw a few of many."""
        return _Cards(self._cards, self._live(mono))

    def lively(self, mono: float) -> list[Card]:
        """The cards of nodes that live, in no order."""
        cards, slots = self._cards, self._live(mono).tolist()
        return [card for slot in slots if (card := cards[slot]) is not None]

    def expired(self, mono: float) -> list[Card]:
        """The expired cards."""
        is_over = (self._keys != 0) & (mono - self._lived > self._ttl)
        cards = self._cards
        return [card for slot in np.flatnonzero(is_over) if (card := cards[slot]) is not None]

    def is_live(self, card: Card, mono: float) -> bool:
        """Whether the time of a held card is not over."""
        slot = self._slot(card)
        return bool(mono - self._lived[slot] <= self._ttl[slot])

    def sleep(self, slept_s: float) -> None:
        """Count a sleep, in which `mono` stood still, into the ages that are told of held cards up
        to the next beat of each. Here they are in doubt; elsewhere the dead would come back."""
        self._missed += slept_s

    def ages(self, mono: float) -> Floats:
        """Seconds since each owner lived, for all held cards."""
        ages: Floats = mono - self._lived[self._keys != 0]
        return ages

    def beats(self, mono: float, *, latest: int = 0) -> Beats:
        """The beats of all live nodes; the `latest` most recent come first."""
        slots = self._live(mono)
        if 0 < latest < len(slots):
            slots = slots[np.argpartition(-self._lived[slots], latest)]
        return self._beats_of(slots, mono)

    def news(self, theirs: Beats, places: Places, mono: float) -> tuple[Beats, list[Card]]:
        """Later beats of live nodes than `theirs`, and the cards that `theirs` do not name.

        `places` are the slots of their keys.
        """
        slots = self._live(mono)
        named = np.full(len(self._keys), -1, np.int64)
        is_held = places >= 0
        named[places[is_held]] = theirs.numbers[is_held]
        named = named[slots]
        unnamed = [self.card_at(slot) for slot in slots[named < 0].tolist()]
        return self._beats_of(slots[self._numbers[slots] > named], mono), unnamed

    def beats_of(self, cards: list[Card], mono: float) -> Beats:
        """The beats of these held cards, in their order."""
        return self._beats_of(np.array([self._slot(c) for c in cards], np.intp), mono)

    def places(self, keys: Keys) -> Places:
        """The slots of the cards with these keys; -1 = not held."""
        slots = self.index.slots(keys)
        self._grow()
        if len(self._keys):
            slots[self._keys[slots] != keys] = -1  # in a shared index: another registry's card
        return slots

    def card_at(self, slot: int) -> Card:
        """The card in a slot that `places` gave."""
        card = self._cards[slot]
        assert card is not None
        return card

    def hear(self, beats: Beats, places: Places, mono: float) -> Places:
        """Take the beats that a message tells of held cards; returns the slots that beat anew.

        `places` are the slots of the keys. Beats without a valid proof change nothing.
        """
        told = beats.told
        at = (places[:told] >= 0).nonzero()[0]
        slots, numbers, ages_s = places[:told], beats.numbers[:told], beats.ages_s
        if len(at) < told:
            slots, numbers, ages_s = slots[at], numbers[at], ages_s[at]
        lived = mono - np.maximum(ages_s, 0.0)
        held = self._numbers[slots]
        known = numbers <= held  # an owner made an earlier beat no later than this one
        where = slots[known]
        younger = np.minimum(self._heard[where], lived[known])
        self._lived[where] = np.maximum(self._lived[where], younger)
        later = (~known & (numbers <= MAX_BEATS)).nonzero()[0]
        later = self._proven(beats, at, slots, later)
        where = slots[later]
        self._numbers[where] = numbers[later]
        self._heard[where] = mono
        self._missed[where] = 0.0
        self._lived[where] = np.maximum(self._lived[where], lived[later])
        return where

    def _proven(self, beats: Beats, at: Places, slots: Places, later: Places) -> Places:
        if not self._needs_proofs:
            return later
        self._grow()
        steps_left = MAX_STEPS
        proven: list[int] = []
        for place in later.tolist():
            entry, slot = int(at[place]), int(slots[place])
            steps = int(beats.numbers[entry]) - int(self._numbers[slot])
            card = self._cards[slot]
            if card is None or card.anchor is None or entry >= len(beats.proofs):
                continue
            if steps > steps_left:
                continue
            steps_left -= steps
            proof = int(beats.proofs[entry])
            if leads_to(card.life, proof, steps, int(self._proofs[slot])):
                self._proofs[slot] = proof
                proven.append(place)
        return np.array(proven, np.intp)

    def _live(self, mono: float) -> Places:
        is_live = (self._keys != 0) & (mono - self._lived <= self._ttl)
        places: Places = is_live.nonzero()[0]
        return places

    def _beats_of(self, slots: Places, mono: float) -> Beats:
        return Beats(
            self._keys[slots],
            self._numbers[slots].astype(np.uint32),
            mono - self._lived[slots] + self._missed[slots],
            self._proofs[slots] if len(self._proofs) else self._proofs,
        )

    def _slot(self, card: Card) -> int:
        slot = self.index.slot(card.node_id)
        assert slot is not None
        return slot

    def _grow(self) -> None:
        more = self.index.size - len(self._cards)
        if more <= 0:
            return
        more = max(more, len(self._cards) // 8, _MIN_GROWTH)
        self._cards += [None] * more
        self._keys = _longer(self._keys, more)
        self._numbers = _longer(self._numbers, more)
        self._heard = _longer(self._heard, more)
        self._lived = _longer(self._lived, more)
        self._missed = _longer(self._missed, more)
        self._ttl = _longer(self._ttl, more)
        self._since = _longer(self._since, more)
        if self._needs_proofs:
            self._proofs = _longer(self._proofs, more)


class _Cards(Sequence[Card]):
    """Cards in some slots; valid until the next change of the table."""

    def __init__(self, cards: list[Card | None], slots: Places) -> None:
        self._cards, self._slots = cards, slots

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, at: int) -> Card: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Card]: ...

    def __getitem__(self, at: int | slice) -> Card | Sequence[Card]:
        if isinstance(at, slice):
            return _Cards(self._cards, self._slots[at])
        card = self._cards[int(self._slots[at])]
        assert card is not None
        return card


def _longer(column: NDArray[Number], more: int) -> NDArray[Number]:
    return np.concatenate((column, np.zeros(more, column.dtype)))
