"""The rates that a node tells are those of the last minute, with what is under way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.recent_prompts import LEAST_SPAN_S, WINDOW_S, RecentPrompts
from tests.fakes import FakeClock


def test_prompts_count_for_a_minute() -> None:
    recent = RecentPrompts(0.0)
    for second in range(30):
        recent.begin(float(second))
        recent.end(float(second))
    assert recent.per_s(30.0) == 1.0
    assert recent.per_s(80.0) == 10 / WINDOW_S
    assert recent.per_s(200.0) == 0.0


def test_one_prompt_after_a_start_is_no_rate_yet() -> None:
    recent = RecentPrompts(100.0)
    recent.begin(100.0)
    assert recent.per_s(100.0) == 1 / LEAST_SPAN_S


def test_two_prompts_at_once_keep_a_node_busy_once_and_what_is_under_way_counts() -> None:
    recent = RecentPrompts(0.0)
    recent.begin(0.0)
    recent.begin(5.0)
    recent.end(10.0)
    assert recent.busy_share(20.0) == 1.0
    recent.end(20.0)
    assert recent.busy_share(40.0) == 0.5
    assert recent.busy_share(70.0) == 10 / WINDOW_S
    assert recent.busy_share(99.0) == 0.0


async def test_a_prompt_counts_to_its_first_token_and_once() -> None:
    clock, recent = FakeClock(), RecentPrompts(1000.0)
    with recent.prompt(clock.mono) as computed:
        clock.advance(6)
        computed()
        clock.advance(6)
        computed()
    now = clock.mono()
    assert (recent.per_s(now), recent.busy_share(now)) == (1 / 12, 0.5)


async def test_a_prompt_whose_caller_leaves_keeps_no_node_busy() -> None:
    clock, recent = FakeClock(), RecentPrompts(1000.0)
    with recent.prompt(clock.mono):
        clock.advance(5)
    clock.advance(5)
    assert recent.busy_share(clock.mono()) == 0.5


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30)), max_size=9), st.floats(0, 100))
def test_the_share_is_that_of_the_union_of_all_times(
    times: list[tuple[float, float]], later_s: float
) -> None:
    moments = sorted(
        [(begin, 0) for begin, _ in times] + [(begin + took, 1) for begin, took in times]
    )
    now = max((moment for moment, _ in moments), default=0.0) + later_s
    recent = RecentPrompts(0.0)
    for moment, is_end in moments:
        (recent.end if is_end else recent.begin)(moment)
    steps = 2000
    since = max(0.0, now - WINDOW_S)
    middles = [since + (now - since) * (at + 0.5) / steps for at in range(steps)]
    busy = sum(any(begin <= at < begin + took for begin, took in times) for at in middles)
    seen_s = busy / steps * (now - since)
    span_s = min(WINDOW_S, max(LEAST_SPAN_S, now))
    assert abs(recent.busy_share(now) * span_s - seen_s) <= 20 * WINDOW_S / steps
