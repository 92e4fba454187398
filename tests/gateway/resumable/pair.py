"""Two gateways that hold copies of answers for each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kakeya.core.clock import SystemClock
from tests.dispatch.routed.copies import CopyFleet
from tests.gateway.toy import Served, ToyModel, serving


class Pair:
    """Two gateways with the same model, each of which holds copies for the other."""

    def __init__(
        self, fleet: CopyFleet, first: Served, second: Served, first_life: AsyncExitStack
    ) -> None:
        self.fleet = fleet
        self.first = first
        self.second = second
        self._first_life = first_life

    async def lose_first(self) -> None:
        """Have the first one be gone, as the second one knows."""
        await self._first_life.aclose()
        self.fleet.lost.add("one")


@asynccontextmanager
async def pair(one: ToyModel, two: ToyModel, **more: Any) -> AsyncIterator[Pair]:
    fleet = CopyFleet("one", "two", clock=SystemClock())
    async with (
        AsyncExitStack() as first_life,
        serving(two, copies=fleet.at("two"), seed=2, **more) as second,
    ):
        first = await first_life.enter_async_context(serving(one, copies=fleet.at("one"), **more))
        yield Pair(fleet, first, second, first_life)
