"""Offers that are too large for a card."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.ids import NGRAM, ModelId
from kakeya.fleet.cards.cards import (
    MAX_CARD_BYTES,
    MAX_MODELS,
    CacheOffer,
    CardRole,
    Endpoint,
    Offer,
    OfferedModel,
)
from kakeya.fleet.cards.convert import to_wire
from kakeya.fleet.cards.disk_model import DiskModel
from kakeya.fleet.cards.trim import trimmed
from tests.fleet.nodes import NOW, make_registry, verifier
from tests.laws import law


def _make(offer: Offer) -> bytes:
    return to_wire("me", offer, incarnation=1, announced_at=NOW)


def _offer(models: int, letters: int, disk: int, caches: int) -> Offer:
    ngram = OfferedModel(NGRAM, CardRole.PROPOSER)
    return Offer(
        grpc_address="10.0.0.1:50051",
        endpoints=(Endpoint("10.0.0.2:50051", "lan", 10, 1.0),),
        models=(ngram, *(verifier(f"{at:02}" + "m" * letters) for at in range(models))),
        caches=tuple(CacheOffer(b"", bytes(2000)) for _ in range(caches)),
        on_disk=tuple(DiskModel(ModelId(f"d{at}"), at) for at in range(disk)),
    )


@given(st.integers(0, 80), st.integers(0, 250), st.integers(0, 16), st.integers(0, 8))
@law(300)
def test_every_card_of_valid_facts_fits_and_loses_no_more_than_it_must(
    models: int, letters: int, disk: int, caches: int
) -> None:
    offer = _offer(models, letters, disk, caches)
    seen: list[Offer] = []
    wire, left_out = trimmed(offer, lambda one: (seen.append(one), _make(one))[1])
    last = seen[-1]
    assert len(wire) <= MAX_CARD_BYTES
    assert len(last.models) <= MAX_MODELS
    assert last.models[0].model_id == NGRAM
    assert left_out == len(seen) - 1
    assert trimmed(offer, _make) == (wire, left_out)
    if left_out:  # what is told first is missed first
        before = seen[-2]
        assert len(_make(before)) > MAX_CARD_BYTES or len(before.models) > MAX_MODELS
    assert len(last.models) == len(offer.models) or not (last.on_disk or last.caches)


def test_a_node_of_many_long_names_tells_the_first_of_them() -> None:
    """76 models, as a registry of a large fleet of backends may bring."""
    registry = make_registry("me", address="10.0.0.1:50051")
    offer = replace(registry.offer, models=_offer(76, 120, 0, 0).models)
    card = registry.announce(offer, now=NOW + 1, mono=1.0)
    assert registry.offer == offer
    assert len(card.wire) <= MAX_CARD_BYTES
    assert registry.own_card.left_out == len(offer.models) - len(card.models) > 0
    assert card.models == offer.models[: len(card.models)]
    registry.announce(replace(offer, models=offer.models[:3]), now=NOW + 2, mono=2.0)
    assert registry.own_card.left_out == 0
