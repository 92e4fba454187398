"""What one caller may ask at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import Refused
from kakeya.wire.server.caller_limits import Budget, CallerAccounts, CallerLimits, TokenBucket
from tests.fakes import FakeClock

STEPS = st.lists(st.floats(0, 20, allow_nan=False), min_size=1, max_size=200)


@given(STEPS, st.floats(0.1, 50), st.floats(1, 50))
def test_a_bucket_never_lets_more_through_than_burst_and_rate(
    pauses: list[float], rate: float, burst: float
) -> None:
    bucket = TokenBucket(rate, burst)
    now, passed = 0.0, 0
    for pause in pauses:
        now += pause
        passed += bucket.take(now) == 0
        assert passed <= burst + rate * now + 1e-6


@given(STEPS, st.floats(0.1, 50), st.floats(1, 50))
def test_who_waits_as_told_is_let_through(pauses: list[float], rate: float, burst: float) -> None:
    bucket = TokenBucket(rate, burst)
    now = 0.0
    for pause in pauses:
        now += pause
        wait_s = bucket.take(now)
        if wait_s:
            now += wait_s
            assert bucket.take(now) == 0


def test_a_clock_that_goes_back_grants_nothing() -> None:
    bucket = TokenBucket(1.0, 1.0)
    assert bucket.take(100.0) == 0
    assert bucket.take(50.0) > 0
    assert bucket.take(50.5) > 0


def exchange(admission: CallerAccounts, caller: str) -> bool:
    try:
        with admission.turn(caller, Budget.EXCHANGE):
            return True
    except Refused:
        return False


def test_a_burst_of_ten_exchanges_passes_then_two_a_second() -> None:
    clock = FakeClock()
    admission = CallerAccounts(clock)
    assert sum(exchange(admission, "a") for _ in range(50)) == 10
    for _ in range(5):
        clock.advance(1.0)
        assert sum(exchange(admission, "a") for _ in range(50)) == 2
    assert exchange(admission, "b"), "the account of another caller is its own"


def gossip(admission: CallerAccounts, caller: str) -> bool:
    try:
        with admission.turn(caller, Budget.GOSSIP):
            return True
    except Refused:
        return False


def test_other_gossip_has_a_rate_too() -> None:
    """A member renewed its certificate 1000 times a second, each a line in the authority's log."""
    clock = FakeClock()
    admission = CallerAccounts(clock)
    assert sum(gossip(admission, "a") for _ in range(500)) == 100
    assert exchange(admission, "a"), "exchanges are paid from another bucket"
    clock.advance(1.0)
    assert sum(gossip(admission, "a") for _ in range(500)) == 20
    assert gossip(admission, "b")


def test_a_refusal_says_what_is_exhausted_and_for_how_long() -> None:
    admission = CallerAccounts(FakeClock(), CallerLimits(exchange_burst=1))
    assert exchange(admission, "a")
    with pytest.raises(
        Refused, match=r"a makes more than 2 exchanges a second; .* in 0\.5 s"
    ) as no:
        with admission.turn("a", Budget.EXCHANGE):
            pass
    assert no.value.retry_after_s == pytest.approx(0.5)


def test_calls_that_fill_their_budget_leave_gossip_its_own() -> None:
    admission = CallerAccounts(FakeClock())
    with ExitStack() as calls:
        for _ in range(128):
            calls.enter_context(admission.turn("a", Budget.WORK))
        with pytest.raises(Refused, match="128 calls running here and may have 128 at once"):
            calls.enter_context(admission.turn("a", Budget.WORK))
        for _ in range(8):
            calls.enter_context(admission.turn("a", Budget.GOSSIP))
        with pytest.raises(Refused, match="8 gossip calls running"):
            calls.enter_context(admission.turn("a", Budget.GOSSIP))
        calls.enter_context(admission.turn("b", Budget.WORK))
    with admission.turn("a", Budget.WORK), admission.turn("a", Budget.GOSSIP):
        pass


def test_a_call_that_fails_gives_its_place_back() -> None:
    admission = CallerAccounts(FakeClock(), CallerLimits(concurrent_work=1))
    for _ in range(3):
        with pytest.raises(KeyError), admission.turn("a", Budget.WORK):
            raise KeyError
    with admission.turn("a", Budget.WORK):
        pass


def test_a_refused_exchange_does_not_hold_a_place() -> None:
    admission = CallerAccounts(FakeClock(), CallerLimits(exchange_burst=1, concurrent_gossip=2))
    assert exchange(admission, "a")
    for _ in range(5):
        assert not exchange(admission, "a")
    with admission.turn("a", Budget.GOSSIP), admission.turn("a", Budget.GOSSIP):
        pass


def test_strangers_without_number_are_forgotten_but_not_who_has_calls_running() -> None:
    admission = CallerAccounts(FakeClock(), CallerLimits(callers=100, concurrent_work=1))
    with admission.turn("long", Budget.WORK):
        for number in range(1000):
            exchange(admission, f"stranger {number}")
        assert len(admission) <= 101
        with pytest.raises(Refused), admission.turn("long", Budget.WORK):
            pass
