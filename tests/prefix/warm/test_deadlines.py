"""Deadlines of warm prefixes: none is unseen past its window, and none is seen too often."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.generation.retention import Retention
from kakeya.prefix.warm.deadlines import STALE_FRACTION, Deadlines


@pytest.mark.parametrize(
    ("retention", "keep_alive_s", "pause_s"),
    [
        (Retention.SHORT, 240, 240),
        (Retention.SHORT, 30, 30),
        (Retention.SHORT, 9999, 240),
        (Retention.LONG, 240, 2880),
        (Retention.EXTENDED, 240, 69120),
    ],
)
def test_a_prefix_is_due_at_four_fifths_of_its_window(retention, keep_alive_s, pause_s):
    deadlines = Deadlines(keep_alive_s)
    assert deadlines.pause_s(retention) == pause_s
    deadlines.touched("k", retention, 1000.0)
    assert deadlines.next_due() == 1000.0 + pause_s
    assert deadlines.due(1000.0 + pause_s - 0.001) == ()
    assert deadlines.due(1000.0 + pause_s) == ("k",)


def test_a_prefix_is_due_when_it_ends_whatever_was_said_of_it_since():
    deadlines = Deadlines(240)
    deadlines.touched("k", Retention.SHORT, 1000.0, end_mono=1100.0)
    assert deadlines.next_due() == 1100.0
    deadlines.used("k", 1090.0)
    assert deadlines.next_due() == 1100.0
    deadlines.postpone("k", 1200.0)
    assert deadlines.next_due() == 1100.0


touches = st.lists(
    st.tuples(
        st.floats(0, 5000),
        st.sampled_from("abcdef"),
        st.sampled_from([Retention.SHORT, Retention.LONG]),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(touches, st.floats(30, 400), st.floats(0, 0.19))
def test_no_prefix_outlives_its_window_unseen(given_touches, keep_alive_s, late):
    """Whoever sleeps until the next deadline, and wakes late by less than the margin, sees each
    prefix within its window, whenever others were touched."""
    deadlines = Deadlines(keep_alive_s)
    seen: dict[str, tuple[float, Retention]] = {}
    events = sorted(given_touches)
    lateness = late * Retention.SHORT.seconds

    def touch(key, retention, now):
        if key in seen:
            before, its = seen[key]
            assert now - before <= its.seconds
        seen[key] = (now, retention)
        deadlines.touched(key, retention, now)

    now = 0.0
    while now < 12_000:
        wakes = deadlines.next_due()
        wakes = float("inf") if wakes is None else max(now, wakes + lateness)
        if events and events[0][0] <= wakes:
            now, key, retention = events.pop(0)
            now = max(now, 0.0)
            if key not in seen or now - seen[key][0] <= seen[key][1].seconds:
                touch(key, retention, now)
            continue
        if wakes == float("inf"):
            return
        now = wakes
        due = deadlines.due(now)
        assert due
        for key in due:
            touch(key, seen[key][1], now)


def test_the_hole_of_a_fixed_sweep_is_closed():
    """Touched just after a beat of 240 s, a sweep sees a prefix at 480 s; its window is 300 s."""
    deadlines = Deadlines(240)
    deadlines.touched("k", Retention.SHORT, 240.001)
    assert deadlines.next_due() <= 240.001 + STALE_FRACTION * 300 < 240 + 300


def test_what_is_due_stays_due_until_it_is_told_and_the_oldest_comes_first():
    deadlines = Deadlines(240)
    for second, key in enumerate("cab"):
        deadlines.touched(key, Retention.SHORT, float(second))
    assert deadlines.due(1000.0) == ("c", "a", "b")
    deadlines.postpone("c", 1030.0)
    deadlines.forget("a")
    assert deadlines.due(1000.0) == ("b",)
    deadlines.used("b", 1000.0)
    assert deadlines.due(1000.0) == ()
    assert deadlines.next_due() == 1030.0
    assert len(deadlines) == 2
    assert "a" not in deadlines


def test_keys_that_are_not_known_are_no_matter():
    deadlines = Deadlines(240)
    deadlines.used("x", 1.0)
    deadlines.postpone("x", 2.0)
    deadlines.forget("x")
    assert deadlines.next_due() is None
    assert deadlines.due(1e9) == ()


def test_many_touches_leave_no_garbage():
    deadlines = Deadlines(240)
    for n in range(10_000):
        deadlines.touched(f"k{n % 3}", Retention.SHORT, float(n))
    assert len(deadlines._heap) < 200
    assert deadlines.next_due() == 9997.0 + 240
