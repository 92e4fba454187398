"""End engines that outgrow the whole budget, or hang beyond it, before the machine is short.

The escalation of `escalation.py` asks an engine first and is slow; the guard asks no engine, which
may hang.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kakeya.backends.engine.lease import EngineLease
from kakeya.core.clock import Clock
from kakeya.core.units import format_bytes
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.resident import ResidentKey

GUARD_S = 0.1
"""Seconds between two looks at engines that outgrow the whole budget; each look takes some 30
microseconds an engine."""
CLOSE_S = 0.01
"""The same while an engine grows fast: memory is written at gigabytes per second."""
GROWTH_SHARE = 0.02
GROWTH_S = 1.0
"""An engine that is beyond the budget, and beyond its own highest memory `GROWTH_S` ago by
`GROWTH_SHARE` of its lease, does not stop by itself. Memory that comes and goes is no growth."""
SILENT_S = 0.8
"""An engine that is beyond the budget and whose process answers nothing for so long hangs in native
code. Within the budget it may be slow in peace: the probes of its backend decide."""


@dataclass(slots=True)
class GuardedEngine:
    """One engine under guard."""

    key: ResidentKey
    lease: EngineLease
    guarded: int | None = None
    """The process at the guard's last look; `guarded_bytes` is its memory."""
    killed: int | None = None
    """The process that the guard killed; the system may take a moment to end it."""
    peaks: deque[tuple[float, int]] = field(default_factory=deque)
    """The highest memory of that process until each look of the guard in the last `GROWTH_S`."""
    guarded_bytes: int = 0
    is_asked: bool = False
    """Whether the guard waits for an answer of the process."""
    parted_bytes: int = 0
    """The idle KV that counts for the tenant and not for the engine. Both are counted in one step,
    since the spare part may change in between."""


class EngineGuard:
    """Looks at the engines that `engines` lists; `end` kills one, for a reason in words."""

    def __init__(
        self,
        arbiter: MemoryArbiter,
        clock: Clock,
        *,
        engines: Callable[[], Iterable[GuardedEngine]],
        end: Callable[[GuardedEngine, str], None],
        resident: Callable[[int], int | None],
    ) -> None:
        self._arbiter = arbiter
        self._clock = clock
        self._engines = engines
        self._end = end
        self._resident = resident

    async def run(self) -> None:
        """Look at all engines until cancelled, more often while one grows fast."""
        async with asyncio.TaskGroup() as asks:
            while True:
                is_close = await self.check_growth()
                for watched in self._engines():
                    if not watched.is_asked and self._excess(watched):
                        asks.create_task(self.check_silence(watched))
                await self._clock.sleep(CLOSE_S if is_close else GUARD_S)

    async def check_growth(self) -> bool:
        """Kill each engine that is beyond the budget and grew much in the last `GROWTH_S`; return
        whether any engine grows so. It asks no engine, which may hang, and waits for no shrink."""
        is_close = False
        for watched in tuple(self._engines()):
            pid = watched.lease.backend.pid
            occupied = None if pid is None else await asyncio.to_thread(self._resident, pid)
            if self._is_guarded(watched) and watched.lease.backend.pid == pid:
                is_close |= self._check_growth(watched, pid, occupied or 0)
        return is_close

    def _check_growth(self, watched: GuardedEngine, pid: int | None, occupied: int) -> bool:
        now, peaks = self._clock.mono(), watched.peaks
        if watched.guarded != pid:
            watched.guarded = pid
            peaks.clear()
        while len(peaks) > 1 and now - peaks[0][0] > GROWTH_S:
            peaks.popleft()
        before = peaks[0][1] if peaks else occupied
        peaks.append((now, max(occupied, peaks[-1][1] if peaks else 0)))
        watched.guarded_bytes = occupied if pid != watched.killed else 0
        if occupied - before < GROWTH_SHARE * watched.lease.bytes:
            return False
        if why := self._excess(watched):
            self._end(watched, why)
        return True

    async def check_silence(self, watched: GuardedEngine) -> None:
        """Kill an engine that is beyond the budget and does not answer for `SILENT_S`."""
        backend, watched.is_asked = watched.lease.backend, True
        pid = backend.pid
        try:
            is_alive = await backend.answers(SILENT_S)
        finally:
            watched.is_asked = False
        why = self._excess(watched)
        if not is_alive and why and self._is_guarded(watched) and backend.pid == pid:
            self._end(watched, f"{why}, and answered nothing for {SILENT_S:g} s")

    def _excess(self, watched: GuardedEngine) -> str:
        """Return in words how an engine is beyond its lease and the budget; "" = it is not."""
        lease, occupied = watched.lease.bytes, watched.guarded_bytes
        if occupied <= lease:
            return ""
        ledger = self._arbiter.status()
        resident = self._arbiter.find(*watched.key)
        counted = (resident.bytes if resident is not None else 0) + watched.parted_bytes
        if ledger.committed_bytes - counted + occupied <= ledger.budget_bytes:
            return ""
        return (
            f"grew to {format_bytes(occupied)}, beyond its lease of {format_bytes(lease)} and "
            f"the budget of {format_bytes(ledger.budget_bytes)}"
        )

    def _is_guarded(self, watched: GuardedEngine) -> bool:
        return any(one is watched for one in self._engines())
