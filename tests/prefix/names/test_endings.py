"""Logits behind whole prompts: what they are named by, and which are kept."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.generation.retention import BlockClass
from kakeya.prefix.names.blocks import BlockChain
from kakeya.prefix.names.endings import Endings, ending_chain, ending_of
from kakeya.prefix.names.pieces import pieces_of

BLOCK = 4
SEED = bytes(range(32))
CHAIN = BlockChain(SEED, BLOCK)
TEXTS = st.lists(st.integers(0, 5), min_size=2, max_size=14)


def name(text: list[int], cuts: tuple[int, ...] = (), chain: BlockChain = CHAIN) -> bytes:
    inner = [cut for cut in cuts if 0 < cut < len(text) - 1]
    ending = ending_of(chain, pieces_of(chain, text, inner, inner[:1]), text)
    assert ending is not None
    assert ending.token_id == text[-1]
    return ending.id


def pieces_end(text: list[int], cuts: tuple[int, ...]) -> set[int]:
    """Where pieces of prefill end within all but the last token, beside the last of all."""
    inner = {cut for cut in cuts if 0 < cut < len(text) - 1}
    return inner | set(range(BLOCK, len(text) - 1, BLOCK))


@given(TEXTS, st.lists(st.integers(1, 12), max_size=3), TEXTS, st.lists(st.integers(1, 12)))
def test_names_are_equal_where_text_and_pieces_are(
    one: list[int], cuts: list[int], other: list[int], other_cuts: list[int]
) -> None:
    first, second = tuple(sorted({*cuts})), tuple(sorted({*other_cuts}))
    for text, places in ((other, second), (one, second), (other, first), (one, first)):
        is_same = text == one and pieces_end(text, places) == pieces_end(one, first)
        assert (name(text, places) == name(one, first)) == is_same


@given(TEXTS)
def test_no_name_is_that_of_a_block_or_of_another_model_or_owner(text: list[int]) -> None:
    names = {piece.id for piece in pieces_of(CHAIN, [*text, 0])}
    others = [BlockChain(bytes(32), BLOCK), BlockChain(SEED, BLOCK, b"key")]
    names |= {name(text, chain=chain) for chain in others}
    assert name(text) not in names
    assert len({ending_chain(chain).seed for chain in (CHAIN, others[0])} - {SEED}) == 2


def test_a_single_token_has_no_prompt_in_front() -> None:
    for text in ([], [3]):
        assert ending_of(CHAIN, pieces_of(CHAIN, text), text) is None
    with pytest.raises(InvalidArgument, match="outside 0"):
        ending_of(CHAIN, pieces_of(CHAIN, [1, 2]), [1, -2])


SIZE = 8


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(["find", "keep", "clear"]), st.integers(0, 7))),
)
def test_it_holds_what_was_used_last_within_its_bound(
    rows: int, steps: list[tuple[str, int]]
) -> None:
    endings, model = Endings(rows * SIZE + 3), OrderedDict[int, None]()
    for what, number in steps:
        key, logits = str(number).encode(), bytes([number + 1]) * SIZE
        if what == "find":
            assert endings.find(key) == (logits if number in model else b"")
            if number in model:
                model.move_to_end(number)
        elif what == "keep":
            is_new = rows > 0 and number not in model
            assert endings.keep(key, logits) == is_new
            if is_new:
                model[number] = None
            while len(model) > rows:
                model.popitem(last=False)
        elif number == 0:
            endings.clear()
            model.clear()
        assert (len(endings), endings.held_bytes) == (len(model), len(model) * SIZE)


KEYS = st.sampled_from("abcdef")
USES = st.lists(st.tuples(st.sampled_from(["find", "keep"]), KEYS, st.booleans()), max_size=40)


@given(st.integers(1, 4), USES)
def test_batch_requests_change_nothing_for_others(
    rows: int, uses: list[tuple[str, str, bool]]
) -> None:
    """Others find no less than if there were no batch requests at all."""
    both, alone = Endings(rows * SIZE), Endings(rows * SIZE)
    for what, key, is_batch in uses:
        block_class = BlockClass.BATCH if is_batch else BlockClass.USER
        for endings in (both,) if is_batch else (both, alone):
            if not endings.find(key.encode(), block_class) and what == "keep":
                endings.keep(key.encode(), key.encode() * SIZE, block_class)
        assert both.held_bytes == len(both) * SIZE <= rows * SIZE
    left = [key for key in "abcdef" if alone.find(key.encode())]
    assert [key for key in left if not both.find(key.encode())] == []


def test_a_sweep_of_batch_prompts_leaves_the_others_and_keeps_the_last_of_its_own() -> None:
    endings = Endings(4 * SIZE)
    endings.keep(b"talk", bytes(SIZE))
    for number in range(32):
        assert endings.keep(b"document %d" % number, bytes(SIZE), BlockClass.BATCH)
    assert endings.find(b"talk")
    kept = [number for number in range(32) if endings.find(b"document %d" % number)]
    assert kept == [29, 30, 31], "found by a person, they are of class batch no more"
    assert not endings.keep(b"document 32", bytes(SIZE), BlockClass.BATCH)
    assert endings.keep(b"next", bytes(SIZE))
    assert not endings.find(b"talk"), "the one of the longest time"


def test_what_is_larger_than_all_room_or_empty_costs_nobody_theirs() -> None:
    endings = Endings(2 * SIZE)
    assert endings.keep(b"small", bytes(SIZE))
    assert not endings.keep(b"large", bytes(2 * SIZE + 1))
    assert not endings.keep(b"empty", b"")
    assert endings.find(b"small")
    assert endings.held_bytes == SIZE
