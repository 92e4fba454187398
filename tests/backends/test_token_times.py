"""How long a token takes beside others, as generations have seen it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kakeya.backends.run_times import DecodedSpan, token_times
from kakeya.generation.facts import ModelFacts


def model(token_s: float = 0.0, prompt_token_s: float = 0.0) -> ModelFacts:
    return ModelFacts(
        model_id="m",
        model_path="",
        vocab_size=9,
        context_tokens=9000,
        eos_token_ids=(),
        tokens_per_second=1 / token_s if token_s else 0.0,
        prefill_tokens_per_second=1 / prompt_token_s if prompt_token_s else 0.0,
    )


def shared(rows: int, tokens: int, token_s: float, at: float) -> list[DecodedSpan]:
    """So many that began and ended together."""
    return [DecodedSpan(at, at + tokens * token_s, tokens, 0)] * rows


@given(st.floats(0.001, 1.0), st.floats(0.0, 0.95), st.sets(st.integers(1, 40), min_size=2))
def test_a_line_is_found_through_what_was_seen(
    alone_s: float, row_share: float, sizes: set[int]
) -> None:
    """A row more costs no more than one alone."""
    row_s, seen, at = row_share * alone_s, [], 0.0
    for rows in sorted(sizes):
        seen += shared(rows, 100, alone_s + row_s * (rows - 1), at)
        at = seen[-1].ended_mono + 1.0
    for facts in (model(), model(alone_s)):
        found = token_times(seen, len(seen), facts)
        assert found is not None
        for rows in (1, 7, 40):
            expected = alone_s + row_s * (rows - 1)
            assert found.token_s(rows) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_all_that_shared_count_though_only_the_newest_are_asked() -> None:
    """Of 8 that went together at 80 ms, 2; a step alone takes 10 ms."""
    found = token_times(shared(8, 100, 0.08, 0.0), 2, model(0.01))
    assert found is not None
    assert found.token_s(8) == pytest.approx(0.08)
    assert found.token_s(1) == pytest.approx(0.01)


def test_prompts_of_others_lengthen_no_token() -> None:
    """Two prompts of 50 tokens, 1 s each, came while 100 tokens were made in 12 s."""
    first = DecodedSpan(0.0, 12.0, 100, 0)
    others = [DecodedSpan(at, at + 0.001, 0, 50) for at in (2.0, 3.0)]
    found = token_times([*others, first], 1, model(prompt_token_s=0.02))
    assert found is not None
    assert found.token_s(1) == pytest.approx(0.1)


def test_nothing_is_known_of_a_model_that_was_never_measured() -> None:
    assert token_times([], 0, model()) is None
    found = token_times([], 0, model(0.25))
    assert found is not None
    assert found.token_s(9) == 0.25
