"""The facts of this node, read from their owners while something watches."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Mapping

from kakeya.core.clock import Clock
from kakeya.core.figures import Json
from kakeya.dispatch.watch.sections import FLEET, changed, sections_of

PERIOD_S = 1.0
"""Between two looks at facts that tell of no change themselves, as speeds and sizes."""


class OwnSections:
    """Reads the status at most once a period, for however many watchers.

    `status` tells the sections; `more` has tellers of further ones, by name.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.status: Callable[[], Mapping[str, object]] = dict
        self.more: dict[str, Callable[[], object]] = {}
        self._read_mono = -math.inf
        self._sections: Json = {}
        self._draining = False

    def now(self) -> Json:
        """All sections."""
        now = self._clock.mono()
        if now - self._read_mono >= PERIOD_S / 2:
            self._read_mono = now
            told = {name: tell() for name, tell in self.more.items()}
            self._sections = sections_of({**self.status(), **told})
        return self._sections

    def own(self) -> Json:
        """The sections that tell of this node alone: what peers are told."""
        return {name: one for name, one in self.now().items() if name != FLEET}

    def drain(self) -> None:
        """End all watches."""
        self._draining = True

    async def changes(self, tell: Callable[[], Json]) -> AsyncGenerator[Json, None]:
        """Yield the sections of `tell`, and each period those that changed, until it drains."""
        before: Json = {}
        while not self._draining:
            after = tell()
            yield changed(before, after)
            before = after
            await self._clock.sleep(PERIOD_S)
