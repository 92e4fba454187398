"""Laws of who may be in: a bound, and nobody who keeps the others out."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import QueueFull
from kakeya.runtime.crowd import Crowd


@given(
    most=st.integers(1, 9),
    moves=st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60),
)
def test_a_client_with_none_in_gets_in_until_all_parts_are_taken(most, moves):
    crowd, inside = Crowd(most), {name: [] for name in "abcdef"}
    for client, leaves in moves:
        total = sum(map(len, inside.values()))
        if leaves and inside[client]:
            inside[client].pop().close()
            continue
        there = sum(bool(held) for held in inside.values())
        if crowd.has_room(client):
            inside[client].append(ExitStack())
            inside[client][-1].enter_context(crowd.member(client, "it is full"))
        else:
            assert total >= most
            # Not one that has none in, but where there are more clients than places.
            assert inside[client] or there + 1 > most or total >= 2 * most
        assert crowd.total == sum(map(len, inside.values())) <= 2 * most


def test_one_client_may_take_all_and_the_next_gets_in_at_once() -> None:
    crowd = Crowd(8)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(crowd.member("a", "full"))
        assert not crowd.has_room("a")
        for _ in range(4):
            stack.enter_context(crowd.member("b", "full"))
        assert not crowd.has_room("b")
        with pytest.raises(QueueFull, match="8 are there: try again later"):
            stack.enter_context(crowd.member("b", "8 are there"))
        assert crowd.has_room("c")
    assert crowd.total == 0
    assert crowd.has_room("a")
