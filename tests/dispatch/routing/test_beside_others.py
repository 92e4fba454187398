"""On unequal nodes in virtual time the decision is better than the rules of others. Some seeds
of `python -m benchmarks.routing`, which compares all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from statistics import mean

import pytest

from benchmarks.routing.drive import Call, Drive
from benchmarks.routing.ours import Shelf
from benchmarks.routing.rivals import KvCost, LeastSeconds, Sticky, Weighted
from benchmarks.routing.traces import TRACES

SEEDS = range(101, 105)
OURS, FOUR = (partial(Shelf, addresses=count) for count in (1, 4))
RIVALS = (
    partial(Sticky, weighted=False),
    partial(Weighted, prefix=2, queue=1, kv=1, counts_running=True),
    partial(KvCost, scale=4, credit=2, request_blocks=64),
)


def play(make: Callable, trace: str, load: float) -> list[Call]:
    return [call for seed in SEEDS for call in Drive(make).play(TRACES[trace](seed, load, 400.0))]


@cache
def best_rival_s(trace: str, load: float) -> float:
    """The mean time to a first token with the best of them."""
    return min(first_s(play(rival, trace, load)) for rival in RIVALS)


def first_s(calls: list[Call]) -> float:
    return mean(call.first_s - call.issued_s for call in calls)


@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(OURS, id="one address", marks=pytest.mark.slow),
        pytest.param(FOUR, id="four addresses"),
    ],
)
@pytest.mark.parametrize(
    ("trace", "load"), [("coding", 1.4), pytest.param("chat", 0.7, marks=pytest.mark.slow)]
)
def test_first_tokens_come_a_tenth_sooner_than_with_the_best_rival(
    trace: str, load: float, ours: Callable
) -> None:
    assert best_rival_s(trace, load) >= 1.1 * first_s(play(ours, trace, load))


def test_unseen_prompts_wait_no_longer_than_at_the_least_loaded() -> None:
    ours, least = (play(make, "unseen", 0.65) for make in (OURS, LeastSeconds))
    assert first_s(least) >= 0.99 * first_s(ours)


def test_what_is_foretold_to_be_warm_is_warm() -> None:
    calls = play(OURS, "coding", 1.0)
    right = [abs(call.expected_warm - call.warm_tokens) <= 64 for call in calls]
    assert mean(right) >= 0.99
