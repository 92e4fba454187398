"""The laws of a group's life, whatever happens to it in which order."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.ring.state import CALM_S, PAUSES_S, GroupPhase, GroupState

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["began", "up", "failed", "seen", "ended"]),
        st.floats(min_value=0, max_value=1000),
    ),
    max_size=40,
)


def after(state: GroupState, event: str, now: float) -> GroupState:
    match event:
        case "began":
            return state.began(now)
        case "up":
            return state.up(now)
        case "failed":
            return state.failed("a rank is lost", now)
        case "seen":
            return state.members_seen(now)
        case _:
            return state.ended(now)


@given(EVENTS)
def test_a_group_that_waits_and_no_other_tries_again_within_the_longest_pause(
    events: list[tuple[str, float]],
) -> None:
    state, now = GroupState(), 0.0
    for event, seconds in events:
        now += seconds
        before, state = state, after(state, event, now)
        assert (state.retry_mono < math.inf) == (state.phase is GroupPhase.WAITING)
        if event == "failed" and state is not before:
            assert PAUSES_S[0] <= state.retry_mono - now <= PAUSES_S[-1]
        if before.phase is GroupPhase.ENDING:
            assert state is before


@given(st.integers(min_value=1, max_value=20))
def test_each_failure_in_a_row_waits_longer_until_the_group_was_up_for_long(count: int) -> None:
    state, now, pauses = GroupState(), 0.0, []
    for _ in range(count):
        state = state.began(now).failed("again", now)
        pauses.append(state.retry_mono - now)
        now = state.retry_mono
    assert pauses == sorted(pauses)
    calm = state.began(now).up(now).failed("once more", now + CALM_S)
    assert calm.retry_mono - (now + CALM_S) == PAUSES_S[0]
    short = state.began(now).up(now).failed("once more", now + CALM_S / 2)
    assert short.failures == state.failures + 1


def test_members_that_are_back_shorten_the_pause_and_never_lengthen_it() -> None:
    state = GroupState()
    for _ in range(len(PAUSES_S)):
        state = state.began(0.0).failed("away", 0.0)
    assert state.retry_mono == PAUSES_S[-1]
    assert state.members_seen(10.0).retry_mono == 11.0
    assert state.members_seen(PAUSES_S[-1] + 5.0).retry_mono == PAUSES_S[-1]
