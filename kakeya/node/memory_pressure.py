"""What presses on a node's memory: the machine, its own engines, and what a host program tells."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument
from kakeya.core.process import resident_bytes
from kakeya.memory.machine import machine_sources
from kakeya.memory.memory_arbiter import MemoryArbiter
from kakeya.memory.policy import Level
from kakeya.memory.pressure import (
    LEVEL_BY_NATIVE,
    DispatchedPressure,
    Footprint,
    PressureMonitor,
    Reading,
)

LEVELS = tuple(level.name.lower() for level in Level)


def read_level(word: str) -> Level:
    """A level by its own name, or by what a system calls it. Raises InvalidArgument."""
    if word in LEVELS:
        return Level[word.upper()]
    if word in LEVEL_BY_NATIVE:
        return LEVEL_BY_NATIVE[word]
    known = ", ".join((*LEVELS, *LEVEL_BY_NATIVE))
    raise InvalidArgument(f"{word[:80]!r} is no level of memory pressure; known: {known}")


class Lessee(NamedTuple):
    """An engine and what it may occupy, in bytes; `pid` None = it is being restarted."""

    pid: int | None
    lease_bytes: int


class EngineFootprint:
    """Pressure by what all engines occupy against what they may."""

    def __init__(self, lessees: Callable[[], Iterable[Lessee]]) -> None:
        self._lessees = lessees
        self._figures = (0, 0)
        self._levels = Footprint(lambda: self._figures)

    @property
    def name(self) -> str:
        """For logs and status."""
        return self._levels.name

    async def read(self) -> Reading | None:
        """Measure; no opinion while no engine serves."""
        alive = {one.pid: one.lease_bytes for one in self._lessees() if one.pid is not None}
        self._figures = (await asyncio.to_thread(_occupied, list(alive)), sum(alive.values()))
        return await self._levels.read()


def _occupied(pids: list[int]) -> int:
    return sum(resident_bytes(pid) or 0 for pid in pids)


def pressure_monitor(
    lessees: Callable[[], Iterable[Lessee]],
    arbiter: MemoryArbiter,
    dispatched: DispatchedPressure,
    *,
    clock: Clock,
    rng: random.Random,
) -> PressureMonitor:
    """Read all sources and tell the arbiter. Blocks for a moment, to look at the machine."""
    return PressureMonitor(
        (*machine_sources(), EngineFootprint(lessees), dispatched),
        tell=arbiter.observe,
        clock=clock,
        rng=rng,
    )


def dispatcher(
    dispatched: DispatchedPressure, arbiter: MemoryArbiter
) -> Callable[[str, int | None], str]:
    """What the control service calls: tell a level; returns the one that stands before it acts."""

    def dispatch(word: str, free_bytes: int | None) -> str:
        before = arbiter.status().level.name.lower()
        dispatched.dispatch(read_level(word), free_bytes)
        return before

    return dispatch
