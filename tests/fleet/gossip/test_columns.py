"""Columns of numbers against protobuf's own encoding, and the table that finds cards by keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, KakeyaError
from kakeya.fleet.gossip.columns import columns_from_wire, columns_to_wire, pack, unpack
from kakeya.fleet.gossip.messages import Digest, decode_digest, encode_digest
from kakeya.fleet.view.beats import Beats
from kakeya.fleet.view.keys import KeyTable
from kakeya.v1 import fleet_pb2 as pb
from tests.laws import law

numbers_of_any_length = st.lists(
    st.one_of(st.integers(0, 200), st.integers(0, 2**14), st.integers(0, 2**32 - 1)), max_size=40
)


def _beats(keys: list[int], numbers: list[int], tenths: list[int], *, proofs: bool) -> Beats:
    return Beats(
        np.array(keys, np.uint64),
        np.array(numbers, np.uint32),
        np.array(tenths, np.float64) / 10,
        np.array(keys[: len(tenths)] if proofs else [], np.uint64),
    )


def _message(beats: Beats, tenths: list[int]) -> pb.Heartbeats:
    return pb.Heartbeats(
        keys=beats.keys.astype("<u8").tobytes(),
        beats=beats.numbers.tolist(),
        age_ds=tenths,
        proofs=beats.proofs.astype("<u8").tobytes(),
    )


@given(numbers=numbers_of_any_length)
@law(500)
def test_numbers_are_packed_as_protobuf_packs_them(numbers: list[int]) -> None:
    message = pb.Heartbeats(beats=numbers).SerializeToString()
    packed = pack(np.array(numbers, np.uint64))
    assert message.endswith(packed)
    assert len(message) - len(packed) <= 4
    assert unpack(packed).tolist() == numbers


@given(
    keys=st.lists(st.integers(0, 2**64 - 1), unique=True, min_size=1, max_size=20),
    numbers=st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=20),
    told=st.integers(0, 20),
    proofs=st.booleans(),
)
@law(300)
def test_columns_are_byte_for_byte_what_protobuf_writes_and_reads(
    keys: list[int], numbers: list[int], told: int, proofs: bool
) -> None:
    tenths = [number % 5000 for number in numbers[: min(told, len(keys))]]
    beats = _beats(keys, numbers[: len(keys)], tenths, proofs=proofs)
    wire = _message(beats, tenths).SerializeToString()
    assert columns_to_wire(beats) == wire
    came = columns_from_wire(wire)
    assert came.keys.tolist() == keys
    assert came.numbers.tolist() == numbers[: len(keys)]
    assert came.ages_s.tolist() == pytest.approx(beats.ages_s.tolist())
    assert came.proofs.tolist() == beats.proofs.tolist()


def test_other_ways_to_write_the_same_columns_are_read_too() -> None:
    one = pb.Heartbeats(keys=bytes(8), beats=[300], age_ds=[7]).SerializeToString()
    unpacked = b"\x0a\x08" + bytes(8) + b"\x10\xac\x02" + b"\x18\x07"  # a varint for each number
    in_parts = pb.Heartbeats(keys=bytes(8), beats=[300]).SerializeToString() + b"\x1a\x01\x07"
    reordered = b"\x1a\x01\x07" + in_parts[: -len(b"\x1a\x01\x07")]
    newer = one + b"\x50\x01"  # a field that this build does not know
    long = b"\x0a\x08" + bytes(8) + b"\x10\xac\x82\x80\x80\x80\x80\x00" + b"\x18\x07"
    for wire in (one, unpacked, in_parts, reordered, newer, long):
        came = columns_from_wire(wire)
        assert (came.numbers.tolist(), came.ages_s.tolist()) == ([300], pytest.approx([0.7]))


def test_a_digest_is_read_wherever_its_beats_stand() -> None:
    beats = _beats([5, 6], [1, 2], [3, 4], proofs=False)
    wire = encode_digest(Digest(held=beats, revocations_version=9, sent_at=1.5))
    head = 2 + wire[1]
    for bytes_ in (wire, wire[head:] + wire[:head]):
        came = decode_digest(bytes_)
        assert came.held.keys.tolist() == [5, 6]
        assert (came.revocations_version, came.sent_at) == (9, 1.5)


@given(data=st.binary(max_size=60))
@law(1000)
def test_bytes_that_are_no_columns_are_a_typed_error(data: bytes) -> None:
    try:
        came = columns_from_wire(data)
    except KakeyaError:
        return
    assert len(came.keys) == len(came.numbers) >= came.told


@pytest.mark.parametrize("packed", [b"\x80", b"\x01\x80", b"\x80\x80\x80\x80\x80\x01"])
def test_numbers_that_break_off_or_are_too_long_are_refused(packed: bytes) -> None:
    with pytest.raises(InvalidArgument):
        unpack(packed)


@given(
    steps=st.lists(
        # Few keys, that share their lowest bits: every entry of the table is fought for.
        st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 40), st.integers(0, 99)),
        max_size=120,
    )
)
@law(300)
def test_a_table_of_keys_is_a_dictionary(steps: list[tuple[bool, int, int, int]]) -> None:
    table, truth = KeyTable(), dict[int, int]()
    for is_drop, high, low, place in steps:
        key = high << 60 | low
        if is_drop and key in truth:
            table.drop(key)
            del truth[key]
        elif not is_drop:
            table.put(key, place)
            truth[key] = place
    asked = [high << 60 | low for high in range(6) for low in range(41)]
    found = table.find(np.array(asked, np.uint64)).tolist()
    assert found == [truth.get(key, -1) for key in asked]
    assert len(table) == len(truth)
