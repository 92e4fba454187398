"""Time as a dependency: wall time, monotonic time and sleep behind one Protocol.

Decisions take `now`; shells take a `Clock`. `_at` names wall seconds since the epoch, `_mono`
monotonic seconds. Tests inject `tests/fakes.py: FakeClock`, which jumps to the next sleeper.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol


class Clock(Protocol):
    """The source of time of a part."""

    def wall(self) -> float:
        """Seconds since the epoch; may jump."""
        ...

    def mono(self) -> float:
        """Seconds that only grow; the zero is arbitrary."""
        ...

    async def sleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        """Wait at least `seconds`, or until `wake` is set; other tasks run in any case."""
        ...


class SystemClock:
    """The clock of the machine."""

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    mono = staticmethod(time.monotonic)
    """Seconds of the monotonic clock. Asked twice for each streamed chunk: no call of ours."""

    async def sleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        """Sleep on the event loop. No task is made, for an idle node sleeps so all the time."""
        if wake is None or wake.is_set():
            await asyncio.sleep(seconds if wake is None else 0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wake.wait()
