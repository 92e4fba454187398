"""How many sequences run at the same time follows from the cost of a step by its rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.engine.steps.shared_forwards import LEAST_ROWS, paying_rows

OF_135M = {1: 56.0, 2: 68.0, 4: 75.0, 8: 97.0, 16: 135.0}
WITHOUT_BLAS = {1: 4.9, 2: 7.7, 4: 13.2, 8: 24.0, 16: 45.6}


@pytest.mark.parametrize(
    ("costs", "most", "expected"),
    [
        (OF_135M, 64, 64),
        (OF_135M, 4, 4),
        (WITHOUT_BLAS, 64, 8),
        ({1: 1.0, 2: 1.1}, 64, 64),
        ({}, 64, 64),
        ({1: 2.0, 8: 1.0}, 256, 256),
    ],
    ids=["pays", "set", "never_pays", "little_known", "unknown", "measured_wrongly"],
)
def test_rows_are_added_as_long_as_they_give_more_tokens(
    costs: dict[int, float], most: int, expected: int
) -> None:
    assert paying_rows(costs, most) == expected


@given(
    st.floats(0.0, 100.0), st.floats(0.001, 100.0), st.integers(1, 256), st.sampled_from((8, 16))
)
def test_a_dearer_row_never_means_more_rows(
    first_s: float, row_s: float, most: int, known: int
) -> None:
    def rows(each_s: float) -> int:
        costs = {1 << power: first_s + (1 << power) * each_s for power in range(5)}
        return paying_rows({rows: cost for rows, cost in costs.items() if rows <= known}, most)

    assert min(LEAST_ROWS, most) <= rows(2 * row_s) <= rows(row_s) <= most
