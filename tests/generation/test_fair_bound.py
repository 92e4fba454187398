"""Laws of who may be in: a bound, and nobody who keeps the others out."""

from __future__ import annotations

import heapq
import random
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import QueueFull
from kakeya.generation.fair_bound import FairBound
from tests.laws import law


class Now:
    """A clock that only the tests move."""

    mono = 0.0

    def __call__(self) -> float:
        return self.mono


@given(
    most=st.integers(1, 9),
    moves=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"), st.booleans()), max_size=60
    ),
)
def test_a_client_with_none_in_gets_in_until_all_parts_are_taken(most, moves):
    crowd, inside = FairBound(most, Now()), {name: [] for name in "abcdef"}
    for client, user, leaves in moves:
        total = sum(map(len, inside.values()))
        if leaves and inside[client]:
            inside[client].pop().close()
            continue
        there = sum(bool(held) for held in inside.values())
        if crowd.has_room(client, user):
            inside[client].append(ExitStack())
            inside[client][-1].enter_context(crowd.member(client, user, "it is full"))
        else:
            assert total >= most
            # Not one that has none in, but where there are more clients than places.
            assert inside[client] or there + 1 > most or total >= 2 * most
        assert crowd.total == sum(map(len, inside.values())) <= 3 * most


def test_one_client_may_take_all_and_the_next_gets_in_at_once() -> None:
    crowd = FairBound(8, Now())
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(crowd.member("a", "", "full"))
        assert not crowd.has_room("a")
        for _ in range(4):
            stack.enter_context(crowd.member("b", "", "full"))
        assert not crowd.has_room("b")
        with pytest.raises(QueueFull, match="8 are there: try again later"):
            stack.enter_context(crowd.member("b", "", "8 are there"))
        assert crowd.has_room("c")
    assert crowd.total == 0
    assert crowd.has_room("a")


@pytest.mark.parametrize("most", [8, 72, 256])
def test_a_client_keeps_no_other_out_however_many_users_it_names(most: int) -> None:
    crowd = FairBound(most, Now())
    with ExitStack() as stack:
        for at in range(4 * most):
            if crowd.has_room("a", f"user {at}"):
                stack.enter_context(crowd.member("a", f"user {at}", "full"))
        assert crowd.total >= most
        for client in ("b", "c"):
            assert not crowd.has_room("a", "one more")
            for _ in range(most // 3):
                stack.enter_context(crowd.member(client, "", "full"))


def test_a_user_keeps_no_other_of_its_client_out() -> None:
    crowd = FairBound(8, Now())
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(crowd.member("a", "much", "full"))
        assert not crowd.has_room("a", "much")
        for _ in range(4):
            stack.enter_context(crowd.member("a", "other", "full"))
        assert not crowd.has_room("a", "other")
        assert crowd.has_room("a", "a third")
        for _ in range(4):
            stack.enter_context(crowd.member("b", "", "full"))
    assert crowd.total == 0


@given(
    most=st.integers(2, 9),
    moves=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=90),
)
def test_whatever_a_client_does_with_its_users_another_one_gets_its_part(most, moves):
    crowd, inside = FairBound(most, Now()), {}
    for user, leaves in moves:
        held = inside.setdefault(user, [])
        if leaves and held:
            held.pop().close()
        elif crowd.has_room("a", str(user)):
            held.append(ExitStack())
            held[-1].enter_context(crowd.member("a", str(user), "full"))
        assert crowd.total == sum(map(len, inside.values())) <= 2 * most
        with ExitStack() as others:
            for _ in range(most // 2):
                others.enter_context(crowd.member("b", "", "full"))
            if most > 2:
                assert crowd.has_room("c")


def refused_s(bound: FairBound) -> float:
    with pytest.raises(QueueFull) as full, bound.member("one shelf", "", "full"):
        pass
    return full.value.retry_after_s or 0.0


@law(120)
@given(
    seed=st.integers(0, 1 << 30), most=st.integers(1, 32), stay_s=st.sampled_from([0.05, 1.0, 5.0])
)
def test_all_of_200_clients_that_come_again_when_they_are_told_to_are_served(
    seed: int, most: int, stay_s: float
) -> None:
    now, draw = Now(), random.Random(seed)
    bound = FairBound(most, now)
    todo = [(draw.random(), number, "asks") for number in range(200)]
    heapq.heapify(todo)
    inside: dict[int, ExitStack] = {}
    served, refusals = set[int](), 0
    while todo:
        now.mono, number, step = heapq.heappop(todo)
        if step == "ends":
            inside.pop(number).close()
            served.add(number)
            continue
        if bound.has_room("one shelf"):
            inside[number] = ExitStack()
            inside[number].enter_context(bound.member("one shelf", "", "full"))
            heapq.heappush(todo, (now.mono + draw.expovariate(1 / stay_s), number, "ends"))
        else:
            refusals += 1
            wait_s = refused_s(bound)
            assert 1.0 <= wait_s <= 60.0
            heapq.heappush(todo, (now.mono + wait_s, number, "asks"))
    assert len(served) == 200
    alone_s = 200 * stay_s / most
    assert refusals <= 200 * (8 + alone_s / 10), "each comes again a few times in 60 s"
    assert now.mono <= 3 * alone_s + 20 * stay_s + 60, "places stay empty for a part of the time"


def test_those_that_are_refused_come_again_one_after_the_other_at_the_pace_of_free_places() -> None:
    now = Now()
    bound = FairBound(2, now)
    held = [ExitStack() for _ in range(2)]
    for one in held:
        one.enter_context(bound.member("one shelf", "", "full"))
    assert refused_s(bound) == 1.0, "no place has become free yet"
    for one in held * 3:
        now.mono += 4.0
        one.close()
        one.enter_context(bound.member("one shelf", "", "full"))
    assert [refused_s(bound) for _ in range(3)] == [pytest.approx(4.0 * n) for n in (1, 2, 3)]
    assert max(refused_s(bound) for _ in range(99)) == 60.0
