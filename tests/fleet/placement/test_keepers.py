"""The nodes that keep a prefix: as many as are wanted, alike at each node, and with few changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.placement.keepers import Keeping, keepers
from tests.laws import law

NODES = st.dictionaries(
    st.sampled_from([f"mini-{number}" for number in range(9)]), st.sampled_from(Keeping)
)
DIGESTS = st.binary(min_size=1, max_size=32)


@given(DIGESTS, NODES, st.integers(0, 12), st.sets(st.sampled_from(["mini-0", "mini-1"])))
@law(3600)
def test_so_many_of_the_nodes_that_can_are_chosen_those_with_it_first(
    digest: bytes, nodes: dict[str, Keeping], count: int, unable: set[str]
) -> None:
    chosen = keepers(digest, nodes, count, unable)
    able = nodes.keys() - unable
    assert len(chosen) == len(set(chosen)) == min(count, len(able))
    assert able.issuperset(chosen)
    left = able - set(chosen)
    if chosen and left:
        assert min(nodes[one] for one in chosen) >= max(nodes[one] for one in left)
    mixed = dict(sorted(nodes.items(), reverse=True))
    assert keepers(digest, mixed, count, unable) == chosen


@given(DIGESTS, NODES.filter(bool), st.integers(1, 4), st.data())
@law(3600)
def test_a_node_that_leaves_is_replaced_and_no_other_choice_changes(
    digest: bytes, nodes: dict[str, Keeping], count: int, data: st.DataObject
) -> None:
    chosen = keepers(digest, nodes, count)
    gone = data.draw(st.sampled_from(sorted(nodes)))
    left = {one: keeping for one, keeping in nodes.items() if one != gone}
    now = keepers(digest, left, count)
    assert set(now) >= set(chosen) - {gone}
    assert len(set(now) - set(chosen)) <= (gone in chosen)


@given(DIGESTS, NODES.filter(bool), st.integers(1, 4))
@law(3600)
def test_what_was_chosen_once_is_chosen_again_once_it_is_kept_there(
    digest: bytes, nodes: dict[str, Keeping], count: int
) -> None:
    chosen = keepers(digest, nodes, count)
    kept = {one: max(keeping, Keeping(one in chosen)) for one, keeping in nodes.items()}
    assert set(keepers(digest, kept, count)) == set(chosen)


def test_texts_are_spread_over_the_nodes() -> None:
    nodes = {f"mini-{number}": Keeping.NOTHING for number in range(4)}
    chosen = [keepers(str(text).encode(), nodes, 1)[0] for text in range(400)]
    assert all(60 <= chosen.count(node_id) <= 140 for node_id in nodes)
