"""Logits behind whole prompts: those of the last prompts, within a bound."""

from __future__ import annotations

from collections import OrderedDict

import hypothesis.strategies as st
import mlx.core as mx
from hypothesis import given

from kakeya.mlx.endings import Endings

ROW_BYTES = 4 * 8


def logits(number: int, size: int = 8) -> mx.array:
    return mx.full((1, size), number, dtype=mx.float32)


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(["find", "keep", "shed"]), st.integers(0, 7))),
)
def test_it_holds_what_was_used_last_within_its_bound(
    rows: int, steps: list[tuple[str, int]]
) -> None:
    endings, model = Endings(rows * ROW_BYTES + 3), OrderedDict[int, None]()
    for what, number in steps:
        name = str(number).encode()
        if what == "find":
            found = endings.find(name)
            assert (found is not None) == (number in model)
            if found is not None:
                assert found[0, 0].item() == number
                model.move_to_end(number)
        elif what == "keep":
            endings.keep(name, logits(number))
            if rows and number not in model:
                model[number] = None
            while len(model) > rows:
                model.popitem(last=False)
        else:
            endings.shed(number * ROW_BYTES)
            for _ in range(min(number, len(model))):
                model.popitem(last=False)
        assert endings.held_bytes == len(model) * ROW_BYTES


def test_what_is_larger_than_all_room_costs_nobody_theirs() -> None:
    endings = Endings(2 * ROW_BYTES)
    endings.keep(b"small", logits(1))
    endings.keep(b"large", logits(2, 17))
    assert endings.find(b"large") is None
    assert endings.find(b"small") is not None
