"""Laws of who may be in: a bound, and nobody who keeps the others out."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import QueueFull
from kakeya.generation.fair_bound import FairBound


@given(
    most=st.integers(1, 9),
    moves=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"), st.booleans()), max_size=60
    ),
)
def test_a_client_with_none_in_gets_in_until_all_parts_are_taken(most, moves):
    crowd, inside = FairBound(most), {name: [] for name in "abcdef"}
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
    crowd = FairBound(8)
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
    crowd = FairBound(most)
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
    crowd = FairBound(8)
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
    crowd, inside = FairBound(most), {}
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
