from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.prefix.peers.two_sided import Meeting, Side, is_sooner, is_worth_while

SECONDS = st.floats(0.001, 10.0)


def simulate(count: int, block_s: float, arrivals: list[float], switch_s: float):
    """Play a prefill of `count` blocks against blocks that arrive from the back at these times.

    Returns the meeting and when everything is there: the prefill ends, or is ended for a switch.
    """
    meeting = Meeting(0, count, block_s=block_s, switch_s=switch_s)
    events = [((n + 1) * block_s, "front", n + 1) for n in range(count)]
    events += [(at, "back", count - 1 - n) for n, at in enumerate(arrivals[:count])]
    for at, kind, number in sorted(events):
        if kind == "front":
            meeting.computed(number)
            if number == count:
                return meeting, at
        elif meeting.is_needed(number):
            meeting.fetched(number)
        if meeting.pays:
            return meeting, at + switch_s
    raise AssertionError("the prefill did not end")


@st.composite
def plays(draw):
    count = draw(st.integers(1, 40))
    gaps = draw(st.lists(SECONDS, max_size=count))  # a peer that dies sends fewer than all
    arrivals = [sum(gaps[: n + 1]) for n in range(len(gaps))]
    return count, draw(SECONDS), arrivals, draw(st.floats(0.0, 5.0))


@given(plays())
def test_is_never_later_than_the_prefill_alone_whatever_the_peer_does(play):
    count, block_s, arrivals, switch_s = play
    _, took_s = simulate(count, block_s, arrivals, switch_s)
    assert took_s <= count * block_s * (1 + 1e-9)


@given(plays())
def test_every_block_comes_from_one_side_exactly(play):
    count, *_ = play
    meeting, _ = simulate(*play)
    sides = meeting.sides()
    assert sorted(sides) == list(range(count))
    computed = sum(side is Side.COMPUTED for side in sides.values())
    assert [sides[n] for n in range(count)] == [Side.COMPUTED] * computed + [Side.FETCHED] * (
        count - computed
    )


@given(st.integers(2, 60), SECONDS, SECONDS)
def test_takes_about_as_long_as_both_together_need(count, block_s, fetch_s):
    arrivals = [(n + 1) * fetch_s for n in range(count)]
    _, took_s = simulate(count, block_s, arrivals, 0.0)
    together_s = count * block_s * fetch_s / (block_s + fetch_s)
    # The last block of either side may be under way, or not worth the switch.
    assert took_s <= together_s + 2 * max(block_s, fetch_s)


@given(plays())
def test_where_a_meeting_is_worth_while_is_where_it_can_end_a_prefill(play):
    count, block_s, _, switch_s = play
    meeting, _ = simulate(count, block_s, [1e-6 * n for n in range(count)], switch_s)
    is_ended = meeting.front < count
    assert is_ended == is_worth_while(count, block_s=block_s, switch_s=switch_s)


@given(plays())
def test_a_switch_saves_more_than_it_costs(play):
    count, block_s, _, switch_s = play
    meeting, _ = simulate(*play)
    if meeting.front < count:
        assert (count - meeting.front) * block_s > switch_s


def test_a_block_that_both_sides_have_counts_once():
    meeting = Meeting(0, 3, block_s=1.0, switch_s=0.0)
    meeting.computed(2)
    meeting.fetched(2)
    assert meeting.is_met
    meeting.computed(3)
    assert meeting.sides() == dict.fromkeys(range(3), Side.COMPUTED)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_block_that_is_not_the_next_from_the_back_is_refused(index):
    meeting = Meeting(0, 3, block_s=1.0)
    meeting.computed(1)
    assert not meeting.is_needed(index)
    with pytest.raises(InvalidArgument, match=f"block {index}"):
        meeting.fetched(index)


@pytest.mark.parametrize(("first", "end"), [(0, 0), (3, 2), (-1, 4)])
def test_there_must_be_blocks_to_meet_over(first, end):
    with pytest.raises(InvalidArgument, match=f"blocks {first} to {end}"):
        Meeting(first, end, block_s=1.0)


@given(st.integers(1, 60), SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_to_meet_is_chosen_where_it_beats_both_sides_alone(count, block_s, fetch_s, switch_s):
    arrivals = [(n + 1) * fetch_s for n in range(count)]
    if not is_sooner(count, block_s=block_s, fetch_s=fetch_s, switch_s=switch_s):
        return
    _, took_s = simulate(count, block_s, arrivals, switch_s)
    # A block of either side may be under way.
    assert took_s <= count * min(block_s, fetch_s) + 2 * max(block_s, fetch_s)
    assert took_s <= count * block_s * (1 + 1e-9)


@pytest.mark.parametrize(("block_s", "fetch_s"), [(0.0, 1.0), (1.0, 0.0), (1.0, math.inf)], ids=str)
def test_nobody_is_met_over_a_link_that_is_not_known(block_s, fetch_s):
    assert not is_sooner(100, block_s=block_s, fetch_s=fetch_s)
