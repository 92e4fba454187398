from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.weights.choice import PulledModel, choose, sources_of, to_remove
from kakeya.weights.partial import DiskRefused
from kakeya.weights.peers import WeightsOffer, WeightsPeer

A, B = WeightsPeer("a", "mini-a", "a:1"), WeightsPeer("b", "mini-b", "b:1")


def offer(name: str, digest: str, *, is_whole: bool = True) -> WeightsOffer:
    return WeightsOffer(name, 10, digest, is_whole)


def test_one_digest_under_the_name_is_the_model_that_is_meant() -> None:
    offers = {A: [offer("m", "1"), offer("n", "2")], B: [offer("m", "1", is_whole=False)]}
    assert choose("m", offers).digest == "1"
    assert sources_of("1", offers) == {A: True, B: False}


def test_a_source_may_have_it_by_another_name() -> None:
    assert sources_of("1", {A: [offer("other", "1")]}) == {A: True}


def test_unlike_models_of_one_name_are_told_apart_by_the_caller() -> None:
    with pytest.raises(InvalidArgument, match="1 at mini-a; 2 at mini-b; say which by --from"):
        choose("m", {A: [offer("m", "1")], B: [offer("m", "2")]})


def test_what_has_no_digest_yet_is_read_or_waited_for() -> None:
    assert choose("m", {A: [offer("m", "")]}).unhashed == (A,)
    assert choose("m", {A: [offer("m", "", is_whole=False)]}).coming == {A: False}
    begun = replace(offer("m", "", is_whole=False), is_begun=True)
    assert choose("m", {A: [begun]}).coming == {A: True}
    assert choose("m", {A: [offer("x", "")]}) == choose("m", {})


models = st.lists(
    st.builds(
        PulledModel,
        path=st.uuids().map(str),
        bytes=st.integers(0, 100),
        used_at=st.floats(0, 10),
        is_spared=st.booleans(),
    ),
    max_size=8,
)


@given(models, st.integers(0, 200), st.integers(0, 300))
def test_a_clean_up_removes_the_oldest_no_more_than_needed_and_never_what_is_spared(
    pulled: list[PulledModel], needed: int, budget: int
) -> None:
    by_path = {one.path: one for one in pulled}
    try:
        gone = to_remove(pulled, needed, budget)
    except DiskRefused:
        spared = sum(one.bytes for one in pulled if one.is_spared)
        assert budget
        assert spared + needed > budget
        return
    assert not any(by_path[path].is_spared for path in gone)
    left = sum(one.bytes for one in pulled if one.path not in gone)
    if not budget:
        assert gone == []
        return
    assert left + needed <= budget
    if gone:
        assert left + by_path[gone[-1]].bytes + needed > budget
        newest_gone = max(by_path[path].used_at for path in gone)
        kept = [one for one in pulled if one.path not in gone and not one.is_spared and one.bytes]
        assert all(one.used_at >= newest_gone for one in kept)
