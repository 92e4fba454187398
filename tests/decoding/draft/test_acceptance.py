from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.draft.acceptance import accept_block

tokens = st.lists(st.integers(0, 3), max_size=8)


def test_accepts_the_leading_tokens_that_agree():
    assert accept_block([4, 5, 6], [4, 5, 9, 1]) == 2


def test_accepts_all_of_a_draft_that_agrees():
    assert accept_block([4, 5, 6], [4, 5, 6, 1]) == 3


def test_a_later_agreement_does_not_count_after_a_mismatch():
    assert accept_block([4, 5, 6], [0, 5, 6, 1]) == 0


def test_an_empty_draft_is_a_plain_step():
    assert accept_block([], [3]) == 0


@pytest.mark.parametrize("selected", [[], [1], [1, 2, 3, 4]])
def test_refuses_a_selection_of_another_length(selected):
    with pytest.raises(InvalidArgument, match="one per row"):
        accept_block([1, 2], selected)


@settings(deadline=None)
@given(draft=tokens, data=st.data())
def test_what_is_accepted_is_the_longest_common_head(draft, data):
    size = len(draft) + 1
    selected = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    accepted = accept_block(draft, selected)
    assert draft[:accepted] == selected[:accepted]
    assert accepted == len(draft) or draft[accepted] != selected[accepted]


def test_every_draft_over_three_tokens_commits_what_plain_decoding_gives():
    """The rule against enumeration: a model that is a table of its last token."""
    for table in product(range(3), repeat=3):
        for draft in product(range(3), repeat=3):
            text = [0, *draft]
            selected = [table[token] for token in text]
            accepted = accept_block(draft, selected)
            committed = [*draft[:accepted], selected[accepted]]
            plain = [0]
            for _ in committed:
                plain.append(table[plain[-1]])
            assert committed == plain[1:]
