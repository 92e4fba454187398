"""Digests of a registry in columns: the beats that it can tell, the cards that it lacks.

Columns are there for fleets of 1,000 nodes and more; a shelf has 2 to 50.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from kakeya.fleet.cards.cards import Card, CardTrust
from kakeya.fleet.view.beats import Beats, Keys
from kakeya.fleet.view.keys import Places
from kakeya.fleet.view.registry import CapabilityRegistry

MANY_UNKNOWN = 8
"""Most cards to verify between two awaits: about a millisecond."""
SETTLED_S = 60.0
"""Time after which a card has reached the whole fleet: six rounds."""
MIN_SIGNED_BYTES = 300


def all_beats(registry: CapabilityRegistry, *, mono: float, least: int) -> Beats:
    """The own beat, then those of all live peers, of which the earliest third is only named.

    At least `least` entries carry an age.
    """
    told = max(least, (1 + len(registry.peers.held)) * 2 // 3)
    mine = _with_own(registry, registry.peers.held.beats(mono, latest=told), mono)
    return mine.tell(told)


def beats_of(registry: CapabilityRegistry, cards: Sequence[Card], *, mono: float) -> Beats:
    """The own beat, then the beats of these held cards."""
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
    """The held cards with these keys, the own one included; unknown keys are skipped."""
    own, held = registry.own, registry.peers.held
    if not len(keys):
        return []
    places = zip(keys.tolist(), held.places(keys).tolist(), strict=True)
    return [
        own if key == own.key else held.card_at(place)
        for key, place in places
        if key == own.key or place >= 0
    ]


def news(
    registry: CapabilityRegistry, theirs: Beats, places: Places, *, mono: float
) -> tuple[Beats, list[Card]]:
    """Later beats than `theirs`, the own first, and the cards that `theirs` do not name.

    `places` are the slots of the cards that they name.
    """
    held, unnamed = registry.peers.held.news(theirs, places, mono)
    if not (theirs.keys == np.uint64(registry.own.key)).any():
        unnamed.insert(0, registry.own)
    return _with_own(registry, held, mono), unnamed


def unknown(registry: CapabilityRegistry, beats: Beats, places: Places, *, mono: float) -> Keys:
    """Keys of the cards to ask for: neither held (by `places`) nor looked at before."""
    keys = registry.peers.unknown(beats, places, mono=mono)
    return keys[[not registry.own_card.has_key(key) for key in keys.tolist()]]


def likely_new(
    registry: CapabilityRegistry, cards: list[Card], *, unread: int, mono: float
) -> list[Card]:
    """Of the cards that a peer did not name, those that are probably news to it.

    A peer that names `unread` cards of other nodes that are unknown here may hold newer cards of
    the same nodes.
    A card that has been held here for long is then more likely outdated at the peer than missing;
    if that guess is wrong, the next exchange sends it.
    """
    held, own = registry.peers.held, registry.own
    old = [card for card in cards if card is not own and mono - held.since_mono(card) > SETTLED_S]
    back = {id(card) for card in old[:unread]}
    return [card for card in cards if id(card) not in back]


def verification(
    registry: CapabilityRegistry, trust: CardTrust, wires: Iterable[bytes]
) -> Callable[[], None] | None:
    """Work for a thread: verify the signatures of many unknown cards before their merge."""
    index = registry.peers.held.index
    unread = [wire for wire in wires if index.card(wire) is None]
    return partial(trust.warm, unread) if len(unread) > MANY_UNKNOWN else None
