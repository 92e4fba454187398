from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.prefix.peers.numbers import is_finite

TOKENS, HEADS, WIDTH = 4, 2, 3
ROW = HEADS * WIDTH
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}
NOT_FINITE = {
    "float16": (0x7C00, 0xFC00, 0x7C01, 0xFFFF),
    "bfloat16": (0x7F80, 0xFF80, 0x7F81, 0xFFFF),
    "float32": (0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF),
}


def layout(*arrays: list[object], state: tuple[list[object], ...] = ()) -> str:
    layers = [{"class": "KVCache", "arrays": list(arrays)}, {"class": "A", "arrays": list(state)}]
    return json.dumps({"format": 1, "layers": layers})


@given(st.sampled_from(sorted(WIDTHS)), st.integers(0, 2 * TOKENS * ROW - 1), st.data())
def test_one_number_that_is_not_finite_is_found_wherever_it_lies(dtype, place, data):
    array: list[object] = [dtype, HEADS, WIDTH]
    size = WIDTHS[dtype]
    values = np.zeros(2 * TOKENS * ROW, f"<u{size}")
    largest = NOT_FINITE[dtype][0] - 1
    values[:] = data.draw(st.integers(0, largest))
    assert is_finite(bytearray(values.tobytes()), TOKENS, layout(array, array))
    values[place] = data.draw(st.sampled_from(NOT_FINITE[dtype]))
    assert not is_finite(bytearray(values.tobytes()), TOKENS, layout(array, array))


def test_numbers_are_looked_for_where_the_layout_says_that_they_are():
    quantized: list[object] = ["uint32", HEADS, WIDTH]
    scales: list[object] = ["float16", HEADS, 1]
    said = layout(quantized, scales, state=(["float32", [5]],))
    weights = np.full(TOKENS * ROW, 0xFFFFFFFF, "<u4").tobytes()  # no floating point
    good, bad = np.zeros(TOKENS * HEADS, "<u2"), np.zeros(TOKENS * HEADS, "<u2")
    bad[-1] = 0x7C00
    state = np.zeros(5, "<f4")
    assert is_finite(bytearray(weights + good.tobytes()), TOKENS, said)
    assert not is_finite(bytearray(weights + bad.tobytes()), TOKENS, said)
    assert is_finite(bytearray(weights + good.tobytes() + state.tobytes()), TOKENS, said)
    state[4] = np.nan
    assert not is_finite(bytearray(weights + good.tobytes() + state.tobytes()), TOKENS, said)


@pytest.mark.parametrize(
    "said", ["", "sha256:" + 64 * "0", "[]", '{"format": 2, "layers": []}', '{"format": 1}']
)
def test_of_a_layout_that_is_not_known_nothing_is_said(said):
    assert is_finite(bytearray(b"\xff" * 64), TOKENS, said)
