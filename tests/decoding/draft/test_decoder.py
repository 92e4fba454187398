from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, InvariantBroken
from kakeya.decoding.draft.decoder import Decoding
from kakeya.generation.frames import StopReason
from tests.decoding.toys import GREEDY, SAMPLED, VOCAB, HashModel


def decoding(history=(1, 2, 3), max_tokens=10, stop=(), context=100) -> Decoding:
    return Decoding(
        history, max_tokens=max_tokens, stop_token_ids=frozenset(stop), context_tokens=context
    )


def test_commits_the_accepted_drafts_and_the_verifiers_own_next_token():
    state = decoding()
    commit = state.commit([4, 5, 6], [4, 5, 8, 0])
    assert commit.tokens == (4, 5, 8)
    assert (commit.accepted, commit.kept_rows, commit.finish) == (2, 3, None)
    assert state.history == [1, 2, 3, 4, 5, 8]
    assert state.generated == 3


def test_a_plain_step_commits_one_token():
    assert decoding().commit((), (7,)).tokens == (7,)


def test_a_fully_accepted_block_commits_one_token_more_than_it_had():
    commit = decoding().commit([4, 5], [4, 5, 6])
    assert commit.tokens == (4, 5, 6)
    assert commit.kept_rows == 3


def test_a_stop_token_inside_an_accepted_block_ends_it_there():
    state = decoding(stop={5})
    commit = state.commit([4, 5, 6], [4, 5, 6, 7])
    assert commit.tokens == (4, 5)
    assert commit.accepted == 2
    assert commit.kept_rows == 2
    assert commit.finish is state.finish is StopReason.STOP_TOKEN
    assert state.history[-1] == 5


def test_the_verifiers_own_token_may_be_the_stop():
    commit = decoding(stop={8}).commit([4, 5], [4, 8, 0])
    assert commit.tokens == (4, 8)
    assert commit.accepted == 1
    assert commit.finish is StopReason.STOP_TOKEN


def test_max_tokens_cuts_a_block():
    state = decoding(max_tokens=2)
    assert state.commit([4, 5, 6], [4, 5, 6, 7]).tokens == (4, 5)
    assert state.finish is StopReason.MAX_TOKENS


def test_the_context_cuts_a_block():
    state = decoding(context=5)
    assert state.commit([4, 5, 6], [4, 5, 6, 7]).tokens == (4, 5)
    assert state.finish is StopReason.CONTEXT_FULL


def test_a_stop_at_the_last_token_is_told_as_a_stop():
    state = decoding(max_tokens=1, stop={4})
    assert state.commit((), (4,)).finish is StopReason.STOP_TOKEN


def test_a_history_that_fills_the_context_is_finished_from_the_start():
    state = decoding(context=3)
    assert state.finish is StopReason.CONTEXT_FULL
    assert state.room() == 0


def test_no_room_for_drafts_when_one_token_is_left():
    assert decoding(max_tokens=1).room() == 0
    assert decoding(max_tokens=5).room() == 4
    assert decoding(max_tokens=50, context=6).room() == 2


def test_nothing_is_committed_after_the_finish():
    state = decoding(max_tokens=1)
    state.commit((), (4,))
    with pytest.raises(InvariantBroken, match="commit_after_finish"):
        state.commit((), (5,))
    assert state.room() == 0


@pytest.mark.parametrize("kwargs", [{"history": ()}, {"max_tokens": 0}, {"max_tokens": -3}])
def test_refuses_what_cannot_be_meant(kwargs):
    with pytest.raises(InvalidArgument):
        decoding(**kwargs)


def test_the_history_given_is_not_touched():
    prompt = [1, 2, 3]
    decoding(history=prompt).commit((), (4,))
    assert prompt == [1, 2, 3]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_tokens=st.integers(1, 40),
    context=st.integers(4, 60),
    stop=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    params=st.sampled_from([GREEDY, SAMPLED]),
)
def test_any_drafts_give_the_tokens_of_plain_decoding_and_keep_the_cache_law(
    seed, max_tokens, context, stop, params
):
    rng = random.Random(seed)
    model = HashModel(params)
    prompt = [rng.randrange(VOCAB) for _ in range(3)]
    state = decoding(prompt, max_tokens, stop, context)
    cache = len(prompt) - 1  # prefill of all but the last token
    while state.finish is None:
        size = rng.randint(0, state.room())
        draft = [
            token if rng.random() < 0.8 else rng.randrange(VOCAB)
            for token in model.plain(state.history, size)
        ]
        commit = state.commit(draft, model.verify(state.history, draft))
        cache += commit.kept_rows
        assert cache == len(state.history) - 1
        assert commit.accepted <= len(commit.tokens) == commit.kept_rows <= len(draft) + 1
    plain = model.plain(prompt, min(max_tokens, context - len(prompt)))
    ends = [at for at, token in enumerate(plain) if token in stop]
    expected = plain[: ends[0] + 1] if ends else plain
    assert state.history == prompt + expected
    assert state.generated == len(expected)
    assert (state.finish is StopReason.STOP_TOKEN) == bool(ends)
