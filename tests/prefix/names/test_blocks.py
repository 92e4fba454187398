"""Ids of blocks: equal prefixes and seeds have equal names, and nothing else has."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.prefix.names.blocks import ROOT, BlockChain

SEED = bytes(range(32))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
sizes = st.sampled_from((1, 2, 4, 8, 16))
keys = st.binary(max_size=80)


def by_the_book(history: list[int], size: int, key: bytes) -> list[bytes]:
    found, parent = [], bytes(32)
    for start in range(0, len(history) // size * size, size):
        said = SEED + parent + struct.pack(f"<{size}I", *history[start : start + size])
        parent = (
            hmac.new(key, said, hashlib.sha256).digest() if key else hashlib.sha256(said).digest()
        )
        found.append(parent)
    return found


@settings(max_examples=40, deadline=None)
@given(tokens, sizes, keys)
def test_ids_are_the_chain_of_the_wire(history: list[int], size: int, key: bytes) -> None:
    assert list(BlockChain(SEED, size, key).ids(history)) == by_the_book(history, size, key)


@settings(max_examples=40, deadline=None)
@given(tokens, tokens, sizes)
def test_histories_share_as_many_ids_as_whole_blocks(
    one: list[int], other: list[int], size: int
) -> None:
    chain = BlockChain(SEED, size)
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    for index, (mine, its) in enumerate(zip(chain.ids(one), chain.ids(other), strict=False)):
        assert (mine == its) == ((index + 1) * size <= shared)


@settings(max_examples=40, deadline=None)
@given(tokens, sizes, keys, st.none() | st.just(SEED))
def test_beginnings_are_named_as_the_tails_that_they_would_be(
    history: list[int], size: int, key: bytes, parent: bytes | None
) -> None:
    chain = BlockChain(SEED, size, key)
    named = chain.tail_ids(parent, history)
    assert len(named) == min(len(history), size - 1)
    for index, tail_id in enumerate(named):
        assert tail_id == chain.tail_id(parent, history[: index + 1])


@settings(max_examples=40, deadline=None)
@given(tokens, sizes)
def test_a_longer_history_keeps_the_ids_of_its_prefix(history: list[int], size: int) -> None:
    chain = BlockChain(SEED, size)
    whole = chain.ids(history)
    for length in range(len(history)):
        assert chain.ids(history[:length]) == whole[: length // size]


@settings(max_examples=40, deadline=None)
@given(tokens, sizes, keys)
def test_another_seed_or_key_shares_no_id(history: list[int], size: int, key: bytes) -> None:
    ids = set(BlockChain(SEED, size, key).ids(history))
    assert ids.isdisjoint(BlockChain(SEED[::-1], size, key).ids(history))
    assert ids.isdisjoint(BlockChain(SEED, size, key + b"x").ids(history))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), sizes, keys)
def test_a_tail_is_hashed_like_a_block(history: list[int], size: int, key: bytes) -> None:
    chain = BlockChain(SEED, size, key)
    ids = (None, *chain.ids(history))
    whole = len(ids) - 1
    if whole:
        last = history[(whole - 1) * size : whole * size]
        assert chain.tail_id(ids[-2], last) == ids[-1]
        assert chain.names(ids[-1] or b"", ids[-2], last)
    if rest := history[whole * size :]:
        named = chain.tail_id(ids[-1], rest)
        assert named not in ids
        assert chain.names(named, ids[-1], rest)
        assert not chain.names(named, ids[-1], [*rest[:-1], rest[-1] ^ 1])
        assert not chain.names(named, b"\xff" * 32, rest)
        assert not chain.names(named, ids[-1], [])


def test_nothing_before_the_first_block_is_32_zero_bytes() -> None:
    chain = BlockChain(SEED, 2)
    assert chain.tail_id(None, [7]) == chain.tail_id(ROOT, [7])
    assert chain.ids([1, 2])[0] == hashlib.sha256(SEED + bytes(32) + b"\1\0\0\0\2\0\0\0").digest()


@pytest.mark.parametrize("seed", [b"", bytes(31), bytes(33)])
def test_a_seed_of_another_length_is_refused(seed: bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"has {len(seed)} bytes; it must have 32"):
        BlockChain(seed, 256)


@pytest.mark.parametrize("size", [0, -1, 3, 255])
def test_a_block_is_a_power_of_two(size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"a block of {size} tokens"):
        BlockChain(SEED, size)


@pytest.mark.parametrize("wrong", [-1, 2**32, "seven", None])
def test_a_token_that_is_no_uint32_is_named(wrong: object) -> None:
    with pytest.raises(InvalidArgument, match=r"token id .* is outside") as caught:
        BlockChain(SEED, 2).ids([1, 2, wrong])  # type: ignore[list-item]
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("count", [0, 3])
def test_a_tail_fits_a_block(count: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{count} tokens are no block"):
        BlockChain(SEED, 2).tail_id(None, [1] * count)
