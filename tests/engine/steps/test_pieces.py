"""Where prefill's pieces end, and what KV of other pieces may be gone on from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kakeya.engine.steps.pieces import Pieces, grid_floor
from tests.engine.child_engine import ToyModel

FACTS = dataclasses.replace(
    ToyModel("", Path()).facts,
    kv_block_tokens=64,
    prefill_chunk_tokens=64,
    prefill_grid=((0, 32), (128, 16)),
)
TOTALS = st.integers(0, 400)
CUTS = st.lists(st.integers(-5, 450), max_size=6)


def ends_of(pieces: Pieces) -> list[int]:
    """As prefill goes from one to the next."""
    ends = [0]
    while ends[-1] < pieces.total:
        ends.append(pieces.end(ends[-1]))
    return ends


@given(TOTALS, CUTS)
def test_pieces_end_on_the_grid_at_cuts_and_with_the_prompt(total: int, cuts: list[int]) -> None:
    pieces = Pieces(FACTS, total, cuts)
    ends = ends_of(pieces)
    grid = {place for place in range(total + 1) if grid_floor(FACTS, place) == place}
    inner = {cut for cut in cuts if 0 < cut < total}
    assert set(ends) == grid | inner | {0, total}
    for place in range(total + 1):
        assert pieces.is_end(place) == (place in ends)
        assert pieces.floor(place) == max(grid | inner, key=lambda end: (end <= place, end))


@given(TOTALS, CUTS, st.integers(0, 400), st.booleans(), CUTS, st.booleans())
def test_kv_is_gone_on_from_where_a_piece_ended_and_ends(
    total: int, cuts: list[int], tokens: int, ended: bool, others: list[int], alike: bool
) -> None:
    pieces, tokens = Pieces(FACTS, total, cuts), min(tokens, total)
    found = pieces.usable(tokens, ended=ended)
    ends = set(ends_of(pieces))
    assert found in ends
    if found == tokens:
        assert ended or grid_floor(FACTS, tokens) == tokens
    else:
        assert not any(found < end < tokens for end in ends - {total})
    # And for KV of a request that was cut otherwise.
    theirs = Pieces(FACTS, 500, [*cuts, *others] if alike else others)
    agreed = pieces.agreed(theirs.cuts, tokens)
    assert agreed in ends
    assert agreed in ends_of(theirs) or agreed == 0
    assert {end for end in ends if end <= agreed} == {e for e in ends_of(theirs) if e <= agreed}


@given(TOTALS, CUTS, st.integers(0, 400))
def test_where_pieces_are_of_no_account_every_place_will_do(
    total: int, cuts: list[int], tokens: int
) -> None:
    pieces = Pieces(dataclasses.replace(FACTS, prefill_grid=()), total, cuts)
    assert pieces.usable(tokens, ended=False) == pieces.floor(tokens) == tokens
