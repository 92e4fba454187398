"""The offer of a node: which models stand on its card, and as what."""

from __future__ import annotations

from dataclasses import replace

from kakeya.core.ids import ModelId
from kakeya.fleet.cards.cards import MAX_MODELS, CardRole, OfferedModel
from kakeya.fleet.cards.disk_model import MAX_ON_DISK, DiskModel
from kakeya.generation.facts import ModelFacts
from kakeya.generation.spec import ModelRole
from kakeya.node.card import NodeFacts, make_offer

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


def test_shared_backends_stand_last_as_many_as_there_is_room_for() -> None:
    many = [
        OfferedModel(ModelId(f"c{number}"), CardRole.TOOL, capability="text/commands")
        for number in range(24)
    ]
    assert make_offer(PLACE, [], relayed=many).models[1:] == tuple(many)
    painters = [f"painter{number}" for number in range(MAX_MODELS - 3)]
    full = make_offer(PLACE, [], painters, relayed=many).models
    assert len(full) == MAX_MODELS
    assert full[-2:] == tuple(many[:2])


def test_models_on_the_disk_stand_there_unless_they_are_offered() -> None:
    disk = tuple(DiskModel(ModelId(name), 7) for name in ("large", "kept", *"abcdefghijklmnopq"))
    offer = make_offer(replace(PLACE, on_disk=disk), [], unloaded=[(ModelRole.VERIFIER, "large")])
    assert offer.on_disk == disk[1 : MAX_ON_DISK + 1]
