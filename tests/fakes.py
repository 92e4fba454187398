"""Fakes for time and chance; everything else in the tests is the real part."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Coroutine
from itertools import count
from typing import Any

_GRACES = 3


async def set_by(task: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Wait until a task has set an event; a task that ends without it raises here."""
    seen = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, seen), return_when=asyncio.FIRST_COMPLETED)
        assert event.is_set(), f"{task.result()!r} came before the event"
    finally:
        seen.cancel()


async def _first_of(sleep: Coroutine[None, None, None], wake: asyncio.Event) -> None:
    """Wait until a sleep is over or an event is set."""
    tasks = (asyncio.ensure_future(sleep), asyncio.ensure_future(wake.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FakeClock:
    """A clock that jumps to the next sleeper once nothing else can run.

    `sleeps` counts the sleeps that were begun: each wakes the process once. `wall` and `mono` start
    at given values; `shift_wall` jumps the wall clock alone, as a person
    who sets the time does.
    """

    def __init__(self, wall: float = 1_700_000_000.0, mono: float = 1_000.0) -> None:
        self._wall = wall
        self._mono = mono
        self.sleeps = 0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._jumper: asyncio.Task[None] | None = None

    def wall(self) -> float:
        return self._wall

    def mono(self) -> float:
        return self._mono

    def advance(self, seconds: float) -> None:
        """Move both clocks; sleepers that are due wake on the next turn of the loop."""
        self._wall += seconds
        self._mono += seconds
        self._wake_due()

    def shift_wall(self, seconds: float) -> None:
        self._wall += seconds

    async def sleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        if wake is not None:
            await _first_of(self.sleep(seconds), wake)
            return
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        self.sleeps += 1
        due = self._mono + seconds
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (due, next(self._order), waiter))
        if self._jumper is None or self._jumper.done():
            self._jumper = asyncio.get_running_loop().create_task(self._jump())
        await waiter

    async def _jump(self) -> None:
        graces = _GRACES
        while self._sleepers:
            for _ in range(20):  # let everything that can run, run
                await asyncio.sleep(0)
            woken = False
            while self._sleepers and self._sleepers[0][2].done():
                heapq.heappop(self._sleepers)
                woken = True
            if woken and graces:
                # Whoever was woken by something else may be about to sleep again, for less than
                # the others do; but not for ever.
                graces -= 1
                continue
            graces = _GRACES
            if self._sleepers:
                self.advance(max(0.0, self._sleepers[0][0] - self._mono))

    def _wake_due(self) -> None:
        while self._sleepers and self._sleepers[0][0] <= self._mono:
            waiter = heapq.heappop(self._sleepers)[2]
            if not waiter.done():
                waiter.set_result(None)


class SettableClock:
    """The machine's clock, moved on by hand: for tests that wait for real sockets meanwhile."""

    def __init__(self) -> None:
        self._ahead_s = self._wall_ahead_s = 0.0
        self._moved = asyncio.Event()

    def wall(self) -> float:
        return time.time() + self._ahead_s + self._wall_ahead_s

    def mono(self) -> float:
        return time.monotonic() + self._ahead_s

    def shift_wall(self, seconds: float) -> None:
        """Move the wall clock alone, as a person who sets the time does."""
        self._wall_ahead_s += seconds

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
        self._moved.set()
        self._moved = asyncio.Event()

    async def sleep(self, seconds: float, wake: asyncio.Event | None = None) -> None:
        if wake is not None:
            await _first_of(self.sleep(seconds), wake)
            return
        due = self.mono() + seconds
        while (left := due - self.mono()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._moved.wait()
