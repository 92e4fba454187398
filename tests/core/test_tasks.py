"""Background work ends only when it returns or its group closes."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.tasks import Supervisor, every, is_cancelled, shared_pause_s
from tests.fakes import FakeClock


@pytest.mark.parametrize("fault", [OSError("gone"), asyncio.CancelledError()], ids=repr)
async def test_work_that_ends_in_a_fault_is_started_again(fault: BaseException) -> None:
    """Also where what it awaited was cancelled, which nobody did to the work itself."""
    begun, is_there = 0, asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise fault
        is_there.set()
        await asyncio.Event().wait()

    async with Supervisor(FakeClock()) as tasks:
        tasks.start("work", work)
        await asyncio.wait_for(is_there.wait(), 30)
        (health,) = tasks.health()
        assert (health.failures, health.last_error, health.running) == (2, repr(fault), True)
    assert begun == 3
    assert not tasks.health()[0].running


async def test_work_whose_clean_up_fails_ends_all_the_same() -> None:
    is_there = asyncio.Event()

    async def work() -> None:
        try:
            is_there.set()
            await asyncio.Event().wait()
        finally:
            raise OSError("gone")

    async with asyncio.timeout(30), Supervisor(FakeClock()) as tasks:
        tasks.start("work", work)
        await is_there.wait()
    (health,) = tasks.health()
    assert (health.failures, health.last_error, health.running) == (1, "OSError('gone')", False)


async def test_restarts_are_later_for_failures_in_a_row_and_not_for_those_a_day_apart() -> None:
    clock, begun_mono, ran_s = FakeClock(), [], [0, 0, 0, 0, 30, 86_400, 86_400, 0]

    async def work() -> None:
        begun_mono.append(clock.mono())
        if not ran_s:
            return
        await clock.sleep(ran_s.pop(0))
        raise OSError("gone")

    spent_s = list(ran_s)
    async with Supervisor(clock) as tasks:
        tasks.start("work", work)
        async with asyncio.timeout(60):
            while tasks.health()[0].running:
                await asyncio.sleep(0)
        assert tasks.health()[0].failures == 8
    gaps = [round(b - a, 3) for a, b in pairwise(begun_mono)]
    waits = [round(gap - spent, 3) for gap, spent in zip(gaps, spent_s, strict=True)]
    assert waits == [0.1, 0.5, 2.0, 10.0, 30.0, 0.1, 0.1, 0.5]


async def test_a_task_knows_whether_it_is_the_one_that_is_to_end() -> None:
    async def told(work: asyncio.Future[None]) -> bool:
        try:
            await work
        except asyncio.CancelledError:
            return is_cancelled()
        raise AssertionError("nothing was cancelled")

    for is_own in (False, True):
        inner: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        outer = asyncio.ensure_future(told(inner))
        await asyncio.sleep(0)
        (outer if is_own else inner).cancel()
        assert await outer is is_own


@given(st.floats(0.001, 4096), st.floats(0, 1e7))
def test_a_shared_pause_is_an_interval_give_or_take_a_half(interval: float, mono: float) -> None:
    pause = shared_pause_s(interval, mono)
    assert interval / 2 - 1e-6 <= pause <= interval * 3 / 2 + 1e-6
    assert shared_pause_s(0.0, mono) == 0


async def test_looks_that_share_their_moments_wake_the_process_once() -> None:
    """However late each began, and however long each takes."""
    clock = FakeClock()
    looked: list[float] = []

    async def look(rng: random.Random) -> None:
        looked.append(clock.mono())
        await clock.sleep(rng.random())

    async with Supervisor(clock) as tasks:
        for number in range(5):
            rng = random.Random(number)
            await clock.sleep(rng.random())

            async def run(rng: random.Random = rng) -> None:
                await every(2.0, lambda: look(rng), clock=clock, rng=rng, is_shared=True)

            tasks.start("look", run)
        await clock.sleep(100)
    settled = [at for at in looked if at > looked[0] + 10]
    assert len(set(settled)) <= 46
    assert len(settled) >= 5 * 43
