"""The wait of a call, told in its initial metadata.

The messages have no field for it, and metadata goes out before the first of them, once: with a call
that still waits after a moment, as `x-kakeya-waiting: 2nd for memory, MODEL`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.generation.waiting import WaitTeller

WAITING = "x-kakeya-waiting"
TOLD_AFTER_S = 1.0
"""Most calls wait less, and have nothing to tell."""


class WaitMetadata:
    """Tells the wait of one call, within `async with`, until it is over."""

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], wait: WaitTeller, clock: Clock
    ) -> None:
        self._context = context
        self._wait = wait
        self._clock = clock
        self._is_sending = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._tell())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.over()

    async def over(self) -> None:
        """Note the end of the wait, before the first message."""
        task, self._task = self._task, None
        if task is None:
            return
        if not self._is_sending:  # metadata is sent once, and as a whole
            task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # the client has left: the call ends by itself

    async def _tell(self) -> None:
        await self._clock.sleep(TOLD_AFTER_S)
        if said := self._wait.describe():
            self._is_sending = True
            words = said.encode("ascii", "replace").decode()
            await self._context.send_initial_metadata(((WAITING, words),))
