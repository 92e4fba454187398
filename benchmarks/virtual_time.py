"""Virtual time: an asyncio loop whose clock jumps to the next timer once nothing else can run.

Whatever waits by timers alone runs unchanged and a simulated hour takes as long as its work. What
really waits (sockets, threads, child processes) must not run on this loop. One seed, one history:
callbacks run in the order of their times and then of their making.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from kakeya.core.clock import SystemClock

EPOCH = 1_700_000_000.0
"""Wall time at the start of every run."""
T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Waits for nothing: moves the loop's time by the wait that was asked for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for something that no timer will bring")
        if timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; its `time()` starts at 0."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._jump.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, and cancel what it left behind."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class NodeClock:
    """The clocks of one machine: a wall clock that may be wrong, a monotonic one with any zero.

    Must be made on a virtual loop. `skew_s` is how far the wall clock runs ahead of the truth.
    """

    def __init__(self, *, skew_s: float = 0.0, mono_zero: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self.skew_s = skew_s
        self._mono_zero = mono_zero

    def wall(self) -> float:
        """Seconds since the epoch, as this machine believes."""
        return EPOCH + self._loop.time() + self.skew_s

    def mono(self) -> float:
        """Seconds that only grow."""
        return self._mono_zero + self._loop.time()

    def stop_mono(self, seconds: float) -> None:
        """Count as if the monotonic clock had stood still that long, as it does in sleep."""
        self._mono_zero -= seconds

    async def sleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        """Wait in virtual time, or until `wake` is set."""
        await SystemClock().sleep(seconds, wake)
