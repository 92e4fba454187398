"""The grants of calls that were cut off: their engines may read and write the pages until they are
past these calls. The pages are taken back when the engine says that it is past the call, or is
gone; until then they stay pinned.
"""

from __future__ import annotations

import asyncio

from kakeya.core.clock import Clock
from kakeya.prefix.pages.pages import PrefixPages
from kakeya.prefix.request.grant import EngineSeat, KvGrant

AFTER_CALL_S = 0.25
"""How long after a call was cut off its engine is asked whether it has come round."""


class RevokedGrants:
    """See the module. Lives on the event loop."""

    def __init__(self, pages: PrefixPages, clock: Clock) -> None:
        self._pages = pages
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], KvGrant] = {}

    def __len__(self) -> int:
        """How many cut-off calls their engines are not past yet."""
        return len(self._tasks)

    def let_go(self, given: KvGrant, seat: EngineSeat) -> None:
        """Take back the grant of a call: at once, or when its engine is past the call."""
        if given.is_free:
            given.release(self._pages)
            return
        task = asyncio.ensure_future(self._take_back(given, seat))
        self._tasks[task] = given
        task.add_done_callback(self._tasks.pop)

    def renew(self) -> None:
        """Renew the pins: they are no leaks."""
        for given in self._tasks.values():
            given.renew()

    async def aclose(self) -> None:
        """Take everything back."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_back(self, given: KvGrant, seat: EngineSeat) -> None:
        try:
            while given.holder.is_open:
                await self._clock.sleep(AFTER_CALL_S)
                if given.holder.is_open and await seat.is_past(given.pid):
                    break
        finally:
            given.release(self._pages)
