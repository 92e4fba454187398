"""The offer of this node to the fleet: a pure view of the models that it would serve now.

A model is offered while a request for it would be served: it is in memory, or it would get room.
Of one that was never loaded only the name is told. N-grams are always offered. Stamps and sending
are not done here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kakeya.backends.images.model import IMAGE
from kakeya.core.ids import NGRAM, ModelId
from kakeya.fleet.cards.cards import (
    MAX_MODELS,
    Endpoint,
    Offer,
    OfferedModel,
)
from kakeya.fleet.cards.cards import CardRole as CardRole
from kakeya.fleet.cards.disk_model import MAX_ON_DISK, DiskModel
from kakeya.fleet.cards.ring_offer import RingOffer
from kakeya.fleet.placement.ring import seat_address
from kakeya.generation.facts import ModelFacts
from kakeya.generation.spec import ModelRole


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts of a node beside its models. `ring_address` "" = started in no ring; `ring`
    is the rank in a group; `on_disk` are the models that it gives to others."""

    grpc_address: str
    platform: str
    unified_memory_bytes: int
    ttl_s: float
    ring_address: str = ""
    ring: RingOffer | None = None
    label: str = ""
    endpoints: tuple[Endpoint, ...] = ()
    is_authority: bool = False
    is_careful: bool = False
    on_disk: tuple[DiskModel, ...] = ()


_CARD_ROLES = {
    ModelRole.VERIFIER: CardRole.VERIFIER,
    ModelRole.PROPOSER: CardRole.PROPOSER,
    ModelRole.EMBEDDER: CardRole.EMBEDDER,
}


def make_offer(
    place: NodeFacts,
    ready: Iterable[tuple[ModelRole, ModelFacts]],
    drawing: Iterable[str] = (),
    unloaded: Iterable[tuple[ModelRole, str]] = (),
    relayed: Iterable[OfferedModel] = (),
) -> Offer:
    """Derive the offer from the models that were loaded, the names of those that draw and of those
    that were never loaded, and the shared backends, as far as there is room for them."""
    loaded = tuple(ready)
    models = tuple(
        OfferedModel(
            model_id=ModelId(facts.model_id),
            role=_CARD_ROLES[role],
            quantization=facts.quantization,
            tokens_per_second=facts.tokens_per_second,
            vocabulary_digest=facts.vocabulary_digest,
        )
        for role, facts in loaded
    )
    cold = tuple(
        OfferedModel(model_id=ModelId(name), role=_CARD_ROLES[role]) for role, name in unloaded
    )
    tools = tuple(
        # No number of our own: a node of the first protocol refuses messages with unknown roles.
        OfferedModel(model_id=ModelId(name), role=CardRole.TOOL, capability=IMAGE)
        for name in drawing
    )
    ngram = OfferedModel(model_id=NGRAM, role=CardRole.PROPOSER)
    named = {str(one.model_id) for one in (*models, *cold, *tools)}
    return Offer(
        grpc_address=place.grpc_address,
        label=place.label,
        endpoints=place.endpoints,
        is_authority=place.is_authority,
        ring_address=place.ring_address
        or (seat_address(place.ring.group_id, place.ring.rank) if place.ring else ""),
        ring=place.ring,
        platform=place.platform,
        unified_memory_bytes=place.unified_memory_bytes,
        mlx_version=next((facts.mlx_version for _, facts in loaded), ""),
        models=(*models, *cold, *tools, ngram, *relayed)[:MAX_MODELS],
        ttl_s=place.ttl_s,
        is_careful=place.is_careful,
        on_disk=tuple(one for one in place.on_disk if one.model_id not in named)[:MAX_ON_DISK],
    )
