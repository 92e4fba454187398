"""The pauses after failures of a model, and what bars it."""

from __future__ import annotations

import pytest

from kakeya.backends.engine.failures import PAUSES_S, ModelFailures
from kakeya.core.errors import MemoryRefused, PeerUnavailable


class Time:
    now = 100.0

    def mono(self) -> float:
        return self.now


def test_each_pause_is_longer_until_half_an_hour_is_over() -> None:
    time = Time()
    failures = ModelFailures("m", time.mono)
    assert failures.may_load
    for pause_s in (*PAUSES_S, PAUSES_S[-1]):
        failures.note("the file is torn")
        with pytest.raises(PeerUnavailable, match="m is failed: the file is torn") as refused:
            failures.check()
        assert refused.value.retry_after_s == pause_s
        time.now += pause_s - 0.5
        assert not failures.may_load
        time.now += 0.5
        failures.check()
    time.now += 1800
    failures.note("again")
    time.now += PAUSES_S[0]
    assert failures.may_load


def test_a_load_ends_the_failure_but_not_its_count() -> None:
    time = Time()
    failures = ModelFailures("m", time.mono)
    failures.note("torn")
    failures.clear()
    failures.check()
    assert failures.reason == ""
    failures.note("torn")
    with pytest.raises(PeerUnavailable) as refused:
        failures.check()
    assert refused.value.retry_after_s == PAUSES_S[1]


def test_a_barred_model_stays_barred_whatever_fails() -> None:
    failures = ModelFailures("m", Time().mono)
    assert not failures.bar("")
    assert failures.bar("it ended the engine thrice")
    failures.note("torn")
    with pytest.raises(MemoryRefused, match="thrice"):
        failures.check()
    assert failures.bar("")
    failures.check()
