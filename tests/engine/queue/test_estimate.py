"""Laws of the estimates of waits, and how well they are met by an engine in virtual time."""

from __future__ import annotations

import random
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from kakeya.engine.queue.estimate import (
    Arrivals,
    PlaceWork,
    first_tokens_s,
    service_order,
    tokens_left,
)
from kakeya.engine.queue.policy import Account, GenerationClaim
from kakeya.generation.answer_length import UNENDED
from tests.engine.virtual_rig import VirtualRig

SECONDS = st.floats(0, 1e3)
WORKS = st.lists(st.builds(PlaceWork, SECONDS, st.integers(0, 4096)), max_size=12)
CLAIMS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 9000), SECONDS), max_size=12
)


@given(WORKS, WORKS, SECONDS)
def test_no_wait_is_negative_and_each_is_behind_the_one_before(
    running: list[PlaceWork], waiting: list[PlaceWork], step_s: float
) -> None:
    found = first_tokens_s(running, waiting, step_s)
    assert len(found) == len(waiting)
    assert all(seconds >= 0 for seconds in found)
    assert all(before <= after for before, after in pairwise(found))


@given(WORKS, WORKS, SECONDS, st.data())
def test_more_work_ahead_makes_no_wait_shorter(
    running: list[PlaceWork], waiting: list[PlaceWork], step_s: float, data: st.DataObject
) -> None:
    before = first_tokens_s(running, waiting, step_s)
    longer = data.draw(st.builds(PlaceWork, SECONDS, st.integers(0, 4096)))
    at = data.draw(st.integers(0, len(waiting)))
    with_one_more = first_tokens_s(running, [*waiting[:at], longer, *waiting[at:]], step_s)
    del with_one_more[at]
    assert all(one <= other for one, other in zip(before, with_one_more, strict=True))
    if running:
        at = data.draw(st.integers(0, len(running) - 1))
        grown = PlaceWork(
            running[at].prompt_s + longer.prompt_s, running[at].tokens + longer.tokens
        )
        later = first_tokens_s([*running[:at], grown, *running[at + 1 :]], waiting, step_s)
        assert all(one <= other for one, other in zip(before, later, strict=True))


@given(
    st.integers(0, 500),
    st.integers(0, 500),
    st.lists(st.integers(0, 500) | st.just(UNENDED), max_size=20),
    st.integers(0, 999),
)
def test_the_tokens_that_are_left_lie_within_the_bound(
    made: int, most: int, past: list[int], number: int
) -> None:
    assert 0 <= tokens_left(made, most, past, number) <= max(0, most - made)


def test_several_alike_do_not_all_end_at_their_median() -> None:
    past = range(100)
    left = sorted(tokens_left(0, 1000, past, number) for number in range(10))
    assert left[0] < 12
    assert left[-1] > 88


@given(CLAIMS)
def test_all_are_in_the_order_of_service_once_and_by_class(
    made_of: list[tuple[int, str, int, float]],
) -> None:
    accounts: dict[tuple[int, str], Account] = {}
    claims = []
    for number, (priority, client, used, arrived_s) in enumerate(made_of):
        account = accounts.setdefault((priority, client), Account(client, priority, used))
        if used % 2:  # of a user of the client
            user = Account(client, priority, used, user=str(used % 5), owner=account)
            account = accounts.setdefault((priority, client + user.user), user)
        claims.append(GenerationClaim(account=account, number=number, arrived_s=arrived_s))
    order = service_order(claims, lambda _: 300)
    assert sorted(claim.number for claim in order) == list(range(len(claims)))
    assert [claim.priority for claim in order] == sorted(claim.priority for claim in claims)


def test_the_share_of_more_urgent_arrivals_is_forgotten_in_time() -> None:
    arrivals = Arrivals()
    for second in range(300):
        arrivals.add(1, 0.5, float(second))
    assert 0.45 < arrivals.more_urgent(2, 299.0) < 0.55
    assert arrivals.more_urgent(1, 299.0) == 0
    assert arrivals.more_urgent(2, 600.0) < 0.01


def test_four_of_five_have_their_first_token_within_30_percent_of_what_they_were_told() -> None:
    draw = random.Random(5)
    rig = VirtualRig(context_tokens=4096)
    jobs = [
        rig.submit(
            draw.random(),
            token_ids=[draw.randrange(100) for _ in range(draw.randint(5, 100))],
            max_tokens=draw.randint(5, 120),
            stop_token_ids=frozenset({7}),
            client=f"client {number % 9}",
        )
        for number in range(100)
    ]
    rig.run()
    waits = []
    for job in (one for one in jobs if one.places):
        told_at_s, place = job.places[0]
        waits.append((place.seconds, job.at_s[0] - told_at_s))
        assert job.places[-1][1].position == 0
    assert len(waits) > 80
    assert sum(abs(told - took) <= 0.3 * took for told, took in waits) >= 0.8 * len(waits)
