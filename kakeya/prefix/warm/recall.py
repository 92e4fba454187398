"""Recall of blocks for a fresh engine, as soon as it is ready and before its first requests.

The KV of the engine gets its name, and its blocks on disk are found. The last used ones come back
into pages, as far as pages are free and the ledger has spare memory, and the part that turns text
into tokens hears of it (`recalled`). Where some blocks did not come, as a file was damaged or
memory was being moved in that moment, the recall is tried again a few times. A node without stored
blocks takes no pages before a request. Until the recall is over, and for a moment at most, the node
says that it is not ready yet: a client that waits for that begins with warm blocks, and any other
is served all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError
from kakeya.core.tasks import Supervisor, TaskHealth
from kakeya.core.units import MIB
from kakeya.generation.facts import ModelFacts
from kakeya.prefix.prefixes import NodePrefixes
from kakeya.prefix.request.grant import EngineSeat

RECALLED_BYTES = 256 * MIB
"""A few tenths of a second of an SSD and a processor; at most half of the free pages."""
_AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""When the rest is tried again."""
UNREADY_S = 0.5
"""How long a node puts off that it is ready for this: less than is noticed of a start."""


Recalled = Callable[[ModelFacts, Sequence[Sequence[int]]], Awaitable[None]]
"""Gets the histories of a model that came back, as token ids, the last used in front."""


class PrefixStart:
    """An `async with`, left before the prefixes are. Lives on the event loop."""

    def __init__(self, prefixes: NodePrefixes, *, clock: Clock) -> None:
        self._prefixes = prefixes
        self._clock = clock
        self._tasks = Supervisor(clock)
        self._begun: dict[str, int] = {}
        self._due: dict[str, tuple[ModelFacts, int]] = {}
        self._is_due = asyncio.Event()
        self._unready_until_mono = 0.0
        self.recalled: Recalled | None = None
        self.at_rest = asyncio.Event()
        """Set when all recalls are over."""
        self.at_rest.set()

    async def __aenter__(self) -> Self:
        self._tasks.start("prefixes of fresh engines", self._work)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.aclose()

    def ready(self, seat: EngineSeat) -> None:
        """Note that an engine of a model is ready; harmless twice."""
        if seat.facts is None or seat.pid is None or not self._prefixes.is_on:
            return
        if self._begun.get(seat.model_id) == seat.pid:
            return
        self._begun[seat.model_id] = seat.pid
        self._unready_until_mono = self._clock.mono() + UNREADY_S
        self._due[seat.model_id] = seat.facts, seat.pid
        self.at_rest.clear()
        self._is_due.set()

    def unready(self) -> str:
        """Why the node puts off that it is ready; "" = it does not."""
        if self.at_rest.is_set() or self._clock.mono() >= self._unready_until_mono:
            return ""
        return "what was used last is brought back from disk"

    def health(self) -> tuple[TaskHealth, ...]:
        """Its background task."""
        return self._tasks.health()

    async def _work(self) -> None:
        """One model after the other: they would wait for the same disk."""
        while True:
            while self._due:
                facts, pid = self._due.pop(next(iter(self._due)))
                with contextlib.suppress(KakeyaError):  # a request finds the same, and says so
                    await self._prepare(facts, pid)
            self.at_rest.set()
            self._is_due.clear()
            await self._is_due.wait()

    async def _prepare(self, facts: ModelFacts, pid: int) -> None:
        prefixes = self._prefixes
        naming = await prefixes.names.find(facts, pid, "")
        if naming is None:
            return
        if prefixes.store is not None:
            await prefixes.store.ready()
        left_bytes = min(RECALLED_BYTES, prefixes.free_bytes() // 2)
        for wait_s in (*_AGAIN_S, None):
            came = await prefixes.recall(naming, left_bytes)
            left_bytes = came.left_bytes
            if came.histories and self.recalled is not None:
                with contextlib.suppress(KakeyaError):  # a request finds the same, and says so
                    await self.recalled(facts, came.histories)
            if not came.is_cut or wait_s is None or self._due:
                return
            await self._clock.sleep(wait_s)
