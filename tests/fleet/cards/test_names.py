"""Names of nodes by their cards: each is of one node, whatever the labels are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.cards.names import names_of
from tests.fleet.nodes import make_card


def test_nodes_of_one_label_are_named_with_their_ids() -> None:
    cards = [make_card("a" * 52, label="mini"), make_card("b" * 52, label="mini"), make_card("two")]
    assert list(names_of(cards).values()) == ["mini (aaaaaaaa)", "mini (bbbbbbbb)", "two"]


_IDS = st.sampled_from(["a", "b", "a" * 9, "a" * 10, "b (a)", "a (aaaaaaaa)"])


@given(st.dictionaries(_IDS, _IDS))
def test_no_two_nodes_have_the_same_name(labels: dict[str, str]) -> None:
    names = names_of([make_card(node_id, label=label) for node_id, label in labels.items()])
    assert names.keys() == labels.keys()
    assert len(set(names.values())) == len(labels)
