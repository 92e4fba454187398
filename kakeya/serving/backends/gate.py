"""A bound on how many run at once and how many may wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kakeya.core.errors import QueueFull


class Gate:
    """Lets `max_running` in; the next `max_waiting` wait in order, further ones are refused.

    While it is held, nobody gets in: they wait.
    """

    def __init__(self, name: str, *, max_running: int, max_waiting: int) -> None:
        self._name = name
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._turns = asyncio.Semaphore(max_running)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._running = 0
        self._waiting = 0

    @property
    def running(self) -> int:
        """How many are inside."""
        return self._running

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._waiting

    @property
    def is_held(self) -> bool:
        """Whether nobody gets in for now."""
        return not self._is_open.is_set()

    def hold(self) -> None:
        """Let nobody in until `resume`; who is inside stays."""
        self._is_open.clear()

    def resume(self) -> None:
        """Let them in again."""
        self._is_open.set()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold one place. Raises QueueFull when too many wait already."""
        is_full = self._turns.locked() or self.is_held
        if is_full and self._waiting >= self._max_waiting:
            raise QueueFull(
                f"{self._name} runs {self._running} and {self._waiting} wait, "
                f"which is its limit: try again later",
                retry_after_s=1.0,
            )
        self._waiting += 1
        try:
            await self._enter()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._turns.release()

    async def _enter(self) -> None:
        while True:
            await self._is_open.wait()
            await self._turns.acquire()
            if not self.is_held:
                return
            self._turns.release()
