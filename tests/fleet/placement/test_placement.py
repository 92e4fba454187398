"""Placement (S4.11 to S4.14): one plan for one view, or a sentence on what is missing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import NotFound, PlacementError
from kakeya.core.units import GIB
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.placement.placement import SpecDecodePlacement, plan_spec_decode_placement
from tests.fleet.nodes import NOW, make_card, proposer, verifier
from tests.laws import law


def _plan(*cards: Card, **options: object) -> SpecDecodePlacement:
    return plan_spec_decode_placement(cards, now=NOW, **options)  # type: ignore[arg-type]


def test_splits_verifier_and_proposer_over_two_nodes() -> None:
    plan = _plan(
        make_card("a", models=[verifier("big", 30)], address="10.0.0.1:1"),
        make_card("b", models=[proposer("ngram")], address="10.0.0.2:1"),
    )
    assert (plan.verifier_node, plan.verifier_model) == ("a", "big")
    assert (plan.proposer_node, plan.proposer_model) == ("b", "ngram")
    assert (plan.verifier_address, plan.proposer_address) == ("10.0.0.1:1", "10.0.0.2:1")
    assert not plan.colocated


def test_throughput_dominates_then_memory_then_node_id() -> None:
    drafts = [proposer("d")]
    fast = make_card("z", models=[verifier("m", 50), *drafts], memory=8 * GIB)
    large = make_card("y", models=[verifier("m", 40), *drafts], memory=64 * GIB)
    small = make_card("x", models=[verifier("m", 40), *drafts], memory=16 * GIB)
    twin = make_card("w", models=[verifier("m", 40), *drafts], memory=16 * GIB)
    order = []
    cards = [twin, small, large, fast]
    while cards:
        plan = _plan(*cards)
        order.append(plan.verifier_node)
        cards = [card for card in cards if card.node_id != plan.verifier_node]
    assert order == ["z", "y", "w", "x"]


def test_two_models_of_one_node_are_told_apart_by_their_name() -> None:
    card = make_card("a", models=[verifier("m2", 5), verifier("m1", 5), proposer("d")])
    assert _plan(card).verifier_model == "m1"


def test_a_remote_proposer_is_preferred_to_a_faster_local_one() -> None:
    both = make_card("a", models=[verifier("m", 50), proposer("d", 900)])
    slow = make_card("b", models=[proposer("d", 10)])
    assert _plan(both, slow).proposer_node == "b"
    plan = _plan(both, slow, prefer_remote_proposer=False)
    assert (plan.proposer_node, plan.colocated) == ("a", True)


def test_colocation_is_last_resort() -> None:
    both = make_card("a", models=[verifier("m"), proposer("ngram")])
    plan = _plan(both, make_card("b", models=[verifier("x")]))
    assert plan.colocated
    assert (plan.verifier_node, plan.proposer_node) == ("a", "a")


def test_pinned_models_are_honoured() -> None:
    a = make_card("a", models=[verifier("fast", 90), proposer("ngram")])
    b = make_card("b", models=[verifier("wanted", 1), proposer("draft")])
    plan = _plan(a, b, verifier_model="wanted", proposer_model="draft")
    assert (plan.verifier_node, plan.proposer_node) == ("b", "b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verifier_model": "nope"}, "carries nope as verifier"),
        ({"proposer_model": "nope"}, "carries nope as proposer"),
    ],
)
def test_a_pinned_model_that_nobody_has_is_an_error(options: dict[str, str], words: str) -> None:
    card = make_card("a", models=[verifier("m"), proposer("ngram")])
    with pytest.raises(PlacementError, match=words):
        _plan(card, **options)


def test_no_candidate_is_an_error_and_never_a_plan_without_a_proposer() -> None:
    with pytest.raises(PlacementError, match="carries a verifier; 0 of 0"):
        _plan()
    with pytest.raises(PlacementError, match="carries a proposer; 1 of 1"):
        _plan(make_card("a", models=[verifier("m")]))
    assert issubclass(PlacementError, NotFound)


def test_expired_cards_are_left_out_even_of_an_old_snapshot() -> None:
    stale = make_card(
        "a", at=NOW - 120.5, is_plain=True, models=[verifier("m", 99), proposer("ngram")]
    )
    fresh = make_card("b", models=[verifier("m", 1), proposer("ngram")])
    plan = _plan(stale, fresh)
    assert (plan.verifier_node, plan.proposer_node) == ("b", "b")


def test_suspects_get_no_new_work() -> None:
    a = make_card("a", models=[verifier("m", 9), proposer("ngram")])
    b = make_card("b", models=[verifier("m", 1), proposer("ngram")])
    plan = _plan(a, b, suspects={"a"})
    assert (plan.verifier_node, plan.proposer_node) == ("b", "b")


def test_a_model_without_the_role_is_no_candidate() -> None:
    embedder = verifier("e")._replace(role=3)
    unknown = verifier("u", 1e9)._replace(role=42)
    card = make_card("a", models=[embedder, unknown, verifier("m"), proposer("ngram")])
    assert _plan(card).verifier_model == "m"


def test_render_is_one_line_with_the_numbers() -> None:
    line = _plan(
        make_card("a", models=[verifier("big", 33.15)], memory=24 * GIB),
        make_card("b", models=[proposer("ngram")]),
    ).render()
    assert line == (
        "verify big on a [33.1 tok/s, 24.0 GiB]; draft ngram on b [speed ?, memory ?] (remote)"
    )


cards = st.builds(
    make_card,
    st.sampled_from("abcd"),
    memory=st.sampled_from([0, 8 * GIB]),
    models=st.lists(
        st.builds(
            lambda make, name, speed: make(name, speed),
            st.sampled_from([verifier, proposer]),
            st.sampled_from(["m", "n"]),
            st.sampled_from([0.0, 5.0]),
        ),
        max_size=4,
    ),
)


@given(view=st.lists(cards, max_size=6, unique_by=lambda c: c.node_id), seed=st.integers(0, 99))
@law(1200)
def test_the_same_view_gives_the_same_plan_on_every_node(view: list[Card], seed: int) -> None:
    shuffled = list(view)
    random.Random(seed).shuffle(shuffled)
    try:
        plan = _plan(*view)
    except PlacementError as failure:
        with pytest.raises(PlacementError) as other:
            _plan(*shuffled)
        assert str(other.value) == str(failure)  # noqa: PT017 - compared with its twin
    else:
        assert _plan(*shuffled) == plan
        others = [card for card in view if card.node_id != plan.verifier_node and card.offers(2)]
        assert plan.colocated == (not others)
