"""A stuck event loop is noticed from outside (row 3)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from kakeya.node.watchdog import LoopWatchdog


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
            async with asyncio.timeout(5):
                while watchdog.worst_lag_s < 0.5:
                    await asyncio.sleep(0.01)


async def test_a_free_loop_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w") as file:
        with LoopWatchdog(limit_s=2.0, pause_s=0.01, file=file) as watchdog:
            await asyncio.sleep(0.2)
            assert watchdog.stalls == 0
    assert (tmp_path / "stacks").read_text() == ""
