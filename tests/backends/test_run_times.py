"""Estimates of how long generations of a model go on, from its last ones."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kakeya.backends.run_times import RunTimes
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Tokens, Usage
from kakeya.generation.request import DecodeRequest


def job(made: int, most: int, token_s: float = 0.0) -> Continuation:
    """One that began at 0 s and made its tokens by `made * token_s`."""
    begun = Continuation(DecodeRequest(token_ids=[1], max_tokens=most), 0.0)
    if made:
        begun.take(Tokens(token_ids=(2,)), 0.0)
    if made > 1:
        begun.take(Tokens(token_ids=(2,) * (made - 1)), (made - 1) * token_s)
    return begun


def past(*lengths: int, most: int = 1000, token_s: float = 0.1) -> RunTimes:
    times = RunTimes()
    for tokens in lengths:
        usage = Usage(forwards=tokens - 1, prefill_s=5.0, total_s=5.0 + (tokens - 1) * token_s)
        times.add(DecodeRequest(token_ids=[1], max_tokens=most), usage, 0.0)
    return times


def model(places: int = 4, token_s: float = 0.0, context_tokens: int = 9000) -> ModelFacts:
    return ModelFacts(
        model_id="m",
        model_path="",
        vocab_size=9,
        context_tokens=context_tokens,
        eos_token_ids=(),
        batch_rows=places,
        tokens_per_second=1 / token_s if token_s else 0.0,
    )


def test_a_generation_goes_on_to_its_bound_where_no_other_one_is_known() -> None:
    assert RunTimes().left_s([job(0, 50)], model(), 0.0) is None
    assert RunTimes().left_s([job(0, 50)], model(token_s=0.2), 0.0) == pytest.approx(10.0)
    short = model(token_s=0.2, context_tokens=21)
    assert RunTimes().left_s([job(0, 50)], short, 0.0) == pytest.approx(4.0)


def test_past_answers_say_how_many_tokens_are_left_and_how_long_one_takes() -> None:
    times = past(100, 100, 100, token_s=0.1)
    assert times.left_s([job(0, 1000)], model(), 0.0) == pytest.approx(10.0)
    assert times.left_s([job(40, 1000)], model(), 0.0) == pytest.approx(6.0, rel=0.05)


def test_answers_that_reached_their_bound_do_not_say_where_the_next_one_ends() -> None:
    times = past(50, 50, most=50, token_s=0.1)
    assert times.left_s([job(0, 500)], model(), 0.0) == pytest.approx(50.0)


def test_those_without_a_place_come_after_the_others() -> None:
    times = past(100, 100)
    jobs = [job(0, 1000) for _ in range(3)]
    assert times.left_s(jobs, model(3), 0.0) == pytest.approx(10.0)
    assert times.left_s(jobs, model(2), 0.0) == pytest.approx(20.0)
    assert times.left_s(jobs, model(1), 0.0) == pytest.approx(30.0)


def test_the_last_of_several_ends_later_than_the_usual_one() -> None:
    times = past(*range(10, 210, 10), token_s=0.1)
    one, many = ([job(0, 1000)] * number for number in (1, 8))
    alone_s, together_s = (times.left_s(jobs, model(8), 0.0) for jobs in (one, many))
    assert alone_s == pytest.approx(10.0, abs=1.0)
    assert together_s == pytest.approx(19.0, abs=1.0)


@given(
    st.lists(st.integers(2, 900), max_size=20),
    st.lists(st.tuples(st.integers(0, 300), st.integers(300, 900)), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_all_end_no_later_than_with_the_longest_answers_one_after_the_other(
    lengths: list[int], sizes: list[tuple[int, int]], places: int
) -> None:
    jobs = [job(made, most) for made, most in sizes]
    left_s = past(*lengths).left_s(jobs, model(places, token_s=1.0), 0.0)
    assert left_s is not None
    assert 0 <= left_s <= sum(most - made for made, most in sizes) * 1.0


def test_requests_that_are_still_to_come_are_like_the_last_ones() -> None:
    """Each of them brings a prompt of a token, here of 5 s."""
    times, slow = past(100, 100, 100, token_s=0.1), replace(model(), prefill_tokens_per_second=0.2)
    assert times.left_s([], slow, 0.0, more=2) == pytest.approx(10.0 + 10.0)
    one_place = replace(slow, batch_rows=1)
    assert times.left_s([job(0, 1000)], one_place, 0.0, more=1) == pytest.approx(5.0 + 20.0)
    assert past(50, most=50).left_s([], one_place, 0.0, more=2) == pytest.approx(10.0 + 10.0)


def test_prompts_that_wait_for_each_other_tell_how_many_tokens_a_second_takes() -> None:
    times = RunTimes()
    assert times.prefill_per_s == 0
    times.add(DecodeRequest(token_ids=[1] * 9, max_tokens=5), Usage(prefill_s=1, total_s=1), 1.0)
    assert times.prefill_per_s == 0, "a few tokens tell nothing"
    instant = Usage(prefill_s=1e-12, total_s=1e-12)
    RunTimes().add(DecodeRequest(token_ids=[1] * 99, max_tokens=5), instant, 1e5)
    for ended_s in (2.0, 4.0, 6.0):  # all came at once: each waited for those before
        request = DecodeRequest(token_ids=[1] * 220, max_tokens=5)
        usage = Usage(prefill_s=ended_s, total_s=ended_s, cached_tokens=20)
        times.add(request, usage, ended_s)
        assert times.prefill_per_s == 100


def test_a_speed_of_prompts_that_is_about_the_known_one_is_that_one() -> None:
    times = RunTimes()
    for number, seconds in enumerate((1.0, 0.9, 1.1)):
        usage = Usage(prefill_s=seconds, total_s=seconds)
        times.add(DecodeRequest(token_ids=[1] * 100, max_tokens=1), usage, 10.0 * (number + 1))
        assert times.prefill_per_s == 100
    for number in range(30):
        usage = Usage(prefill_s=0.5, total_s=0.5)
        times.add(DecodeRequest(token_ids=[1] * 100, max_tokens=1), usage, 100.0 + number)
    assert 160 <= times.prefill_per_s <= 200
