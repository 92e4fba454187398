"""What the first requests of a fresh engine would wait for, done as soon as the engine is ready.

Its KV gets its name, and what is on disk of it is found. What was used last comes back into pages,
as far as they are free and the ledger has memory that nobody needs. A node that has nothing stored
takes none before it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from kakeya.core.errors import KakeyaError
from kakeya.core.units import MIB
from kakeya.node.prefix_given import EngineSeat
from kakeya.node.prefixes import NodePrefixes
from kakeya.runtime.generation import ModelFacts

RECALLED_BYTES = 256 * MIB
"""A few tenths of a second of an SSD and a processor; at most half of the free pages."""


class PrefixStart:
    """An `async with`, left before the prefixes are. Lives on the event loop."""

    def __init__(self, prefixes: NodePrefixes) -> None:
        self._prefixes = prefixes
        self._begun: dict[str, tuple[int, asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks = [task for _, task in self._begun.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ready(self, seat: EngineSeat) -> None:
        """An engine of a model is ready; said again, it changes nothing."""
        if seat.facts is None or seat.pid is None or not self._prefixes.is_on:
            return
        known = self._begun.get(seat.model_id)
        if known is not None:
            if known[0] == seat.pid:
                return
            known[1].cancel()
        work = self._prepare(seat.facts, seat.pid)
        self._begun[seat.model_id] = seat.pid, asyncio.ensure_future(work)

    async def _prepare(self, facts: ModelFacts, pid: int) -> None:
        prefixes = self._prefixes
        with contextlib.suppress(KakeyaError):  # a request finds the same, and says so
            naming = await prefixes.names.find(facts, pid, "")
            if naming is None:
                return
            if prefixes.store is not None:
                await prefixes.store.ready()
            await prefixes.recall(naming, min(RECALLED_BYTES, prefixes.free_bytes() // 2))
