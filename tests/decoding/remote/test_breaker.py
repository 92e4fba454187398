from __future__ import annotations

import random

import pytest

from kakeya.decoding.remote.breaker import BreakerState, CircuitBreaker


def breaker() -> CircuitBreaker:
    return CircuitBreaker(random.Random(1))


def fail(subject: CircuitBreaker, now: float, times: int = 3) -> None:
    for _ in range(times):
        subject.failed(now)


def test_two_failures_are_forgiven_and_three_in_a_row_are_not():
    subject = breaker()
    fail(subject, 0, 2)
    assert subject.admit(0)
    subject.succeeded()
    fail(subject, 0, 2)
    assert subject.admit(0)
    subject.failed(0)
    assert not subject.admit(0)
    assert subject.state is BreakerState.OPEN


def test_after_the_backoff_one_call_is_let_through():
    subject = breaker()
    fail(subject, 0)
    assert not subject.admit(0.7)
    assert subject.admit(1.3)
    assert not subject.admit(1.3)


def test_success_of_the_trial_closes_it_and_forgets_the_backoff():
    subject = breaker()
    fail(subject, 0)
    subject.admit(2)
    subject.succeeded()
    assert subject.admit(2)
    fail(subject, 2)
    assert subject.retry_mono <= 2 + 1.2


def test_the_backoff_doubles_up_to_a_minute_with_jitter():
    subject = breaker()
    fail(subject, 0)
    now, waits = 0.0, []
    for _ in range(10):
        waits.append(subject.retry_mono - now)
        now = subject.retry_mono
        assert subject.admit(now)
        subject.failed(now)
    for wait, nominal in zip(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60, 60], strict=True):
        assert 0.8 * nominal <= wait <= 1.2 * nominal
    assert len({wait / round(wait) for wait in waits}) > 1


def test_a_trial_that_was_cancelled_says_nothing():
    subject = breaker()
    fail(subject, 0)
    assert subject.admit(5)
    subject.withdrawn()
    assert subject.admit(5)


@pytest.mark.parametrize("seed", range(5))
def test_two_nodes_do_not_return_together(seed):
    first, second = CircuitBreaker(random.Random(seed)), CircuitBreaker(random.Random(seed + 99))
    fail(first, 0)
    fail(second, 0)
    assert first.retry_mono != second.retry_mono
