"""A stuck event loop is noticed from outside (row 3)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kakeya.wire.server.watchdog import PAUSE_S, LoopWatchdog

pytestmark = pytest.mark.alone


def get_stuck(seconds: float) -> None:
    """A blocking call of the kind that must not be made on the loop."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


async def test_a_stuck_loop_leaves_the_stack_that_shows_where(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w") as file:
        with LoopWatchdog(limit_s=0.2, pause_s=0.02, file=file) as watchdog:
            await asyncio.sleep(0.05)
            get_stuck(1.0)
            assert watchdog.stalls == 1
            assert "get_stuck" in (tmp_path / "stacks").read_text()
            async with asyncio.timeout(60):
                while watchdog.worst_lag_s < 0.5:
                    await asyncio.sleep(0.01)


async def test_a_loop_that_waits_for_work_is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question would wake the processor of an idle node."""
    loop, asked = asyncio.get_running_loop(), []
    ask = loop.call_soon_threadsafe

    def counted(callback: Callable[[], None], *args: object) -> asyncio.Handle:
        asked.append(callback)
        return ask(callback)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    with LoopWatchdog(limit_s=30.0, pause_s=0.002) as watchdog:
        # The test itself wakes the loop a hundred times less often than the thread looks.
        while watchdog.looks < 200:
            await asyncio.sleep(0.2)
        assert len(asked) < watchdog.looks / 4
        before = len(asked)
        get_stuck(0.1)
        assert len(asked) > before, "a busy loop is asked"


async def test_a_free_loop_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w") as file:
        with LoopWatchdog(limit_s=2.0, pause_s=0.01, file=file) as watchdog:
            await asyncio.sleep(0.2)
            assert watchdog.stalls == 0
    assert (tmp_path / "stacks").read_text() == ""


@pytest.mark.parametrize("phase", [pytest.param(0.0, marks=pytest.mark.slow), 0.98])
async def test_stacks_are_out_two_seconds_after_the_block_began(
    tmp_path: Path, phase: float
) -> None:
    """Row 3: with the real limits, also when the loop gets stuck right after an answer."""
    stacks = tmp_path / "stacks"
    with stacks.open("w") as file, LoopWatchdog(file=file) as watchdog:
        while not watchdog.looks:
            await asyncio.sleep(0.001)
        await asyncio.sleep(phase * PAUSE_S)
        began_mono = time.monotonic()
        while not stacks.stat().st_size and time.monotonic() - began_mono < 10:
            time.sleep(0.01)
        assert time.monotonic() - began_mono <= 2.0
    assert "test_stacks_are_out" in stacks.read_text()
