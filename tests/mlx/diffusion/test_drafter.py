"""Drafts of blocks: their form, whatever the text and the order in which texts come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.mlx.diffusion.drafter import BlockDiffusionDrafter, window_start
from tests.mlx.diffusion.rig import SMALL, network

NETWORK = network()
PLACES = st.integers(0, 60)
TEXTS = st.lists(st.integers(0, SMALL.vocab_size - 1), min_size=1, max_size=80)


def drafter() -> BlockDiffusionDrafter:
    return BlockDiffusionDrafter(NETWORK, "m")


def draft(prefix: list[int], size: int, steps: int = 1, **terms: object) -> Draft:
    given_terms = {"seed": None, "temperature": 0.0} | terms
    return drafter().draft(prefix, size, steps, **given_terms)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.integers(1, 20), st.integers(1, 30), st.sampled_from([None, 7]))
def test_a_draft_has_the_form_that_was_asked_for(prefix, size, steps, seed) -> None:
    made = draft(prefix, size, steps, seed=seed, temperature=0.8)
    wanted = min(size, SMALL.block_tokens)
    assert len(made.tokens) == len(made.confidence) == wanted
    assert made.forward_passes == made.diffusion_steps == min(steps, wanted)
    assert all(0 <= token < SMALL.vocab_size for token in made.tokens)
    assert SMALL.mask_token_id not in made.tokens
    assert all(0 <= sure <= 1 for sure in made.confidence)
    assert made.peak_activation_bytes > 0


@settings(max_examples=15, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.data())
def test_a_draft_is_the_same_whatever_was_drafted_before(texts, data) -> None:
    kept = drafter()
    for text in [*texts, *texts]:
        cut = data.draw(st.integers(1, len(text)))
        made = kept.draft(text[:cut], 4, 2, None, 0.0)
        assert made.tokens == draft(text[:cut], 4, 2).tokens


def test_a_text_that_grows_past_its_window_is_still_followed() -> None:
    kept, text = drafter(), list(range(4, 60)) * 3
    for length in range(1, len(text), 3):
        assert kept.draft(text[:length], 3, 1, None, 0.0).tokens == draft(text[:length], 3).tokens
    most = 2 * SMALL.window_tokens * SMALL.kv_bytes_per_token
    assert 0 < kept.held_bytes <= 8 * most
    kept.shed(kept.held_bytes)
    assert kept.held_bytes == 0


@given(st.integers(0, 5000), st.integers(1, 300))
def test_a_window_holds_one_to_two_and_moves_by_whole_ones(length: int, window: int) -> None:
    start = window_start(length, window)
    assert start % window == 0
    assert min(length, window) <= length - start <= 2 * window
    assert window_start(length + 1, window) in (start, start + window)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_of_a_sampled_decode_decides_the_draft(seed: int) -> None:
    prefix = [5, 6, 7, 8]
    first = draft(prefix, 8, seed=seed, temperature=2.0)
    assert first.tokens == draft(prefix, 8, seed=seed, temperature=2.0).tokens
    assert first.tokens != draft(prefix, 8, seed=seed + 10, temperature=2.0).tokens
    assert draft(prefix, 8, seed=seed, temperature=0.0).tokens == draft(prefix, 8).tokens


def states_of(first: int, end: int, fingerprint: str = "f") -> HiddenStates:
    rows = np.random.default_rng(1).normal(size=(200, SMALL.hidden_size)).astype("<f2")
    data = rows[first : max(first, end)].tobytes()
    return HiddenStates(drafter=fingerprint, first=first, width=SMALL.hidden_size, data=data)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), PLACES, PLACES), min_size=1, max_size=6))
def test_states_count_the_same_early_and_late(asked) -> None:
    text = [4 + 7 * place % 50 for place in range(60)]
    kept, told = BlockDiffusionDrafter(NETWORK, "m", "f"), states_of(0, 0)
    for length, first, end in asked:
        told = told.followed_by(states_of(first, end)).between(0, length)
        made = kept.draft(text[:length], 4, 1, None, 0.0, told)
        fresh = BlockDiffusionDrafter(NETWORK, "m", "f").draft(text[:length], 4, 1, None, 0.0, told)
        # What is held may have been computed with states that were left out since.
        if told.first == 0:
            assert made.tokens == fresh.tokens


def test_states_change_the_draft_and_those_for_another_drafter_do_not() -> None:
    text = list(range(4, 24))
    own, other = states_of(0, 19), states_of(0, 19, "other")
    made = [
        BlockDiffusionDrafter(NETWORK, "m", "f").draft(text, 8, 1, None, 0.0, given)
        for given in (None, own, other, own.between(0, 0))
    ]
    assert made[0].confidence == made[2].confidence == made[3].confidence != made[1].confidence
