"""The gate of one engine: a bound on its requests, and a hold that stops new ones.

The engine's scheduler decides which requests run and in which order: it knows the client, the
urgency and the memory of each. So that requests of every client reach it, the bound is shared
fairly among clients (`generation/fair_bound.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kakeya.generation.fair_bound import FairBound


class Gate:
    """Admits as many requests as may run or wait in the engine, and refuses more.

    During a hold no request gets in: new ones wait.
    """

    def __init__(
        self,
        name: str,
        *,
        max_running: int,
        max_waiting: int,
        mono: Callable[[], float],
        on_entry: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_entry` is called for each request that gets in."""
        self._name = name
        self._max_running = max_running
        self._crowd = FairBound(max_running + max_waiting, mono)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._on_entry = on_entry
        self._inside = 0
        self._outside = 0

    @property
    def running(self) -> int:
        """The number of admitted requests that can run at the same time."""
        return min(self._inside, self._max_running)

    @property
    def waiting(self) -> int:
        """The number of requests that wait, for a place or for the end of a hold."""
        return self._inside - self.running + self._outside

    @property
    def is_held(self) -> bool:
        """Whether the gate is held: no request gets in."""
        return not self._is_open.is_set()

    def hold(self) -> None:
        """Admit no request until `resume`; admitted ones go on."""
        self._is_open.clear()

    def resume(self) -> None:
        """Admit requests again."""
        self._is_open.set()

    @asynccontextmanager
    async def turn(self, client: str = "", user: str = "") -> AsyncIterator[None]:
        """Hold a place for one request. Raises QueueFull if its client's share is used up."""
        full = f"{self._name} runs {self.running} and {self.waiting} wait, which is its limit"
        with self._crowd.member(client, user, full):
            await self._pass()
            self._inside += 1
            self._on_entry()
            try:
                yield
            finally:
                self._inside -= 1

    async def _pass(self) -> None:
        """Wait as long as the gate is held."""
        self._outside += 1
        try:
            while self.is_held:
                await self._is_open.wait()
        finally:
            self._outside -= 1
