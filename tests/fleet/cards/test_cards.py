"""Cards: their order, their faults, their end."""

from __future__ import annotations

import math

import pytest

from kakeya.fleet.cards.cards import CardFault, fault_of, is_dialable, is_valid_node_id
from kakeya.v1 import distributed_pb2 as pb
from tests.fleet.nodes import NOW, make_card, make_registry, make_wire, proposer, verifier


def test_a_later_stamp_is_newer() -> None:
    assert make_card(at=NOW + 1).is_newer_than(make_card(at=NOW))
    assert not make_card(at=NOW).is_newer_than(make_card(at=NOW + 1))


def test_the_incarnation_orders_before_the_stamp() -> None:
    restarted = make_card(incarnation=2, at=NOW - 3600)
    assert restarted.is_newer_than(make_card(incarnation=1, at=NOW))


def test_equal_stamps_are_ordered_by_content_in_one_direction_only() -> None:
    one, other = make_card(platform="a"), make_card(platform="b")
    assert one.is_newer_than(other) != other.is_newer_than(one)
    assert not one.is_newer_than(make_card(platform="a"))


def test_expiry_boundary_is_exclusive() -> None:
    card = make_card(at=NOW, ttl_s=120, is_plain=True)
    assert not card.is_expired(NOW + 120)
    assert card.is_expired(math.nextafter(NOW + 120, math.inf))
    assert fault_of(card, NOW + 120) is None
    assert fault_of(card, NOW + 120.001) is CardFault.EXPIRED


def test_the_stamp_of_a_card_that_came_with_a_beat_does_not_tell_its_age() -> None:
    card = make_card(at=NOW, ttl_s=120)
    assert not card.is_expired(NOW + 3600)
    assert fault_of(card, NOW + 3600) is CardFault.EXPIRED
    assert fault_of(card, NOW + 3600, is_beating=True) is None
    assert fault_of(card, NOW - 3600) is CardFault.FUTURE
    assert fault_of(card, NOW - 3600, is_beating=True) is None
    assert fault_of(card, NOW - 25 * 3600, is_beating=True) is CardFault.FUTURE


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"node_id": ""}, CardFault.BAD_ID),
        ({"node_id": "../x"}, CardFault.BAD_ID),
        ({"node_id": "a\\b"}, CardFault.BAD_ID),
        ({"node_id": "a\nb"}, CardFault.BAD_ID),
        ({"node_id": "x" * 257}, CardFault.BAD_ID),
        ({"node_id": "ü" * 129}, CardFault.BAD_ID),
        ({"at": math.nan}, CardFault.BAD_STAMP),
        ({"at": math.inf}, CardFault.BAD_STAMP),
        ({"at": -math.inf}, CardFault.BAD_STAMP),
        ({"at": NOW + 60.1}, CardFault.FUTURE),
        ({"ttl_s": 0.0}, CardFault.BAD_TTL),
        ({"ttl_s": -1.0}, CardFault.BAD_TTL),
        ({"ttl_s": 601.0}, CardFault.BAD_TTL),
        ({"ttl_s": math.nan}, CardFault.BAD_TTL),
        ({"ttl_s": math.inf}, CardFault.BAD_TTL),
        ({"incarnation": 2**63}, CardFault.BAD_INCARNATION),
    ],
)
def test_each_fault_is_named(fields: dict[str, object], fault: CardFault) -> None:
    card = make_card(**({"node_id": "peer"} | fields))  # type: ignore[arg-type]
    assert fault_of(card, NOW) is fault


def _of_size(field: str, size: int) -> bytes:
    """A card of which one part has a length, in bytes or in entries."""
    card = pb.NodeCapability.FromString(make_wire("peer", models=[verifier("m")]))
    way = card.endpoints.add(address="10.0.0.1:1", network="lan")
    match field:
        case "models":
            card.models.extend([card.models[0]] * (size - 1))
        case "endpoints":
            card.endpoints.extend([way] * (size - 1))
        case "card":
            rest = size - card.ByteSize() - 5  # two bytes of tag, three of length: not known here
            return card.SerializeToString() + b"\xfa\x3f" + varint(rest, 3) + bytes(rest)
        case "model_id" | "quantization" | "vocabulary_digest" | "capability":
            setattr(card.models[0], field, "x" * size)
        case "address" | "network":
            setattr(way, field, f"{'h' * (size - 2)}:1" if field == "address" else "x" * size)
        case _:
            setattr(card, field, "x" * size)
    return card.SerializeToString()


def varint(value: int, length: int) -> bytes:
    parts = [value >> 7 * i & 0x7F for i in range(length)]
    return bytes(part | 0x80 for part in parts[:-1]) + bytes(parts[-1:])


@pytest.mark.parametrize(
    ("field", "most", "fault"),
    [
        ("card", 8 * 1024, CardFault.OVERSIZE),
        ("models", 64, CardFault.TOO_MANY_MODELS),
        ("endpoints", 8, CardFault.TOO_MANY_ENDPOINTS),
        ("node_id", 256, CardFault.BAD_ID),
        ("label", 64, CardFault.BAD_STRING),
        ("platform", 256, CardFault.BAD_STRING),
        ("mlx_version", 256, CardFault.BAD_STRING),
        ("ring_address", 256, CardFault.BAD_STRING),
        ("grpc_address", 256, CardFault.BAD_STRING),
        ("model_id", 256, CardFault.BAD_STRING),
        ("quantization", 256, CardFault.BAD_STRING),
        ("vocabulary_digest", 256, CardFault.BAD_STRING),
        ("capability", 256, CardFault.BAD_STRING),
        ("network", 256, CardFault.BAD_STRING),
        ("address", 255, CardFault.BAD_ADDRESS),
    ],
)
def test_what_exceeds_a_limit_by_one_is_dropped_by_its_name(
    field: str, most: int, fault: CardFault
) -> None:
    for size, wanted in ((most, {}), (most + 1, {fault: 1})):
        wire = _of_size(field, size)
        report = make_registry().merge([wire], now=NOW, mono=0.0)
        assert report.dropped == wanted, (field, size, len(wire))


@pytest.mark.parametrize("at", [NOW + 60, NOW, NOW - 120])
def test_a_stamp_within_the_bounds_is_fine(at: float) -> None:
    assert fault_of(make_card(at=at), NOW) is None


def test_names_of_people_are_ids() -> None:
    assert is_valid_node_id("mini-attic")
    assert is_valid_node_id("Großmutters Mac")
    assert is_valid_node_id("x" * 256)


def test_offers_filters_by_role_and_name() -> None:
    card = make_card(models=[verifier("a"), proposer("a"), proposer("ngram")])
    assert [model.model_id for model in card.offers(2)] == ["a", "ngram"]
    assert [model.model_id for model in card.offers(2, "ngram")] == ["ngram"]
    assert card.offers(1, "ngram") == ()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50051", True),
        ("mini-attic.local:50051", True),
        ("[fe80::1%en0]:50051", True),
        ("", False),
        ("host", False),
        ("host:0", False),
        ("host:65536", False),
        ("unix:/tmp/engine.sock", False),
        ("dns:///evil:1", False),
        ("a b:1", False),
        ("host:1\n", False),
    ],
)
def test_only_host_and_port_are_dialled(address: str, expected: bool) -> None:
    assert is_dialable(address) is expected
