"""Who may ask an engine: a bound on all of them, and a door that can be held.

Which of them run, and who waits for whom, the engine's own scheduler decides: it knows who asks,
how urgent it is, and how much room each needs. So that it hears of every client, the bound is
shared among them (see `crowd`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kakeya.generation.fair_bound import FairBound


class Gate:
    """Lets in as many as can run or may wait for that; further ones are refused.

    While it is held, nobody gets in: they wait.
    """

    def __init__(self, name: str, *, max_running: int, max_waiting: int) -> None:
        self._name = name
        self._max_running = max_running
        self._crowd = FairBound(max_running + max_waiting)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._inside = 0
        self._outside = 0

    @property
    def running(self) -> int:
        """How many run, as far as there are places."""
        return min(self._inside, self._max_running)

    @property
    def waiting(self) -> int:
        """How many wait, for a place or for the door."""
        return self._inside - self.running + self._outside

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
    async def turn(self, client: str = "", user: str = "") -> AsyncIterator[None]:
        """Be one of them. Raises QueueFull when there are too many already, of this client."""
        full = f"{self._name} runs {self.running} and {self.waiting} wait, which is its limit"
        with self._crowd.member(client, user, full):
            await self._pass()
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1

    async def _pass(self) -> None:
        """Wait before the door as long as it is held."""
        self._outside += 1
        try:
            while self.is_held:
                await self._is_open.wait()
        finally:
            self._outside -= 1
