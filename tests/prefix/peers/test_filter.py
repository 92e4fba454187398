"""A filter never denies what it holds, and seldom allows what it does not."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.prefix.peers.filter import MAX_BITS, MAX_BYTES, Filter

ids = st.lists(st.binary(min_size=32, max_size=32), max_size=30)
widths = st.integers(1, MAX_BITS // 8).map(lambda n: 8 * n)


def numbered(start: int, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{n}".encode()).digest() for n in range(start, start + count)]


@settings(max_examples=50, deadline=None)
@given(ids, widths)
def test_what_is_held_is_never_denied(held: list[bytes], bits: int) -> None:
    made = Filter.of(held, bits)
    assert all(map(made.may_hold, held))


@settings(max_examples=50, deadline=None)
@given(ids, widths)
def test_a_card_says_the_same_filter(held: list[bytes], bits: int) -> None:
    made = Filter.of(held, bits)
    assert len(made.to_bytes()) <= MAX_BYTES
    assert Filter.from_bytes(made.to_bytes()) == made


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=64) | st.binary(min_size=2040, max_size=2060))
def test_whatever_a_card_says_is_read_or_refused(said: bytes) -> None:
    try:
        read = Filter.from_bytes(said)
    except PeerProtocol:
        return
    assert read.to_bytes() == said
    read.may_hold(bytes(32))


@settings(max_examples=20, deadline=None)
@given(ids)
def test_the_order_of_ids_and_repetition_do_not_matter(held: list[bytes]) -> None:
    assert Filter.of(held) == Filter.of([*reversed(held), *held])


def test_an_empty_one_denies_everything() -> None:
    assert not any(map(Filter.of([]).may_hold, numbered(0, 100)))
    assert Filter.of([]).error_rate == 0.0


@pytest.mark.parametrize(("held", "most"), [(500, 0.001), (2_000, 0.03), (4_000, 0.20)])
def test_few_of_those_that_are_not_held_are_allowed(held: int, most: float) -> None:
    made = Filter.of(numbered(0, held))
    allowed = sum(map(made.may_hold, numbered(held, 10_000))) / 10_000
    assert allowed < most
    assert made.error_rate == pytest.approx(allowed, rel=0.2, abs=0.002)


@pytest.mark.parametrize("bits", [0, 4, 12, MAX_BITS + 8])
def test_a_width_that_cannot_be_is_refused(bits: int) -> None:
    with pytest.raises(InvalidArgument, match=f"a filter of {bits} bits"):
        Filter.of([], bits)


@pytest.mark.parametrize("said", [b"", b"\1\1", b"\1\1" + bytes(MAX_BYTES)])
def test_rubbish_of_a_wrong_size_is_refused(said: bytes) -> None:
    with pytest.raises(PeerProtocol, match=f"a filter of {len(said)} bytes"):
        Filter.from_bytes(said)


@pytest.mark.parametrize("said", [b"\2\1\0", b"\1\0\0", b"\1\x09\0"])
def test_another_version_is_refused(said: bytes) -> None:
    with pytest.raises(PeerProtocol, match="version 1 with 1 to 8 is known"):
        Filter.from_bytes(said)
