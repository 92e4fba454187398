"""Edits of logits in mlx have the bits of the reference, whatever rows are beside them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kakeya.decoding.processors.edits import LogitEdit, TokenEdits
from kakeya.decoding.processors.edits import edited as reference
from kakeya.mlx.selection import edited

VOCABULARY = 77
FLOATS = st.floats(-8, 8, width=32)


@st.composite
def token_edits(draw: st.DrawFn) -> TokenEdits:
    ids = draw(st.lists(st.integers(0, VOCABULARY - 1), unique=True, max_size=9))
    column = st.lists(FLOATS, min_size=len(ids), max_size=len(ids))
    factors = st.lists(st.sampled_from([0.5, 1, 1.3]), min_size=len(ids), max_size=len(ids))
    return TokenEdits(
        ids=np.array(ids, np.int32),
        biases=np.array(draw(column), np.float32),
        factors=np.array(draw(factors), np.float32),
        penalties=np.array(draw(column), np.float32),
    )


MASKS = st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3).map(
    lambda words: np.array(words, np.uint32)
)
EDITS = st.builds(LogitEdit, tokens=st.none() | token_edits(), allowed=st.none() | MASKS)


@given(
    edits=st.lists(EDITS, min_size=1, max_size=4),
    seed=st.integers(0, 99),
    kind=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
def test_a_row_in_a_block_has_the_bits_of_the_reference(edits, seed, kind):
    drawn = np.random.default_rng(seed).normal(size=(len(edits), VOCABULARY)) * 5
    logits = mx.array(drawn.astype(np.float32)).astype(kind)
    found = np.array(edited(logits, edits))
    for row, edit, given_logits in zip(
        found, edits, np.array(logits.astype(mx.float32)), strict=True
    ):
        assert row.tobytes() == reference(given_logits, edit).tobytes()
