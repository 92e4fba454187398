"""Keep the node's state file up to date, off the event loop, also through a full disk.

The running node needs only its memory; a failed write only costs a restart its latest state.
Failures are counted, logged once in a while and retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from kakeya.core.clock import Clock
from kakeya.core.log import FailureLog

_log = logging.getLogger(__name__)
INTERVAL_S = 60.0
"""Seconds between two checks for changes; a crash loses no more than that."""
RETRY_S = 30.0
State = TypeVar("State")


class StateWriter(Generic[State]):
    """Saves `current()` when it differs from the saved state.

    `save` is called in a thread and raises OSError on failure; the old file then stays.
    """

    def __init__(
        self,
        current: Callable[[], State],
        save: Callable[[State], None],
        *,
        saved: State | None,
        clock: Clock,
    ) -> None:
        self._current = current
        self._save = save
        self._saved = saved
        self._clock = clock
        self._wake = asyncio.Event()
        message = "state not saved; a restart would not know the latest changes"
        self.failures = FailureLog(_log, message, clock, retry_in_s=RETRY_S)

    def poke(self) -> None:
        """Save soon: the change must survive a crash."""
        self._wake.set()

    async def run(self) -> None:
        """Save for ever."""
        while True:
            self._wake.clear()
            is_saved = await self.flush()
            await self._clock.sleep(INTERVAL_S if is_saved else RETRY_S, self._wake)

    async def flush(self) -> bool:
        """Save now if the state changed; return whether the file is up to date."""
        state = self._current()
        if state == self._saved:
            return True
        try:
            await asyncio.to_thread(self._save, state)
        except OSError as problem:
            self.failures.failed(problem.strerror or str(problem))
            return False
        self._saved = state
        self.failures.succeeded()
        return True
