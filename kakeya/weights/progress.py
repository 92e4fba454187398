"""How far a pull is: its phase, its bytes, its speed over about a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.errors import Cancelled

TELL_S = 0.25
_MEASURED_S = 1.0
_SMOOTHING = 0.5
"""Weight of the newest measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullState:
    """How far a pull is; `bytes` 0 = not known yet. Phases: looking, waiting, checking, fetching,
    verifying, done."""

    name: str
    phase: str = "looking"
    bytes: int = 0
    done_bytes: int = 0
    resumed_bytes: int = 0
    bytes_per_s: float = 0.0
    sources: tuple[str, ...] = ()
    digest: str = ""
    path: str = ""
    note: str = ""


class PullMeter:
    """Keeps the state of one pull. `came_mono` is when the last byte came."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.state = PullState(name=name)
        self._clock = clock
        self._came_bytes = 0
        self.begin()

    def begin(self) -> None:
        """Bytes are going to come from now on."""
        self.came_mono = self._since_mono = self._clock.mono()
        self._then_bytes = self._came_bytes

    def tell(self, **told: object) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **told)  # type: ignore[arg-type]

    def add(self, size: int) -> None:
        """So many bytes came, or, if negative, are of no use."""
        if size > 0:
            self._came_bytes += size
            self.came_mono = self._clock.mono()
        self.tell(done_bytes=self.state.done_bytes + size)

    def measure(self) -> None:
        """Renew the bytes/s, where it is time for it."""
        seconds = self._clock.mono() - self._since_mono
        if self.state.phase != "fetching" or seconds < _MEASURED_S:
            return
        rate, known = (self._came_bytes - self._then_bytes) / seconds, self.state.bytes_per_s
        self._since_mono, self._then_bytes = self._clock.mono(), self._came_bytes
        self.tell(bytes_per_s=known + _SMOOTHING * (rate - known) if known else rate)

    async def follow(self, ended: asyncio.Future[Path]) -> AsyncGenerator[PullState, None]:
        """How far it is, until it is over. Raises the error with which it ends."""
        last = None
        while not ended.done():
            self.measure()
            if self.state != last:
                yield (last := self.state)
            await asyncio.wait((ended,), timeout=TELL_S)
        if ended.cancelled():
            raise Cancelled(f"the pull of {self.state.name} was ended; pull again: it goes on")
        ended.result()
        yield self.state
