"""Offers that are too large for a card, made smaller: what is missed least is left out first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kakeya.core.ids import NGRAM
from kakeya.fleet.cards.cards import MAX_CARD_BYTES, MAX_MODELS, Offer


def trimmed(offer: Offer, make: Callable[[Offer], bytes]) -> tuple[bytes, int]:
    """The bytes of the largest card that `make` makes of an offer and peers take, and how many of
    its facts that leaves out.

    The last of each kind goes first: models on the disk, which this node gives to others; what its
    caches hold; other ways to it; models that it would serve, but for n-grams. Such a node is found
    and does its other work. Too large without all that: the smallest card, which peers drop.
    """
    wire, left_out = make(offer), 0
    for smaller in _ever_smaller(offer):
        if len(wire) <= MAX_CARD_BYTES and len(offer.models) <= MAX_MODELS:
            break
        offer, left_out = smaller, left_out + 1
        wire = make(offer)
    return wire, left_out


def _ever_smaller(offer: Offer) -> Iterator[Offer]:
    while offer.on_disk:
        yield (offer := replace(offer, on_disk=offer.on_disk[:-1]))
    while offer.caches:
        yield (offer := replace(offer, caches=offer.caches[:-1]))
    while offer.endpoints:
        yield (offer := replace(offer, endpoints=offer.endpoints[:-1]))
    while spare := [at for at, one in enumerate(offer.models) if one.model_id != NGRAM]:
        last = spare[-1]
        models = (*offer.models[:last], *offer.models[last + 1 :])
        yield (offer := replace(offer, models=models))
