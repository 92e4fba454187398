"""Parameters of a generation that no model could follow are refused where they are made."""

from __future__ import annotations

import math

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.generation.request import DecodeJob, Sampling


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("temperature", -0.1, "finite and not below 0"),
        ("temperature", math.inf, "finite and not below 0"),
        ("temperature", math.nan, "finite and not below 0"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("min_p", -0.1, r"in 0\.\.1"),
        ("min_p", 1.01, r"in 0\.\.1"),
        ("min_p", math.nan, r"in 0\.\.1"),
        ("presence_penalty", 2.1, r"in -2\.\.2"),
        ("presence_penalty", math.nan, r"in -2\.\.2"),
        ("frequency_penalty", -2.1, r"in -2\.\.2"),
        ("repetition_penalty", 0.0, "finite and above 0"),
        ("repetition_penalty", math.inf, "finite and above 0"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(
    name: str, value: float, right: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is {value:g}, it must be {right}") as no:
        Sampling(**{name: value})
    assert no.value.param == name


@pytest.mark.parametrize(
    ("pairs", "wrong"),
    [
        (((7, 100.5),), r"of token 7 is 100\.5.*in -100\.\.100"),
        (((7, math.nan),), "of token 7 is nan"),
        (((-1, 1.0),), "ids are not below 0"),
        (((7, 1.0), (7, 2.0)), "names a token twice"),
    ],
)
def test_a_bias_out_of_range_is_refused_by_name(
    pairs: tuple[tuple[int, float], ...], wrong: str
) -> None:
    with pytest.raises(InvalidArgument, match=wrong) as no:
        Sampling(logit_bias=pairs)
    assert no.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("job", "wrong"),
    [
        (
            DecodeJob(token_ids=[1], max_tokens=1, sampling=Sampling(logit_bias=((8, 1.0),))),
            "names token id 8, outside the vocabulary of 8",
        ),
        (DecodeJob(token_ids=[1], max_tokens=1, prompt_tokens=2), "prompt_tokens is 2"),
        (DecodeJob(token_ids=[1], max_tokens=1, top_logprobs=21), r"in 0\.\.20"),
    ],
)
def test_a_job_that_its_model_cannot_take_is_refused(job: DecodeJob, wrong: str) -> None:
    with pytest.raises(InvalidArgument, match=wrong):
        job.check(vocab_size=8, context_tokens=64)


@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_a_temperature_at_or_near_zero_is_greedy(temperature: float) -> None:
    assert Sampling(temperature=temperature).is_greedy
    assert not Sampling(temperature=0.01).is_greedy
