"""A bound on how many run at once and how many may wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kakeya.core.errors import QueueFull


class Gate:
    """Lets `max_running` in; the next `max_waiting` wait in order, further ones are refused."""

    def __init__(self, name: str, *, max_running: int, max_waiting: int) -> None:
        self._name = name
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._turns = asyncio.Semaphore(max_running)
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

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold one place. Raises QueueFull when too many wait already."""
        if self._turns.locked() and self._waiting >= self._max_waiting:
            raise QueueFull(
                f"{self._name} runs {self._running} and {self._waiting} wait, "
                f"which is its limit: try again later",
                retry_after_s=1.0,
            )
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._turns.release()
