"""The status of a node and its view of the fleet, as JSON: the source of `kakeya status`, `plan`.

Pure views of the agent's parts. Ages and times are seconds; speeds are tokens per second, 0 = not
measured.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import kakeya
from kakeya.backends.resident import ResidentModel
from kakeya.core.errors import PlacementError
from kakeya.core.figures import Json, as_json
from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import PROTOCOL_MAX, PROTOCOL_MIN, Card
from kakeya.fleet.cards.cards import CardRole as CardRole
from kakeya.fleet.cards.names import names_of
from kakeya.fleet.gossip.gossip import GossipStats
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.paths.endpoints import Route
from kakeya.fleet.placement.draft_sources import choose_sources
from kakeya.fleet.placement.placement import SpecDecodePlacement, plan_spec_decode_placement
from kakeya.fleet.placement.ring import describe_groups
from kakeya.fleet.view.conflicts import IdConflict
from kakeya.fleet.view.skew import WARN_S
from kakeya.fleet.view.suspicion import Doubt
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.spec import ModelRole, ModelSpec
from kakeya.memory.plugins import PluginReport
from kakeya.node.figures import gossip_figures


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The knowledge of the fleet half beside the cards, at one moment.

    By node id: `ages` seconds since a sign of life, `doubts` the state of each suspect, `skews`
    seconds by which a clock is ahead, `round_trips` milliseconds, None = not measured, `routes` the
    way in use to nodes with several. `sightings` None = mDNS is off.
    """

    ages: Mapping[NodeId, float | None]
    suspects: frozenset[NodeId]
    doubts: Mapping[NodeId, Doubt]
    gossip: GossipStats
    skews: Mapping[NodeId, float]
    is_clock_wrong: bool
    conflicts: Sequence[IdConflict]
    round_trips: Mapping[NodeId, float | None]
    routes: Mapping[NodeId, Route]
    sightings: int | None
    identity: Identity | None
    revoked: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The agent's parts at one moment; the own card is the first of `cards`.

    `not_serving`, `state_error` and `jobs_problem` are sentences, "" when all is well.
    """

    node_id: str
    grpc: str
    http: str
    listeners: Sequence[str]
    uptime_s: float
    now: float
    mono: float
    not_serving: str
    cards: Sequence[Card]
    fleet: FleetStatus
    models: Sequence[tuple[ModelSpec, ResidentModel | None]]
    memory: Json
    adapters: Json
    prefixes: Json
    precache: Json
    plugins: Sequence[PluginReport]
    backends: Sequence[str]
    """Problems of backends that are no engines, a sentence each."""
    damaged: Mapping[str, str]
    """Problems of damaged adapters, by name."""
    state_error: str
    jobs_problem: str = ""


def describe(view: NodeView) -> Json:
    """Describe the node, its models, its view of the fleet, and its plan for a generation."""
    own, fleet = view.cards[0], view.fleet
    return {
        "node": {
            "node_id": view.node_id,
            "label": own.label,
            "version": kakeya.__version__,
            "grpc": view.grpc,
            "http": view.http,
            "listeners": list(view.listeners),
            "pid": os.getpid(),
            "incarnation": own.incarnation,
            "platform": own.platform,
            "uptime_s": round(view.uptime_s, 1),
            "not_serving": view.not_serving,
        },
        "models": [_model(spec, backend, view.mono) for spec, backend in view.models],
        "memory": view.memory,
        "adapters": view.adapters,
        "prefixes": view.prefixes,
        "precache": view.precache,
        "fleet": {
            "identity": _identity(fleet, view.now),
            "nodes": [_card(card, view, is_own=card is own) for card in view.cards],
            "gossip": as_json(gossip_figures(fleet.gossip))
            | {"cards_dropped": sum(fleet.gossip.dropped.values())},
            "mdns_sightings": fleet.sightings,
            "rings": describe_groups(view.cards),
            "warnings": _warnings(view),
            "plan": _plan(view),
        },
    }


def _identity(fleet: FleetStatus, now: float) -> Json | None:
    identity = fleet.identity
    if identity is None:
        return None
    return {
        "fleet": identity.fleet,
        "role": identity.role.value,
        "is_authority": identity.is_authority,
        "certificate_days": round((identity.not_after_at - now) / 86400, 1),
        "revoked_nodes": len(fleet.revoked),
    }


def own_warnings(view: NodeView) -> list[str]:
    """List warnings about the node itself, a sentence each."""
    found = [view.not_serving] if view.not_serving else []
    found += [
        f"the model {spec.model_id} is not served: {backend.last_error}"
        for spec, backend in view.models
        if backend is not None and backend.state is ModelState.FAILED
    ]
    found += [
        f"the plug-in {report.name} ({report.origin}) is not used: {report.error}"
        for report in view.plugins
        if report.error is not None
    ]
    found += view.backends
    found += [f"the adapter {name}: {problem}" for name, problem in view.damaged.items()]
    if view.state_error:
        found.append(f"the state file cannot be written: {view.state_error}")
    if view.jobs_problem:
        found.append(f"jobs in the background: {view.jobs_problem}")
    return found


def _warnings(view: NodeView) -> list[str]:
    """List warnings for the owner, a sentence each."""
    fleet = view.fleet
    names = names_of(view.cards)
    found = own_warnings(view)
    rightful = {(card.node_id, address) for card in view.cards for address in card.addresses}
    for conflict in fleet.conflicts:
        if (conflict.node_id, conflict.address) in rightful:
            continue
        named = names.get(conflict.node_id, conflict.node_id)
        whose = "this node's id" if conflict.is_own else f"the id of {named}"
        mend = "let it join anew with" if fleet.identity else "give it another --node-id and"
        found.append(
            f"another process uses {whose} at {conflict.address}; stop one of them and {mend} a "
            "data directory of its own"
        )
    if view.node_id in fleet.revoked:
        found.append(
            "the fleet has removed this node, and its members refuse it; to come back, stop it "
            "and join with a new token (kakeya join TOKEN)"
        )
    if fleet.is_clock_wrong:
        found.append("the clock of this machine is wrong: most peers disagree with it")
    found += [
        f"the clock of {names.get(node_id, node_id)} is {skew:+.0f} s off this machine's"
        for node_id, skew in fleet.skews.items()
        if abs(skew) > WARN_S and not fleet.is_clock_wrong
    ]
    found += [
        f"{names[card.node_id]} speaks versions {card.protocol_min} to {card.protocol_max} of the "
        f"fleet's protocol and this node {PROTOCOL_MIN} to {PROTOCOL_MAX}; update the older one"
        for card in view.cards
        if not (card.is_plain or card.is_extended)
    ]
    found += [
        f"others reach {names.get(node_id, node_id)} and this node does not; "
        f"`kakeya doctor {node_id}` says why"
        for node_id, doubt in fleet.doubts.items()
        if doubt is Doubt.ASYMMETRIC
    ]
    found += [
        f"{names.get(route.node_id, route.node_id)} is reached over "
        f"{route.network or 'an unnamed network'}; its better link ({route.best}) does not answer"
        for route in fleet.routes.values()
        if route.is_downgraded
    ]
    return found


def _model(spec: ModelSpec, backend: ResidentModel | None, mono: float) -> Json:
    if backend is None:
        return {"model_id": spec.model_id, "role": spec.role.value, "state": "ready", "error": ""}
    facts = backend.facts
    return {
        "model_id": spec.model_id,
        "role": spec.role.value,
        "state": backend.state.value,
        "error": backend.last_error,
        "load": backend.load_status(mono),
        "canary": backend.check.status() if backend.check else None,
        "pid": backend.pid,
        "restarts": backend.restarts,
        "manifest": backend.manifest.describe(),
        "running": backend.running,
        "waiting": backend.waiting,
        **(_facts(facts) if facts else {}),
    }


def _facts(facts: ModelFacts) -> Json:
    return {
        "context_tokens": facts.context_tokens,
        "longest_tokens": facts.longest_tokens,
        "vocab_size": facts.vocab_size,
        "quantization": facts.quantization,
        "weight_bytes": facts.weight_bytes,
        "tokens_per_second": facts.tokens_per_second,
        "prefill_tokens_per_second": facts.prefill_tokens_per_second,
        "verify_ms": {rows: round(s * 1e3, 3) for rows, s in sorted(facts.forward_costs_s.items())},
        "device": facts.device,
    }


def _card(card: Card, view: NodeView, *, is_own: bool) -> Json:
    rtt_ms = view.fleet.round_trips.get(card.node_id)
    return {
        "node_id": card.node_id,
        "is_self": is_own,
        "label": card.label,
        "is_suspect": card.node_id in view.fleet.suspects,
        "doubt": view.fleet.doubts.get(card.node_id),
        "grpc_address": card.grpc_address,
        "endpoints": [way._asdict() for way in card.endpoints],
        "route": _route(view.fleet.routes.get(card.node_id)),
        "rtt_ms": rtt_ms and round(rtt_ms, 2),
        "skew_s": view.fleet.skews.get(card.node_id),
        "is_authority": card.is_authority,
        "is_careful": card.is_careful,
        "ring_address": card.ring_address,
        "ring": card.ring._asdict() if card.ring else None,
        "protocol": [card.protocol_min, card.protocol_max],
        "platform": card.platform,
        "memory_bytes": card.unified_memory_bytes,
        "age_s": round(view.fleet.ages.get(card.node_id) or 0.0, 1),
        "ttl_s": card.ttl_s,
        "models": [
            {
                "model_id": model.model_id,
                "role": _role_name(model.role),
                "capability": model.capability,
                "quantization": model.quantization,
                "tokens_per_second": model.tokens_per_second,
            }
            for model in card.models
        ],
    }


def _route(route: Route | None) -> Json | None:
    if route is None:
        return None
    return {
        "address": route.address,
        "network": route.network,
        "rtt_ms": round(route.rtt_ms, 2),
        "is_downgraded": route.is_downgraded,
        "best": route.best,
    }


def _role_name(role: int) -> str:
    try:
        return CardRole(role).name.lower()
    except ValueError:
        return str(role)


def _plan(view: NodeView) -> Json:
    try:
        placed = plan_spec_decode_placement(view.cards, now=view.now, suspects=view.fleet.suspects)
    except PlacementError as none:
        fleet: Json = {"placement": None, "reason": none.message}
    else:
        fleet = {"placement": _placement(placed), "reason": ""}
    return {**fleet, "drafts": _drafts(view), "rings": describe_groups(view.cards)}


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


def _drafts(view: NodeView) -> Mapping[str, Json]:
    """List, for each model decoded here, the sources that each policy would ask."""
    suspects = view.fleet.suspects
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
        for spec, backend in view.models
        if spec.role is not ModelRole.EMBEDDER
        and backend is not None
        and (facts := backend.facts) is not None
    }
