"""The state on disk follows the node, and a full disk costs no more than what was not saved."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kakeya.core.log import WARN_S
from kakeya.node.state_writer import INTERVAL_S, RETRY_S, StateWriter
from tests.fakes import FakeClock
from tests.waiting import until


class Disk:
    def __init__(self) -> None:
        self.files: list[int] = []
        self.is_full = False

    def save(self, state: int) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.files.append(state)


class Rig:
    def __init__(self, clock: FakeClock) -> None:
        self.disk = Disk()
        self.state = 0
        self.clock = clock
        self.keeper = StateWriter(lambda: self.state, self.disk.save, saved=None, clock=clock)


class StoppedClock(FakeClock):
    """Nobody's sleep ends by itself."""

    async def sleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        await (wake or asyncio.Event()).wait()


async def running(rig: Rig, seconds: float) -> None:
    task = asyncio.ensure_future(rig.keeper.run())
    await until(lambda: rig.clock.sleeps, "the thread of the first save is done")
    await rig.clock.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_did_not_change_is_written_once() -> None:
    rig = Rig(FakeClock())
    await running(rig, 10 * INTERVAL_S)
    assert rig.disk.files == [0]


async def test_a_poke_saves_before_the_next_look() -> None:
    rig = Rig(StoppedClock())
    task = asyncio.ensure_future(rig.keeper.run())
    for state in (0, 1, 2):
        rig.state = state
        rig.keeper.poke()
        async with asyncio.timeout(60):
            while rig.disk.files[-1:] != [state]:
                await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_full_disk_is_tried_again_and_told_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(FakeClock())
    rig.disk.is_full = True
    with caplog.at_level(logging.WARNING):
        for _ in range(int(600 / RETRY_S)):
            assert not await rig.keeper.flush()
            rig.clock.advance(RETRY_S)
    assert rig.keeper.failures.count == 600 / RETRY_S
    assert len(caplog.records) == 600 / WARN_S
    assert "No space left" in rig.keeper.failures.error
    rig.disk.is_full = False
    assert await rig.keeper.flush()
    assert rig.disk.files == [0]
    assert rig.keeper.failures.error == ""


async def test_after_a_failure_the_next_try_comes_sooner() -> None:
    waits: list[float] = []

    class Watched(StoppedClock):
        async def sleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
            waits.append(seconds)
            await super().sleep(seconds, wake)

    rig = Rig(Watched())
    rig.disk.is_full = True
    task = asyncio.ensure_future(rig.keeper.run())
    for is_full in (True, False):
        rig.disk.is_full = is_full
        rig.keeper.poke()
        async with asyncio.timeout(60):
            while waits[-1:] != [RETRY_S if is_full else INTERVAL_S]:
                await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
