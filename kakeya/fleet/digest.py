"""What a registry can tell in columns, and what it lacks of what others tell it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kakeya.fleet.beats import Beats, Keys
from kakeya.fleet.cards import Card, CardTrust
from kakeya.fleet.convert import scan_cards
from kakeya.fleet.held import Places
from kakeya.fleet.registry import CapabilityRegistry

MANY_UNKNOWN = 8
"""Cards whose signatures are verified between two awaits: about a millisecond."""
SETTLED_S = 60.0
"""After which a card has reached everybody: six rounds."""
_MIN_SIGNED_BYTES = 300


def all_beats(registry: CapabilityRegistry, *, mono: float) -> Beats:
    """The own beat, then those of all live peers, the latest first."""
    return _with_own(registry, registry.peers.held.beats(mono), mono)


def beats_of(registry: CapabilityRegistry, cards: Sequence[Card], *, mono: float) -> Beats:
    """The own beat, then those of these held cards."""
    others = [card for card in cards if card is not registry.own]
    return _with_own(registry, registry.peers.held.beats_of(others, mono), mono)


def _with_own(registry: CapabilityRegistry, held: Beats, mono: float) -> Beats:
    own = registry.own_card
    proofs = held.proofs
    if own.is_proven:
        proofs = np.concatenate((np.array([own.proof], np.uint64), held.proofs))
    return Beats(
        np.concatenate((np.array([own.card.key], np.uint64), held.keys)),
        np.concatenate((np.array([own.number], np.uint32), held.numbers)),
        np.concatenate(([mono - own.beat_mono], held.ages_s)),
        proofs,
    )


def cards_of(registry: CapabilityRegistry, keys: Keys) -> list[Card]:
    """The cards with these keys, the own one included; keys of others are passed over."""
    own, held = registry.own, registry.peers.held
    places = zip(keys.tolist(), held.places(keys).tolist(), strict=True)
    return [
        own if key == own.key else held.card_at(place)
        for key, place in places
        if key == own.key or place >= 0
    ]


def unknown(registry: CapabilityRegistry, beats: Beats, *, mono: float) -> Keys:
    """Keys of the cards to ask for: neither held nor looked at before."""
    keys = registry.peers.unknown(beats, mono=mono)
    return keys[[not registry.own_card.has_key(key) for key in keys.tolist()]]


def likely_new(
    registry: CapabilityRegistry, cards: list[Card], *, unread: int, mono: float
) -> list[Card]:
    """Of cards that somebody did not name, those that are probably news to it.

    Who names `unread` cards that are unknown here may hold newer cards of the same nodes. A card
    that has been here for long is then more likely outdated there than unheard of; if that is
    wrong, the next exchange tells it.
    """
    held, own = registry.peers.held, registry.own
    old = [card for card in cards if card is not own and mono - held.since_mono(card) > SETTLED_S]
    back = {id(card) for card in old[:unread]}
    return [card for card in cards if id(card) not in back]


def compare(mine: Beats, theirs: Beats) -> tuple[Places, Places]:
    """Places in `mine` of later beats than theirs, the own first, and of keys they did not name."""
    order = np.argsort(theirs.keys)
    sorted_keys = theirs.keys[order]
    is_named = np.zeros(len(mine), bool)
    is_newer = ~is_named
    if len(order):
        at = np.minimum(np.searchsorted(sorted_keys, mine.keys), len(order) - 1)
        is_named = sorted_keys[at] == mine.keys
        is_newer = ~is_named | (mine.numbers > theirs.numbers[order[at]])
    is_newer[0] = True
    return np.flatnonzero(is_newer), np.flatnonzero(~is_named)


def verification(
    registry: CapabilityRegistry, trust: CardTrust | None, message: bytes, field: int
) -> Callable[[], None] | None:
    """Signatures to be verified in a thread before many unknown cards are merged.

    `field` is the one of the cards in the message.
    """
    if trust is None or len(message) < MANY_UNKNOWN * _MIN_SIGNED_BYTES:
        return None
    index = registry.peers.held.index
    unread = [wire for wire in scan_cards(message, field) if index.card(wire) is None]
    return partial(trust.warm, unread) if len(unread) > MANY_UNKNOWN else None
