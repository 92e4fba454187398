"""Parameters of a generation that no model could follow are refused where they are made."""

from __future__ import annotations

import math

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.generation.request import Sampling


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("temperature", -0.1, "finite and not below 0"),
        ("temperature", math.inf, "finite and not below 0"),
        ("temperature", math.nan, "finite and not below 0"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("min_p", -0.1, r"in 0\.\.1"),
        ("min_p", 1.01, r"in 0\.\.1"),
        ("min_p", math.nan, r"in 0\.\.1"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(
    name: str, value: float, right: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is {value:g}, it must be {right}") as no:
        Sampling(**{name: value})
    assert no.value.param == name


@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_a_temperature_at_or_near_zero_is_greedy(temperature: float) -> None:
    assert Sampling(temperature=temperature).is_greedy
    assert not Sampling(temperature=0.01).is_greedy
