"""Who waits for pages: first come, first served, woken when some may have become free.

An arena refuses at once. Here a caller may wait a little for pins to go, in a line, so that who
wants a long range is not overtaken for ever by those who want one page. `stir` is called by the
owner after it freed something, ended a holder or cleaned a block; it serves the head of the line
until one cannot be served. An unpin tells nobody, so who stands at the head looks again each
`TRY_S`. Waiting promises nothing: who is not served in time tries once more, and gets the refusal
of that.
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
"""A tenth of what a caller waits by default; a try looks through all pages."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiter:
    tenant: PageOwner
    length: int
    holder: PinHolder
    served: asyncio.Future[Filling]
    refusal: OutOfPages


class PageLine:
    """The line in front of one arena. Lives on the event loop of its owner."""

    def __init__(self, arena: PageArena) -> None:
        self._arena = arena
        self._line: deque[_Waiter] = deque()

    def __len__(self) -> int:
        return len(self._line)

    async def prepare(
        self, tenant: PageOwner, length: int, holder: PinHolder, *, wait_s: float | None = None
    ) -> Filling:
        """Prepare a block as the arena does, or wait in line for `wait_s`; None: as configured.

        Raises OutOfPages when the time is up, PageFreed when the holder ended meanwhile.
        """
        limit_s = self._arena.config.wait_limit_s if wait_s is None else wait_s
        waiter = _Waiter(
            tenant=tenant,
            length=length,
            holder=holder,
            served=asyncio.get_running_loop().create_future(),
            refusal=OutOfPages(f"{len(self._line)} waited for pages before"),
        )
        self._line.append(waiter)
        self.stir()
        try:
            await self._served(waiter, limit_s)
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        if waiter.served.done():
            return waiter.served.result()
        self._line.remove(waiter)
        self.stir()  # who stood behind may want less
        raise waiter.refusal

    def stir(self) -> None:
        """Serve the line from its head, as far as there are pages."""
        while self._line:
            waiter = self._line[0]
            try:
                filling = self._arena.prepare(waiter.tenant, waiter.length, waiter.holder)
            except OutOfPages as refusal:
                waiter.refusal = refusal
                return
            except KakeyaError as error:  # its holder ended
                waiter.served.set_exception(error)
            else:
                waiter.served.set_result(filling)
            self._line.popleft()

    async def _served(self, waiter: _Waiter, limit_s: float) -> None:
        """Wait until it is served, or the time is up and the last try was in vain."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s
        left_s = limit_s
        while not waiter.served.done() and left_s > 0.0:
            await asyncio.wait((waiter.served,), timeout=min(left_s, TRY_S))
            left_s = until - loop.time()
            if not waiter.served.done() and (left_s <= 0.0 or self._line[0] is waiter):
                self.stir()

    def _leave(self, waiter: _Waiter) -> None:
        """End a wait that was cancelled; what was served in the same moment goes back."""
        if not waiter.served.done():
            self._line.remove(waiter)
        elif waiter.served.exception() is None:
            waiter.served.result().rollback()
        self.stir()
