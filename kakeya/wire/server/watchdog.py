"""Detect a stuck event loop from a thread, and print where it is stuck.

The thread looks at the loop all the time, and asks it for a sign of life unless it waits for work:
an idle node sleeps on. When no sign comes within the limit, the stacks of all threads go to stderr
while the loop is still stuck. Callbacks for the loop itself are put in front of all waiting work:
the loop runs them before it reads the next call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

from kakeya.core.log import event

_log = logging.getLogger(__name__)
LIMIT_S = 1.1
"""Nine times the longest collection of garbage or burst of cards."""
PAUSE_S = 0.85
"""Seconds between two looks. A loop that is stuck right after one is detected after this time and
the limit."""
CALM_S = 5.0
"""How long the loop has to run before a stall is over: the cause may come back."""


class _Sign(threading.Event):
    """A sign of life that was asked for when this was made."""

    def __init__(self) -> None:
        super().__init__()
        self._asked_mono = time.monotonic()
        self.lag_s = 0.0

    def give(self) -> None:
        """Give it, on the loop."""
        self.lag_s = time.monotonic() - self._asked_mono
        self.set()


class LoopWatchdog:
    """Watches the running loop inside a `with`.

    `looks` and `stalls` are counts, `worst_lag_s` is the longest wait for a sign.
    """

    def __init__(
        self,
        *,
        limit_s: float = LIMIT_S,
        pause_s: float = PAUSE_S,
        calm_s: float = CALM_S,
        file: TextIO | None = None,
        on_stuck: Callable[[], None] | None = None,
        on_calm: Callable[[], None] | None = None,
    ) -> None:
        """`file` takes the stacks; it must have a descriptor.

        `on_stuck` runs on the loop as soon as the loop runs again, before any waiting work;
        `on_calm` runs after the loop has run for `calm_s`.
        """
        self._limit_s = limit_s
        self._pause_s = pause_s
        self._calm_s = calm_s
        self._on_stuck = on_stuck
        self._on_calm = on_calm
        self._file = file or sys.stderr
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        self.looks = 0
        self.stalls = 0
        self.worst_lag_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        calm_mono: float | None = None
        while True:
            sign = None if self._waits_for_work() else _Sign()
            if sign is not None and not self._tell(sign.give):
                return
            if self._stop.wait(self._pause_s):
                return
            self.looks += 1
            if sign is not None:
                if not sign.wait(self._limit_s - self._pause_s):
                    self._report()
                    if not self._wait_out(sign):
                        return
                    calm_mono = time.monotonic() + self._calm_s
                self.worst_lag_s = max(self.worst_lag_s, sign.lag_s)
            if calm_mono is not None and time.monotonic() >= calm_mono:
                calm_mono = None
                self._tell(self._on_calm)

    def _waits_for_work(self) -> bool:
        """Whether the loop is in its own call of `select`; False for a loop that has none."""
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented
        names = [at.f_code.co_name for at in (frame, frame and frame.f_back) if at]
        return names == ["select", "_run_once"]

    def _wait_out(self, sign: _Sign) -> bool:
        """Wait until the loop runs again; False if the watchdog was closed."""
        self._tell(self._on_stuck)
        while not sign.wait(self._pause_s):
            if self._stop.is_set():
                return False
        event(
            _log,
            "the event loop runs again",
            level=logging.WARNING,
            stuck_s=sign.lag_s,
        )
        return True

    def _tell(self, what: Callable[[], None] | None) -> bool:
        """Let the loop call a function next; False if the loop is closed."""
        if what is None:
            return True
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            return False
        return True

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
