"""The n-gram source of a text: it drafts what the index says, and is silent where that is vain."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kakeya.decoding.ngram.ngram import LENGTHS, NGramIndex
from kakeya.decoding.ngram.source import LOOK_TOKENS, NGramSource

texts = st.lists(st.integers(0, 3), max_size=60)


@given(text=texts, passed=st.lists(st.booleans(), min_size=60, max_size=60))
def test_a_match_is_passed_over_only_after_one_as_long_was_vain_and_none_came_true(
    text: list[int], passed: list[bool]
) -> None:
    """Against the rule as it is said, on an index that is asked at every token, and where nothing
    was offered for 16 tokens at every eighth."""
    source, index = NGramSource(), NGramIndex()
    vain = quiet = 0
    waiting: list[int] = []
    for token, passes in zip(text, passed, strict=False):
        source.extend((token,))
        waiting.append(token)
        if quiet >= 16 and len(waiting) < LOOK_TOKENS:
            assert not source.has_offer
            assert source.draft(4) is None
            continue
        expected, _ = index.next_token()
        if waiting[0] == expected:
            vain = quiet = 0
        index.extend(waiting)
        quiet += len(waiting)
        waiting.clear()
        followed, match = index.next_token()
        assert (followed is None) == (match == 0)
        assert source.has_offer == (match > vain)
        if source.has_offer:
            quiet = 0
        draft = source.draft(4)
        assert (draft is not None) == source.has_offer
        if draft is not None:
            assert (list(draft.tokens), draft.match_length) == index.draft(4)
            assert draft.tokens[0] == followed
        if passes:
            source.pass_over()
            vain = max(vain, match)
            assert not source.has_offer


@given(seed=st.integers(0, 1000), vocab=st.sampled_from((50, 300, 3000)))
def test_text_by_chance_gets_a_look_for_each_length_and_match_that_came_true(
    seed: int, vocab: int
) -> None:
    rng = random.Random(seed)
    source = NGramSource()
    looks = hits = 0
    expected = -1
    for _ in range(200):
        token = rng.randrange(vocab)
        hits += token == expected
        source.extend((token,))
        draft = source.draft(16)
        if draft is not None:
            looks += 1
            source.pass_over()
            expected = draft.tokens[0]
        elif (followed := source._expected) is not None:
            expected = followed
    assert looks <= len(LENGTHS) * (1 + hits)


@given(
    before=st.lists(st.integers(0, 99), min_size=1, max_size=80),
    span=st.lists(st.integers(100, 999), min_size=12, max_size=20, unique=True),
)
def test_a_copied_span_is_drafted_from_its_second_token_on(
    before: list[int], span: list[int]
) -> None:
    """However vain everything was before it: the first token that comes true opens it. Behind a
    text that offered nothing for long, with the second look at the latest."""
    source = NGramSource()
    for token in [*span, *before]:
        source.extend((token,))
        source.pass_over()
    looks_at_each = len(span) + len(before) < 16
    is_open = False
    for at, token in enumerate(span[:-1]):
        source.extend((token,))
        draft = source.draft(4)
        assert not is_open or draft is not None, "it stays open"
        is_open = draft is not None
        assert is_open or at < (1 if looks_at_each else 2 * LOOK_TOKENS)
        if at and draft is not None:
            assert draft.tokens[0] == span[at + 1]


def test_nothing_to_draft_is_no_draft() -> None:
    source = NGramSource()
    assert source.draft(4) is None
    source.extend(())
    source.extend((1, 2, 3))
    assert not source.has_offer
    assert source.draft(4) is None
    source.extend((1,))
    assert source.draft(0) is None
