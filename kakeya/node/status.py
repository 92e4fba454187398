"""What a node says of itself and of the fleet, as JSON: the source of `kakeya status` and `plan`.

Pure views of the agent's parts. Ages and times are seconds; speeds are tokens per second, 0 = not
measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kakeya.core.errors import PlacementError
from kakeya.fleet.cards import Card
from kakeya.fleet.cards import Role as CardRole
from kakeya.fleet.gossip import GossipStats
from kakeya.fleet.placement import SpecDecodePlacement, plan_spec_decode_placement
from kakeya.node.drafting import choose_sources
from kakeya.node.models import ModelSpec
from kakeya.runtime.generation import ModelFacts
from kakeya.serving.backends.engine_backend import EngineBackend

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The agent's parts at one moment; `cards` has the own one first.

    `ages` are seconds since each node lived, by id.
    """

    node_id: str
    grpc: str
    http: str
    uptime_s: float
    now: float
    cards: Sequence[Card]
    ages: Mapping[str, float | None]
    suspects: frozenset[str]
    gossip: GossipStats
    models: Sequence[tuple[ModelSpec, EngineBackend | None]]


def describe(view: View) -> Json:
    """Describe the node, its models, the fleet as it sees it, and what it would plan."""
    own = view.cards[0]
    return {
        "node": {
            "node_id": view.node_id,
            "grpc": view.grpc,
            "http": view.http,
            "pid": os.getpid(),
            "incarnation": own.incarnation,
            "platform": own.platform,
            "uptime_s": round(view.uptime_s, 1),
        },
        "models": [_model(spec, backend) for spec, backend in view.models],
        "fleet": {
            "nodes": [_card(card, view, is_own=card is own) for card in view.cards],
            "gossip": {
                "rounds": view.gossip.rounds,
                "exchanges": view.gossip.exchanges,
                "failures": view.gossip.failures,
                "cards_dropped": sum(view.gossip.dropped.values()),
            },
            "plan": _plan(view),
        },
    }


def _model(spec: ModelSpec, backend: EngineBackend | None) -> Json:
    if backend is None:
        return {"model_id": spec.model_id, "role": spec.role.value, "state": "ready", "error": ""}
    facts = backend.facts
    return {
        "model_id": spec.model_id,
        "role": spec.role.value,
        "state": backend.state.value,
        "error": backend.last_error,
        "pid": backend.pid,
        "restarts": backend.restarts,
        "running": backend.running,
        "waiting": backend.waiting,
        **(_facts(facts) if facts else {}),
    }


def _facts(facts: ModelFacts) -> Json:
    return {
        "context_tokens": facts.context_tokens,
        "vocab_size": facts.vocab_size,
        "quantization": facts.quantization,
        "weight_bytes": facts.weight_bytes,
        "tokens_per_second": facts.tokens_per_second,
        "prefill_tokens_per_second": facts.prefill_tokens_per_second,
        "device": facts.device,
    }


def _card(card: Card, view: View, *, is_own: bool) -> Json:
    return {
        "node_id": card.node_id,
        "is_self": is_own,
        "is_suspect": card.node_id in view.suspects,
        "grpc_address": card.grpc_address,
        "platform": card.platform,
        "memory_bytes": card.unified_memory_bytes,
        "age_s": round(view.ages.get(card.node_id) or 0.0, 1),
        "ttl_s": card.ttl_s,
        "models": [
            {
                "model_id": model.model_id,
                "role": _role_name(model.role),
                "quantization": model.quantization,
                "tokens_per_second": model.tokens_per_second,
            }
            for model in card.models
        ],
    }


def _role_name(role: int) -> str:
    try:
        return CardRole(role).name.lower()
    except ValueError:
        return str(role)


def _plan(view: View) -> Json:
    try:
        placed = plan_spec_decode_placement(view.cards, now=view.now, suspects=view.suspects)
    except PlacementError as none:
        fleet: Json = {"placement": None, "reason": none.message}
    else:
        fleet = {"placement": _placement(placed), "reason": ""}
    return {**fleet, "drafts": _drafts(view)}


def _placement(placed: SpecDecodePlacement) -> Json:
    return {
        "verifier_node": placed.verifier_node,
        "verifier_model": placed.verifier_model,
        "verifier_address": placed.verifier_address,
        "proposer_node": placed.proposer_node,
        "proposer_model": placed.proposer_model,
        "proposer_address": placed.proposer_address,
        "colocated": placed.colocated,
    }


def _drafts(view: View) -> Mapping[str, Json]:
    """Say, for each model decoded here, whom each policy would ask."""
    suspects = view.suspects
    return {
        facts.model_id: {
            policy: [
                source.name
                for source in choose_sources(
                    facts, policy, view.cards, now=view.now, suspects=suspects
                )
            ]
            for policy in ("auto", "peer")
        }
        for _, backend in view.models
        if backend is not None and (facts := backend.facts) is not None
    }
