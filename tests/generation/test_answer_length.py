"""What past answers say of the length of one that goes on."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kakeya.generation.answer_length import AnswerLengths

PAST = st.lists(st.tuples(st.integers(1, 500), st.booleans()), max_size=40)


def known(past: list[tuple[int, bool]]) -> AnswerLengths:
    lengths = AnswerLengths()
    for tokens, is_whole in past:
        lengths.add(tokens, is_whole=is_whole)
    return lengths


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(0, 500))
def test_of_whole_answers_the_share_counts(past: list[int], tokens: int) -> None:
    lengths = known([(one, True) for one in past])
    longer = sum(one > tokens for one in past) / len(past)
    assert lengths.share_longer(tokens) == pytest.approx(longer, abs=1e-9)


@given(PAST, st.integers(0, 300), st.integers(0, 600), st.integers(0, 600))
def test_going_on_is_a_probability_that_falls_to_nothing_at_the_bound(
    past: list[tuple[int, bool]], made: int, most: int, tokens: int
) -> None:
    lengths = known(past)
    sooner, later = (lengths.goes_on(made, most, at) for at in (tokens, tokens + 10))
    assert 0 <= later <= sooner <= 1
    assert lengths.goes_on(made, most, max(0, most - made)) == 0


def test_an_answer_that_was_cut_off_says_nothing_of_what_comes_behind() -> None:
    """Half of those that got to 200 tokens ended there, however many were cut off at 50."""
    lengths = known([(50, False)] * 90 + [(200, True)] * 5 + [(400, True)] * 5)
    assert lengths.share_longer(100) == 1.0
    assert lengths.share_longer(200) == pytest.approx(0.5)
    assert lengths.goes_on(50, 1000, 160) == pytest.approx(0.5)


def test_an_answer_longer_than_any_goes_on_to_its_bound() -> None:
    assert known([(100, True)]).goes_on(120, 500, 300) == 1.0
    assert known([]).goes_on(0, 500, 499) == 1.0
