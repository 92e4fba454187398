"""When a group counts as stuck: only while work is left and no count moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.engine.ring.progress import LOAD_STUCK_S, STUCK_S, RingProgress

RANKS = 3
MOVES = st.lists(
    st.tuples(st.sampled_from(["sent", "finished"]), st.integers(0, RANKS - 1), st.floats(0, 3)),
    max_size=40,
)


@given(moves=MOVES)
def test_a_group_is_stuck_where_work_is_left_and_nothing_moved_for_the_limit(
    moves: list[tuple[str, int, float]],
) -> None:
    progress, now_s, moved_s = RingProgress(RANKS), 0.0, 0.0
    sent, finished = [0] * RANKS, [0] * RANKS
    for kind, rank, later_s in moves:
        now_s += later_s
        if kind == "sent":
            if sent == finished:
                moved_s = now_s
            sent[rank] += 1
            progress.sent(rank, now_s)
        elif finished[rank] < sent[rank]:
            finished[rank] += 1
            moved_s = now_s
            progress.finished(rank, finished[rank], now_s)
        is_left = sent != finished
        assert progress.pending() == [r for r in range(RANKS) if finished[r] < sent[r]]
        assert bool(progress.stuck(now_s)) == (is_left and now_s - moved_s >= STUCK_S)
    assert bool(progress.stuck(now_s + 1000)) == (sent != finished)


def test_a_count_that_is_told_twice_is_no_progress() -> None:
    progress = RingProgress(2)
    progress.sent(1, 0.0)
    progress.sent(1, 0.0)
    progress.finished(1, 1, 1.0)
    progress.finished(1, 1, 7.0)
    assert "rank 1" in progress.stuck(1.0 + STUCK_S)


def test_a_load_may_take_longer_and_what_comes_behind_it_may_not() -> None:
    progress = RingProgress(2)
    progress.sent(0, 0.0, LOAD_STUCK_S)
    assert not progress.stuck(STUCK_S)
    progress.finished(0, 1, STUCK_S)
    progress.sent(0, STUCK_S)
    assert progress.stuck(2 * STUCK_S)


def test_a_forward_may_take_as_long_as_those_before_it_let_expect() -> None:
    progress = RingProgress(2)
    assert progress.limit_s(1) == progress.limit_s(15) == STUCK_S
    assert progress.limit_s(512) > 50, "nothing is known of pieces yet"
    progress.took(512, 2.0)
    assert progress.limit_s(512) == STUCK_S, "a quick model is not waited for"
    progress.took(64, 6.4)
    assert progress.limit_s(512) >= 4 * 51.2
    progress.took(1, 5.0)
    assert progress.limit_s(1) == 20.0
    for _ in range(100):
        progress.took(1, 0.1)
        progress.took(64, 0.1)
    assert progress.limit_s(1) == progress.limit_s(512) == STUCK_S, "a stall is forgotten"
