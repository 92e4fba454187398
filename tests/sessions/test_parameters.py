"""What a GenerateRequest may ask for."""

from __future__ import annotations

import random

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.generation.request import Sampling
from kakeya.sessions.parameters import read_parameters
from kakeya.v1 import runtime_pb2 as pb
from tests.sessions.test_session import new_session


def session_with_prompt():
    session = new_session()
    session.append([1])
    return session


def read(session=None, **fields):
    request = pb.GenerateRequest(session_id="ses-1", **{"max_tokens": 5, **fields})
    return read_parameters(request, session or session_with_prompt(), random.Random(1))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, it must be in 1..1048576"),
        ({"max_tokens": 2**32 - 1}, "max_tokens is 4294967295, it must be in 1..1048576"),
        ({"temperature": float("nan")}, "temperature is nan, it must be in 0..10 (0 is greedy)"),
        ({"temperature": float("inf")}, "temperature is inf, it must be in 0..10 (0 is greedy)"),
        ({"temperature": -0.5}, "temperature is -0.5, it must be in 0..10 (0 is greedy)"),
        ({"temperature": 10.5}, "temperature is 10.5, it must be in 0..10 (0 is greedy)"),
        ({"top_p": 0.0}, "top_p is 0, it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5, it must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p is nan, it must be above 0 and at most 1"),
        ({"min_p": -0.5}, "min_p is -0.5, it must be in 0..1 (0 drops no token)"),
        ({"min_p": 1.5}, "min_p is 1.5, it must be in 0..1 (0 drops no token)"),
        ({"min_p": float("nan")}, "min_p is nan, it must be in 0..1 (0 drops no token)"),
        ({"top_k": 98}, "top_k is 98, it must be in 0..97 (the vocabulary; 0 keeps all of it)"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_range(fields, sentence):
    with pytest.raises(InvalidArgument) as failure:
        read(**fields)
    assert failure.value.message == sentence
    assert failure.value.param == next(iter(fields))


def test_an_empty_history_is_told_to_append_a_prompt_first():
    with pytest.raises(InvalidArgument, match="append a prompt first"):
        read(session=new_session())


def test_unset_sampling_is_greedy_over_the_whole_vocabulary():
    sampling = read().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)


def test_each_parameter_that_is_set_is_taken():
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 9, "seed": 7, "min_p": 0.125}
    assert read(**given).sampling == Sampling(**given)


async def test_each_parameter_of_the_client_reaches_the_model(node):
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 9, "seed": 7, "min_p": 0.125}
    async with await node.client.create_session() as session:
        await session.append([1, 2])
        assert [token async for token in session.generate(3, **given)]
    assert node.model.requests[-1].sampling == Sampling(**given)


def test_an_unset_seed_is_drawn_and_zero_is_a_seed():
    request = pb.GenerateRequest(session_id="ses-1", max_tokens=5, temperature=1.0)
    rng = random.Random(1)
    seeds = {read_parameters(request, session_with_prompt(), rng).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert read(seed=0, temperature=0.5).sampling == Sampling(temperature=0.5, seed=0)
    assert read(seed=2**64 - 1).sampling.seed == 2**64 - 1
