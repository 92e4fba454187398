"""Notices that the event loop is stuck, which nothing on the loop can, and tells where.

A thread asks the loop for a sign of life all the time. When none comes within the limit, the
stacks of all threads go to stderr, while the loop is still where it is stuck.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

from kakeya.core.log import event

_log = logging.getLogger(__name__)
LIMIT_S = 1.5
"""Ten times what a collection of garbage or a burst of cards may take."""
_PAUSE_S = 0.5


class LoopWatchdog:
    """Watches the running loop inside a `with`; `stalls` counts, `worst_lag_s` remembers."""

    def __init__(
        self, *, limit_s: float = LIMIT_S, pause_s: float = _PAUSE_S, file: TextIO | None = None
    ) -> None:
        """`file` takes the stacks; it must have a descriptor."""
        self._limit_s = limit_s
        self._pause_s = pause_s
        self._file = file or sys.stderr
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        self.stalls = 0
        self.worst_lag_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self._pause_s):
            asked_mono = time.monotonic()
            sign = threading.Event()
            try:
                self._loop.call_soon_threadsafe(sign.set)
            except RuntimeError:
                return  # the loop is closed
            if not sign.wait(self._limit_s):
                self._report()
                while not sign.wait(self._pause_s):
                    if self._stop.is_set():
                        return
                event(
                    _log,
                    "the event loop runs again",
                    level=logging.WARNING,
                    stuck_s=time.monotonic() - asked_mono,
                )
            self.worst_lag_s = max(self.worst_lag_s, time.monotonic() - asked_mono)

    def _report(self) -> None:
        self.stalls += 1
        event(
            _log,
            "the event loop is stuck; all stacks follow",
            level=logging.ERROR,
            limit_s=self._limit_s,
        )
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        self._file.flush()
