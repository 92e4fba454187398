"""Rows of hidden states: contiguous, of one kind, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.draft import states as module
from kakeya.decoding.draft.states import HiddenStates

TEXT = b"".join(bytes([place, 0, place, 1]) for place in range(64))
PLACES = st.integers(0, 64)


def rows(first: int, end: int, drafter: str = "d") -> HiddenStates:
    """Of the tokens `first` to `end`, each with bytes of its own; two values a row."""
    end = max(first, end)
    return HiddenStates(drafter=drafter, first=first, width=2, data=TEXT[4 * first : 4 * end])


@given(PLACES, PLACES, PLACES, PLACES)
def test_every_row_stays_with_its_token(first: int, end: int, start: int, stop: int) -> None:
    cut = rows(first, end).between(start, stop)
    assert cut.data == TEXT[4 * cut.first : 4 * cut.end]
    wanted = set(range(first, end)) & set(range(start, stop))
    assert set(range(cut.first, cut.end)) == wanted


@given(PLACES, PLACES, PLACES, PLACES)
def test_rows_are_joined_where_there_is_no_gap(first: int, end: int, start: int, stop: int) -> None:
    held, more = rows(first, end), rows(start, stop)
    both = held.followed_by(more)
    assert both.data == TEXT[4 * both.first : 4 * both.end]
    assert both.end == more.end
    assert both.first == (held.first if held.first <= more.first <= held.end else more.first)


def test_rows_for_another_drafter_are_not_joined() -> None:
    assert rows(0, 4).followed_by(rows(4, 6, "other")) == rows(4, 6, "other")


def test_the_last_rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 12)
    assert rows(0, 4).followed_by(rows(4, 6)) == rows(3, 6)


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        (HiddenStates(drafter="d", first=0, width=0, data=b""), "have 0 values"),
        (HiddenStates(drafter="d", first=0, width=20_000, data=b""), "have 20000 values"),
        (HiddenStates(drafter="d", first=0, width=2, data=b"123"), "no multiple of 4"),
        (rows(3, 9), "of the tokens 3 to 9, and the text has 8"),
    ],
)
def test_what_are_no_rows_of_the_text_is_refused(states: HiddenStates, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        states.check(8)
    rows(3, 8).check(8)
