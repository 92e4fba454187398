"""Stop strings cut the same however a text is cut into pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.text.stops import StopMatcher
from tests.text.texts import SIZES, cut


def by_character(text: str, stops: list[str]) -> tuple[str, bool]:
    """The law in its plainest form: the first stop string that completes cuts before itself."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - len(max(hits, key=len))], True
    return text, False


@given(
    st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), SIZES
)
@settings(max_examples=300)
def test_a_stop_string_cuts_the_same_in_any_pieces(text, stops, sizes):
    if not stops:
        return
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in cut(text, sizes))
    assert shown + matcher.finish() == by_character(text, stops)[0]
    assert matcher.is_stopped == by_character(text, stops)[1]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1))
def test_what_can_no_longer_be_a_stop_is_shown_at_once(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += matcher.feed(character)
        if matcher.is_stopped:
            return
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


SPECIAL = {"<|end|>": 7, "<|end|>x": 8, "<s>": 9}


def matched(stop: str, *said: str | int) -> tuple[str, bool]:
    matcher = StopMatcher([stop], SPECIAL)
    shown = "".join(
        matcher.feed(one if isinstance(one, str) else matcher.sign(one)) for one in said
    )
    return shown + matcher.finish(), matcher.is_stopped


def test_a_special_token_stops_by_its_id():
    assert matched("<|end|>", "a", 7, "b") == ("a", True)
    assert matched("<|end|>", "a", 9, "b") == ("ab", False)
    assert StopMatcher(["<|end|>", "x<s>"], SPECIAL).token_ids == {7}


def test_a_stop_string_may_contain_a_special_token():
    assert matched("\n<|end|>", "a\n", 7, "b") == ("a", True)
    assert matched("<s>x", "a", 9, "x", "b") == ("a", True)
    assert matched("<|end|>x", "a", 7, "x") == ("ax", False)  # the longer token is meant
    assert matched("\n<|end|>", "a\n", 9, "b") == ("a\nb", False)
    assert matched("\n<|end|>", "a\n") == ("a\n", False)


def test_a_special_token_that_is_spelled_as_text_stops_too():
    assert matched("<|end|>", "a<|en", "d|>b") == ("a", True)
    assert matched("<|end|>\n", "a<|end|>\nb") == ("a", True)
