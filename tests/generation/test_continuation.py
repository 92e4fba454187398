"""What is asked of the next engine after tokens were committed by a lost one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import PeerProtocol
from kakeya.generation.continuation import Continuation
from kakeya.generation.frames import Done, Progress, StopReason, Tokens, Usage
from kakeya.generation.request import DecodeRequest, Sampling
from tests.sessions.toy import expected


@given(
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=20),
    max_tokens=st.integers(1, 30),
    cuts=st.lists(st.integers(0, 8), max_size=6),
    seed=st.integers(0, 2**64 - 1),
    stop=st.frozensets(st.integers(0, 96), max_size=6),
    context=st.integers(10, 50),
)
def test_any_pattern_of_deaths_gives_the_tokens_of_an_undisturbed_run(
    prompt, max_tokens, cuts, seed, stop, context
):
    sampling = Sampling(temperature=1.0, seed=seed)
    request = DecodeRequest(
        token_ids=prompt, max_tokens=max_tokens, stop_token_ids=stop, sampling=sampling
    )
    wanted, reason = expected(prompt, max_tokens, sampling=sampling, stop=stop, context=context)
    job = Continuation(request, 0.0)
    got: list[int] = []
    for cut in [*cuts, max_tokens]:
        done = job.finish(context, 1.0)
        if done is not None:
            assert (got, done.reason) == (wanted, reason)
            return
        rest = job.rest(1.0)
        assert rest.token_ids[: rest.prompt_tokens or None] == prompt
        tokens, ended = expected(
            rest.token_ids, rest.max_tokens, sampling=rest.sampling, stop=stop, context=context
        )
        for token in tokens[:cut]:
            job.take(Tokens(token_ids=(token,)), 0.5)
            got.append(token)
        if len(tokens) <= cut and cut == max_tokens:
            assert (got, ended) == (wanted, reason)
            return
        job.interrupt()
    done = job.finish(context, 1.0)
    assert (got, done and done.reason) == (wanted, reason)


def test_usage_of_an_undisturbed_run_is_the_engines_own():
    job = Continuation(DecodeRequest(token_ids=[1], max_tokens=3), 0.0)
    usage = Usage(total_s=0.25, forwards=2)
    assert job.take(Done(reason=StopReason.MAX_TOKENS, usage=usage), 9.0).usage == usage


def test_usage_after_a_death_spans_both_engines_and_counts_the_lost_steps():
    job = Continuation(DecodeRequest(token_ids=[1], max_tokens=9), 10.0)
    job.take(Tokens(token_ids=(5, 6, 7)), 11.0)
    job.take(Tokens(token_ids=(8,)), 12.0)
    job.interrupt()
    job.take(Tokens(token_ids=(9,)), 19.0)
    done = job.take(Done(reason=StopReason.MAX_TOKENS, usage=Usage(forwards=1)), 20.0)
    usage = done.usage
    assert (usage.prefill_s, usage.total_s, usage.forwards) == (1.0, 10.0, 3)
    assert (usage.drafted, usage.verified, usage.accepted) == (2, 2, 2)


@given(
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=20),
    committed=st.lists(st.integers(0, 96), min_size=1, max_size=8),
    data=st.data(),
)
def test_no_more_of_a_prompt_is_cached_than_it_is_long(prompt, committed, data):
    job = Continuation(DecodeRequest(token_ids=prompt, max_tokens=20), 0.0)
    job.take(Tokens(token_ids=tuple(committed)), 1.0)
    job.interrupt()
    found = data.draw(st.integers(0, len(job.rest(2.0).token_ids) - 1))
    done = job.take(Done(reason=StopReason.MAX_TOKENS, usage=Usage(cached_tokens=found)), 2.0)
    assert done.usage.cached_tokens == min(found, len(prompt) - 1)


@given(
    deadline_s=st.none() | st.floats(0, 100),
    deaths=st.lists(st.tuples(st.floats(0, 50), st.booleans()), min_size=1, max_size=6),
)
def test_a_deadline_goes_on_counting_until_the_first_token_and_binds_no_engine_behind_it(
    deadline_s, deaths
):
    job = Continuation(DecodeRequest(token_ids=[1], max_tokens=9, deadline_s=deadline_s), 100.0)
    now, has_spoken = 100.0, False
    for waited_s, speaks in deaths:
        now += waited_s
        if speaks:
            job.take(Tokens(token_ids=(5,)), now)
        has_spoken = has_spoken or speaks
        job.interrupt()
        left_s = job.rest(now).deadline_s
        if deadline_s is None or has_spoken:
            assert left_s is None
        else:
            assert left_s == max(0.0, deadline_s - (now - 100.0))


def test_progress_of_a_second_prefill_is_hidden_once_tokens_were_seen():
    job = Continuation(DecodeRequest(token_ids=[1], max_tokens=9), 0.0)
    progress = Progress(computed_tokens=1, total_tokens=1)
    assert job.take(progress, 0.0) is progress
    job.take(Tokens(token_ids=(5,)), 0.0)
    assert job.take(progress, 0.0) is None


def test_an_engine_that_commits_too_much_is_a_broken_peer():
    job = Continuation(DecodeRequest(token_ids=[1], max_tokens=1), 0.0)
    with pytest.raises(PeerProtocol, match="committed 2 tokens, asked for at most 1"):
        job.take(Tokens(token_ids=(5, 6)), 0.0)


def test_of_a_prompt_that_waits_only_what_is_not_held_is_left_to_compute():
    job = Continuation(DecodeRequest(token_ids=range(100), max_tokens=9, cuts=(40,)), 0.0)

    def held(tokens, cuts) -> int:
        assert (len(tokens), cuts) == (100, (40,))
        return 90

    assert job.prompt_left(held) == 10
    job.take(Progress(computed_tokens=96, total_tokens=100), 0.0)
    assert job.prompt_left(held) == 4
    job.take(Progress(computed_tokens=100, total_tokens=100), 0.0)
    assert job.prompt_left(held) == 1, "it waits for its first token"
    job.take(Tokens(token_ids=(5,)), 0.0)
    assert job.prompt_left(held) == 0
