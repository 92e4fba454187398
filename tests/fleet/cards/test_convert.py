"""The wire of cards: split, join, round trips, and bytes that no peer should send."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, KakeyaError, Refused
from kakeya.fleet.cards.cards import (
    MAX_CACHES,
    CacheOffer,
    CardFault,
    Offer,
    OfferedModel,
)
from kakeya.fleet.cards.convert import MalformedCard, from_wire, join_cards, split_cards, to_wire
from kakeya.fleet.cards.disk_model import MAX_NAME_BYTES, MAX_ON_DISK, DiskModel
from kakeya.fleet.cards.ring_offer import RingOffer
from kakeya.v1 import distributed_pb2 as pb
from tests.fleet.nodes import NOW, make_wire, verifier
from tests.laws import law

text = st.text(max_size=40)
finite = st.floats(allow_nan=False, allow_infinity=False)
models = st.builds(
    OfferedModel,
    text,
    st.integers(-(2**31), 2**31 - 1),
    text,
    st.floats(0, 1e9),
    text,
    text,
)
compatibilities = st.builds(
    lambda model_id, tokens: pb.CacheCompatibility(
        model_id=model_id, block_size_tokens=tokens
    ).SerializeToString(deterministic=True),
    text,
    st.integers(0, 2**32 - 1),
)
counts = st.integers(0, 2**64 - 1)
caches = st.builds(
    CacheOffer, compatibilities, st.binary(max_size=300), counts, counts, counts, counts
)
ranks = st.integers(0, 2**32 - 1)
offers = st.builds(
    Offer,
    grpc_address=text,
    ring_address=text,
    platform=text,
    unified_memory_bytes=st.integers(0, 2**64 - 1),
    mlx_version=text,
    models=st.lists(models, max_size=4).map(tuple),
    ttl_s=finite,
    is_careful=st.booleans(),
    caches=st.lists(caches, max_size=4).map(tuple),
    ring=st.none() | st.builds(RingOffer, text, text, text, text, ranks, ranks),
    on_disk=st.lists(
        st.builds(DiskModel, st.text("ab/.", min_size=1, max_size=64), st.integers(0, 2**63)),
        max_size=MAX_ON_DISK,
    ).map(tuple),
)


@given(offer=offers, node_id=text, incarnation=st.integers(0, 2**64 - 1), at=finite)
@law(1200)
def test_an_offer_survives_the_wire(
    offer: Offer, node_id: str, incarnation: int, at: float
) -> None:
    card = from_wire(to_wire(node_id, offer, incarnation=incarnation, announced_at=at))
    assert (card.node_id, card.incarnation, card.announced_at) == (node_id, incarnation, at)
    assert (card.protocol_min, card.protocol_max, card.is_extended) == (1, 1, True)
    assert offer == Offer(
        grpc_address=card.grpc_address,
        ring_address=card.ring_address,
        platform=card.platform,
        unified_memory_bytes=card.unified_memory_bytes,
        mlx_version=card.mlx_version,
        models=card.models,
        ttl_s=card.ttl_s,
        is_careful=card.is_careful,
        caches=card.caches,
        ring=card.ring,
        on_disk=card.on_disk,
    )


def test_of_many_caches_the_first_count_and_of_a_large_filter_nothing() -> None:
    message = pb.NodeCapability(
        node_id="n",
        caches=[pb.CacheCapability(entry_count=n, bloom_filter=b"x" * 200) for n in range(20)],
    )
    message.caches[1].bloom_filter = b"x" * 2049
    card = from_wire(message.SerializeToString())
    assert [cache.blocks for cache in card.caches] == list(range(MAX_CACHES))
    assert [len(cache.filter) for cache in card.caches[:3]] == [200, 0, 200]


def test_of_many_models_on_a_disk_the_first_count_that_may_be_named() -> None:
    names = ["", "x" * (MAX_NAME_BYTES + 1), *(f"m{place}" for place in range(40))]
    on_disk = [pb.ModelOnDisk(model_id=name, bytes=7) for name in names]
    card = from_wire(pb.NodeCapability(node_id="n", on_disk=on_disk).SerializeToString())
    assert card.on_disk == tuple(DiskModel(f"m{place}", 7) for place in range(MAX_ON_DISK - 2))


def test_a_card_of_a_node_without_our_extensions_is_read() -> None:
    message = pb.NodeCapability(node_id="old", announced_at_unix=NOW, ttl_seconds=120)
    card = from_wire(message.SerializeToString())
    assert (card.incarnation, card.protocol_max, card.is_extended) == (0, 0, False)


@given(wires=st.lists(st.binary(max_size=300), max_size=20))
@law(1200)
def test_split_undoes_join(wires: list[bytes]) -> None:
    assert split_cards(join_cards(wires)) == wires


def test_join_is_the_typed_message() -> None:
    wires = [make_wire(f"n{i}", at=NOW + i, models=[verifier("m" * i)]) for i in range(40)]
    typed = pb.ExchangeCapabilitiesRequest(
        known_nodes=[pb.NodeCapability.FromString(wire) for wire in wires]
    )
    assert join_cards(wires) == typed.SerializeToString()
    assert split_cards(typed.SerializeToString()) == wires


def test_unknown_fields_of_the_batch_are_stepped_over() -> None:
    others = b"\x10\x07" + b"\x19" + bytes(8) + b"\x22\x03abc" + b"\x2d" + bytes(4)
    assert split_cards(others + join_cards([b"x"]) + others) == [b"x"]


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a",
        b"\x0a\x05abcd",
        b"\x0b",
        b"\x00\x00",
        b"\x22\x09x",
        b"\x0a" + b"\xff" * 11,
        b"\x19x",
    ],
)
def test_broken_framing_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidArgument):
        split_cards(message)


def test_a_flood_of_empty_cards_is_refused_early() -> None:
    with pytest.raises(Refused, match="4096"):
        split_cards(b"\x0a\x00" * 1_000_000)
    with pytest.raises(Refused, match=r"2\.0 MiB"):
        split_cards(b"\x0a\x00" * 2_000_000)


@given(message=st.binary(max_size=400))
@law(2000)
def test_no_bytes_escape_the_typed_errors(message: bytes) -> None:
    try:
        wires = split_cards(message)
    except KakeyaError:
        wires = [message]
    for wire in wires:
        with contextlib.suppress(MalformedCard):
            from_wire(wire)


def test_oversize_and_invalid_utf8_are_told_apart() -> None:
    with pytest.raises(MalformedCard) as oversize:
        from_wire(make_wire(platform="x" * 8192))
    assert oversize.value.fault is CardFault.OVERSIZE
    with pytest.raises(MalformedCard) as broken:
        from_wire(b"\x0a\x02\xff\xfe")
    assert broken.value.fault is CardFault.MALFORMED


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), -3.0])
def test_a_speed_that_does_not_sort_counts_as_not_measured(speed: float) -> None:
    card = from_wire(make_wire(models=[verifier("m", speed)]))
    assert card.models[0].tokens_per_second == 0.0
