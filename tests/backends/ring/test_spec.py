"""A group survives the wire and the file of wishes; what is no group is refused with its value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.ring.spec import RingSeat, RingSpec
from kakeya.core.errors import ConfigError, InvalidArgument

GROUP = RingSpec(
    name="big", source="org/big", split="tensor", seats=(RingSeat(node="a"), RingSeat(node="b"))
)


@st.composite
def groups(draw: st.DrawFn) -> RingSpec:
    split = draw(st.sampled_from(["tensor", "pipeline"]))
    nodes = draw(st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=6, unique=True))
    has_layers = split == "pipeline" and draw(st.booleans())
    layers = st.integers(1, 99) if has_layers else st.just(0)
    seats = tuple(
        RingSeat(node=node, lend_bytes=draw(st.integers(0, 2**50)), layers=draw(layers))
        for node in nodes
    )
    return RingSpec(name="big", source=draw(st.text()), split=split, seats=seats)


@given(groups())
def test_a_group_survives_the_wire_and_the_file(spec: RingSpec) -> None:
    assert RingSpec.from_wire(spec.to_wire()) == spec
    assert RingSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert sum(spec.shares()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "no name"}, "'no name' names no group"),
        ({"split": "halves"}, "split is 'halves'; it is tensor or pipeline"),
        ({"seats": (RingSeat(node="a"),)}, "2 to 32 ranks, and 1 nodes are named"),
        ({"seats": (RingSeat(node="a"), RingSeat(node="a"))}, "node a is named twice"),
        (
            {"seats": (RingSeat(node="a", layers=3), RingSeat(node="b", layers=1))},
            "layers are",
        ),
    ],
)
def test_what_is_no_group_is_refused(changes: dict[str, Any], said: str) -> None:
    fields = {"name": "big", "source": "org/big", "split": "tensor", "seats": GROUP.seats}
    with pytest.raises(InvalidArgument, match=said):
        RingSpec(**(fields | changes)).check()


@pytest.mark.parametrize(
    "damage", [{"name": "a b"}, {"seats": None}, {"seats": [{}]}, {"seats": [{"x": 1}] * 2}]
)
def test_a_wish_that_is_none_is_a_fault_of_its_file(damage: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no ring group"):
        RingSpec.from_json(GROUP.to_json() | damage)
