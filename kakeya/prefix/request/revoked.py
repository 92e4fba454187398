"""What calls held that were cut off: their engines may read and write it until they are past them.

Pages that an engine was given for a call are taken back when it says that it is past that, or is
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
        """How many calls were cut off that their engines are not past."""
        return len(self._tasks)

    def let_go(self, given: KvGrant, seat: EngineSeat) -> None:
        """Take back what was given for a call: at once, or when its engine is past that."""
        if given.is_free:
            given.release(self._pages)
            return
        task = asyncio.ensure_future(self._take_back(given, seat))
        self._tasks[task] = given
        task.add_done_callback(self._tasks.pop)

    def renew(self) -> None:
        """Say that what is held is held for a reason."""
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
