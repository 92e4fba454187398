"""The offer of a node: which models stand on its card, and as what."""

from __future__ import annotations

from kakeya.fleet.cards.cards import MAX_MODELS, CardRole
from kakeya.generation.facts import ModelFacts
from kakeya.generation.spec import ModelRole
from kakeya.node.card import MOST_RELAYED, NodeFacts, make_offer

PLACE = NodeFacts(
    grpc_address="10.0.0.1:1", platform="linux", unified_memory_bytes=1 << 30, ttl_s=120.0
)


def test_models_stand_in_their_roles_and_those_that_draw_as_tools_with_a_capability() -> None:
    words = ModelFacts(
        model_id="words",
        model_path="/words",
        vocab_size=9,
        context_tokens=9,
        eos_token_ids=(),
        quantization="4bit",
    )
    cold = [(ModelRole.VERIFIER, "large"), (ModelRole.EMBEDDER, "vectors")]
    offer = make_offer(PLACE, [(ModelRole.VERIFIER, words)], ["painter"], cold)
    assert [(one.model_id, one.role, one.capability) for one in offer.models] == [
        ("words", CardRole.VERIFIER, ""),
        ("large", CardRole.VERIFIER, ""),
        ("vectors", CardRole.EMBEDDER, ""),
        ("painter", CardRole.TOOL, "image"),
        ("ngram", CardRole.PROPOSER, ""),
    ]


def test_shared_backends_are_tools_as_many_as_there_is_room_for() -> None:
    backends = [("clouds", "cloud:west/*"), ("commands", "x" * 200), ("commands", "up")]
    offer = make_offer(PLACE, [], relayed=backends)
    assert [(one.model_id, one.role, one.capability) for one in offer.models[1:]] == [
        ("cloud:west/*", CardRole.TOOL, "text/clouds"),
        ("up", CardRole.TOOL, "text/commands"),
    ]
    many = [("commands", f"c{number}") for number in range(100)]
    assert len(make_offer(PLACE, [], relayed=many).models) == 1 + MOST_RELAYED
    painters = [f"painter{number}" for number in range(MAX_MODELS - 3)]
    assert len(make_offer(PLACE, [], painters, relayed=many).models) == MAX_MODELS
