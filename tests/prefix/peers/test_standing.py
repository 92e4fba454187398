from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.prefix.peers.standing import (
    FAILURES,
    FIRST_PAUSE_S,
    LIE_S,
    LONGEST_LIE_S,
    LONGEST_PAUSE_S,
    PeerRecord,
)


def test_who_lies_once_is_left_alone_for_long_and_longer_each_time():
    standing, now = PeerRecord(), 0.0
    for _ in range(12):
        pause_s = standing.lied(now)
        standing.sent()
        assert not standing.may_be_asked(now + pause_s - 1)
        assert standing.may_be_asked(now + pause_s)
        now += pause_s
    assert pause_s == LONGEST_LIE_S > LIE_S


def test_who_fails_some_times_in_a_row_has_a_pause():
    standing = PeerRecord()
    for _ in range(FAILURES - 1):
        standing.failed(0.0)
    assert standing.may_be_asked(0.0)
    standing.failed(0.0)
    assert not standing.may_be_asked(FIRST_PAUSE_S - 0.1)
    assert standing.may_be_asked(FIRST_PAUSE_S)
    standing.failed(10.0)
    assert not standing.may_be_asked(10.0 + FIRST_PAUSE_S)
    standing.sent()
    standing.failed(100.0)
    assert standing.may_be_asked(100.0)


@given(st.lists(st.tuples(st.sampled_from(["lied", "failed", "sent"]), st.floats(0, 100))))
def test_nobody_is_left_alone_for_ever(events):
    standing, now = PeerRecord(), 0.0
    for kind, later in events:
        now += later
        if kind == "sent":
            standing.sent()
        else:
            getattr(standing, kind)(now)
    assert standing.may_be_asked(now + max(LONGEST_LIE_S, LONGEST_PAUSE_S))
