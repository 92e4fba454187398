"""A sleep ends with its time, or sooner by an event."""

from __future__ import annotations

import asyncio

import pytest

from kakeya.core.clock import Clock, SystemClock
from tests.fakes import FakeClock, SettableClock

HOUR_S = 3600.0


@pytest.fixture(params=[SystemClock, FakeClock, SettableClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = request.param()
    return made


async def test_a_sleep_ends_with_its_time(clock: Clock) -> None:
    began_mono = clock.mono()
    await clock.sleep(1 / 64, asyncio.Event())
    await clock.sleep(1 / 64)
    assert clock.mono() - began_mono >= 1 / 32


@pytest.mark.parametrize("clock", [SystemClock, SettableClock], indirect=True)
async def test_an_event_ends_a_sleep(clock: Clock) -> None:
    wake = asyncio.Event()
    asyncio.get_running_loop().call_soon(wake.set)
    async with asyncio.timeout(60):
        await clock.sleep(HOUR_S, wake)
    assert wake.is_set()


async def test_an_event_that_is_set_ends_it_at_once_and_others_run_all_the_same(
    clock: Clock,
) -> None:
    wake, ran = asyncio.Event(), asyncio.Event()
    wake.set()
    asyncio.get_running_loop().call_soon(ran.set)
    async with asyncio.timeout(60):
        await clock.sleep(HOUR_S, wake)
    assert ran.is_set()


async def test_a_sleep_that_is_cancelled_stays_so(clock: Clock) -> None:
    """Also where the event comes in the same turn of the loop."""
    wake = asyncio.Event()
    sleeper = asyncio.ensure_future(clock.sleep(HOUR_S, wake))
    await asyncio.sleep(0)
    sleeper.cancel()
    wake.set()
    with pytest.raises(asyncio.CancelledError):
        await sleeper
