"""The queue of allocations that wait a moment for pages: first come, first served.

An arena refuses at once. Here a caller may wait for pins to end, in order, so that an allocation of
a long range is not overtaken for ever by allocations of one page. The owner calls `serve` after it
freed a block, ended a holder or cleaned a block. An unpin tells nothing, so the first in the queue
tries again each `TRY_S`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from kakeya.core.errors import KakeyaError, OutOfPages
from kakeya.memory.pages.pins import PinHolder
from kakeya.memory.pages.pool import PageOwner
from kakeya.memory.pages.shared_arena import Filling, PageArena

TRY_S = 0.01
"""A tenth of the default wait of a caller; a try looks through all pages."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter:
    tenant: PageOwner
    length: int
    holder: PinHolder
    served: asyncio.Future[Filling]
    refusal: OutOfPages


class PageQueue:
    """The queue in front of one arena. Lives on the event loop of its owner."""

    def __init__(self, arena: PageArena) -> None:
        self._arena = arena
        self._queue: deque[_Waiter] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    async def prepare(
        self, tenant: PageOwner, length: int, holder: PinHolder, *, wait_s: float | None = None
    ) -> Filling:
        """Prepare a block as the arena does, or wait in the queue for `wait_s`; None = as
        configured.

        Raises OutOfPages when the time is up, PageFreed when the holder ended meanwhile.
        """
        refusal = OutOfPages(f"{len(self._queue)} waited for pages before")
        if not self._queue:
            try:
                return self._arena.prepare(tenant, length, holder)
            except OutOfPages as problem:
                refusal = problem
        limit_s = self._arena.config.wait_limit_s if wait_s is None else wait_s
        waiter = _Waiter(
            tenant=tenant,
            length=length,
            holder=holder,
            served=asyncio.get_running_loop().create_future(),
            refusal=refusal,
        )
        self._queue.append(waiter)
        if self._queue[0] is not waiter:
            self.serve()
        try:
            await self._served(waiter, limit_s)
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        if waiter.served.done():
            return waiter.served.result()
        self._queue.remove(waiter)
        self.serve()  # the next one may want fewer pages
        raise waiter.refusal

    def serve(self) -> None:
        """Serve the queue from its head, as far as there are pages."""
        while self._queue:
            waiter = self._queue[0]
            try:
                filling = self._arena.prepare(waiter.tenant, waiter.length, waiter.holder)
            except OutOfPages as refusal:
                waiter.refusal = refusal
                return
            except KakeyaError as error:  # its holder ended
                waiter.served.set_exception(error)
            else:
                waiter.served.set_result(filling)
            self._queue.popleft()

    async def _served(self, waiter: _Waiter, limit_s: float) -> None:
        """Wait until it is served; at the end of the time it tries once more."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        left_s = limit_s
        while not waiter.served.done() and left_s > 0.0:
            await asyncio.wait((waiter.served,), timeout=min(left_s, TRY_S))
            left_s = until - loop.time()
            if not waiter.served.done() and (left_s <= 0.0 or self._queue[0] is waiter):
                self.serve()

    def _leave(self, waiter: _Waiter) -> None:
        """End a wait that was cancelled; a block that came at the same moment goes back."""
        if not waiter.served.done():
            self._queue.remove(waiter)
        elif waiter.served.exception() is None:
            waiter.served.result().rollback()
        self.serve()
