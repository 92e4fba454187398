"""The threads that touch the disk for a store, and the log of a disk that fails.

A thread may read into memory that another owner gets once the caller has gone, or write from it: a
cancelled caller waits here until the thread has let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kakeya.core.log import event

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Stop:
    """Tells a thread that its work is not wanted any more."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Say so; from any thread."""
        self._is_set = True

    def is_unset(self) -> bool:
        """Whether it is still wanted."""
        return not self._is_set


class DiskThreads:
    """One thread that changes the folder, in the order of the calls, and some that read."""

    def __init__(self, readers: int) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv write")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="kv read")

    async def write(self, work: Callable[[], Result], stop: Stop | None = None) -> Result:
        """Run a change of the folder; when this is cancelled, `stop` is set, the end awaited."""
        future = asyncio.get_running_loop().run_in_executor(self._writer, work)
        return await _settled(future, stop)

    def write_later(self, work: Callable[[], object]) -> None:
        """Run a change of the folder after all earlier ones, without waiting for it."""
        self._writer.submit(work)

    async def read(self, work: Callable[[], Result], stop: Stop | None = None) -> Result:
        """Run a read; when this is cancelled, `stop` is set and the end awaited."""
        future = asyncio.get_running_loop().run_in_executor(self._readers, work)
        return await _settled(future, stop)

    def close(self) -> None:
        """Take no more work; work that runs or waits is still done."""
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)


async def _settled(future: asyncio.Future[Result], stop: Stop | None = None) -> Result:
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        while not future.done():
            # However often this is cancelled: the memory is not the caller's to give away yet.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((future,))
        if not future.cancelled():
            future.exception()  # its caller has gone
        raise


class Outage:
    """The outage of a disk, logged once when it begins and once when it ends.

    `waits_s` are how long it is left alone after the 1st, 2nd, ... failure in a row.
    """

    def __init__(self, what: str, waits_s: Sequence[float]) -> None:
        self._what = what
        self._waits_s = waits_s
        self._failures = 0
        self._until_mono = 0.0
        self.problem = ""

    def is_on(self, now_mono: float) -> bool:
        """Whether it is to be left alone now."""
        return bool(self.problem) and now_mono < self._until_mono

    def began(self, problem: str, now_mono: float) -> None:
        """It failed."""
        if not self.problem:
            event(
                _log,
                f"stored KV cannot be {self._what}; going on without",
                level=logging.WARNING,
                problem=problem,
            )
        self.problem = problem
        wait_s = self._waits_s[min(self._failures, len(self._waits_s) - 1)]
        self._failures += 1
        self._until_mono = now_mono + wait_s

    def ended(self) -> None:
        """It works."""
        if self.problem:
            event(_log, f"stored KV can be {self._what} again", failures=self._failures)
        self.problem = ""
        self._failures = 0
