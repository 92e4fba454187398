"""The decision after a child's death: waits, breaker, configuration errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.engine.restart import Exit, GiveUp, RestartIn, RestartPolicy

KILLED = Exit(returncode=-9)


def test_the_first_restart_is_immediate_and_later_ones_wait_longer():
    policy = RestartPolicy(max_deaths=100)
    deaths: list[float] = []
    waits = []
    for at in range(10):
        plan = policy.after_exit(at, KILLED, deaths)
        assert isinstance(plan, RestartIn)
        waits.append(plan.delay_s)
        deaths.append(at)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_the_breaker_opens_at_the_fifth_death_in_ten_minutes_and_names_the_last_exit():
    plan = RestartPolicy().after_exit(
        599.0, Exit(returncode=1, last_line="out of memory"), [0.0, 100.0, 200.0, 300.0]
    )
    assert plan == GiveUp(
        reason="it died 5 times in 10 minutes, the last time by exit code 1: out of memory"
    )


def test_deaths_older_than_the_window_are_forgiven():
    plan = RestartPolicy().after_exit(1000.0, KILLED, [0.0, 100.0, 200.0, 300.0])
    assert plan == RestartIn(delay_s=0.0, reason="it ended by signal SIGKILL")


def test_a_configuration_error_is_never_retried_and_its_last_line_is_the_reason():
    ended = Exit(returncode=2, last_line="no model folder /x: download it first")
    assert RestartPolicy().after_exit(0.0, ended, []) == GiveUp(
        reason="no model folder /x: download it first"
    )


@pytest.mark.parametrize(
    ("ended", "sentence"),
    [
        (Exit(returncode=-9, last_line="model ready"), "signal SIGKILL"),
        (Exit(returncode=-11, last_line="mlx.model: model probed"), "signal SIGSEGV"),
        (Exit(returncode=-15, last_line="mlx.model: model probed"), "signal SIGTERM"),
        (Exit(returncode=0, last_line="mlx.model: model probed"), "exit code 0"),
        (Exit(returncode=3, last_line="out of memory"), "exit code 3: out of memory"),
        (Exit(returncode=-250), "signal 250"),
        (Exit(returncode=-6, last_line="assertion failed"), "signal SIGABRT: assertion failed"),
        (Exit(returncode=0), "exit code 0"),
        (Exit(returncode=-9, cause="hung"), "signal SIGKILL, sent because it hung"),
        (Exit(returncode=1, last_line="no memory", cause="hung"), "exit code 1: no memory"),
        (Exit(returncode=-11, cause="hung"), "signal SIGSEGV"),
    ],
)
def test_an_exit_is_described_in_one_clause(ended, sentence):
    assert ended.describe() == sentence


@given(
    gaps=st.lists(st.floats(0.0, 2000.0), max_size=40),
    limit=st.integers(1, 6),
)
def test_at_most_limit_minus_one_restarts_happen_in_any_window(gaps, limit):
    policy = RestartPolicy(max_deaths=limit, window_s=600.0)
    now, deaths, restarts = 0.0, (), []
    for gap in gaps:
        now += gap
        plan = policy.after_exit(now, KILLED, deaths)
        deaths = (*policy.recent(now, deaths), now)
        if isinstance(plan, GiveUp):
            break
        restarts.append(now)
        assert 0.0 <= plan.delay_s <= 60.0
    for at in restarts:
        assert sum(at - 600.0 < other <= at for other in restarts) < limit
