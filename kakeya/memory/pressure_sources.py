"""Sources of pressure on a node's memory: the machine, the node's footprint, a host program."""

from __future__ import annotations

from collections.abc import Callable

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.plan import Snapshot
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import State
from kakeya.memory.machine.machine import machine_sources
from kakeya.memory.machine.pressure import (
    LEVEL_BY_NATIVE,
    DispatchedPressure,
    FootprintPressure,
    PressureMonitor,
)

LEVELS = tuple(level.name.lower() for level in PressureLevel)


def read_level(word: str) -> PressureLevel:
    """Read a level by its own name, or by a system's name for it. Raises InvalidArgument."""
    if word in LEVELS:
        return PressureLevel[word.upper()]
    if word in LEVEL_BY_NATIVE:
        return LEVEL_BY_NATIVE[word]
    known = ", ".join((*LEVELS, *LEVEL_BY_NATIVE))
    raise InvalidArgument(f"{word[:80]!r} is no level of memory pressure; known: {known}")


def footprint(ledger: Snapshot) -> tuple[int, int]:
    """The bytes that a node occupies, and those that it may.

    Lent bytes that are not used yet do not count; bytes of an engine above its lease do. A load
    under way does not count either: the ledger takes all of it off the spare bytes.
    """
    loading = sum(one.bytes for one in ledger.residents if one.state is State.LOADING)
    return ledger.committed_bytes - ledger.unfilled_bytes - loading, ledger.budget_bytes


def pressure_monitor(
    arbiter: MemoryArbiter,
    dispatched: DispatchedPressure,
    *,
    clock: Clock,
) -> PressureMonitor:
    """Read all sources and tell the arbiter. Blocks for a moment, to look at the machine."""
    monitor = PressureMonitor(
        (*machine_sources(), FootprintPressure(lambda: footprint(arbiter.status())), dispatched),
        tell=arbiter.observe,
        is_short=lambda: arbiter.is_short,
        clock=clock,
    )
    arbiter.when_waiting(monitor.poll_soon)
    return monitor


def dispatcher(
    dispatched: DispatchedPressure, arbiter: MemoryArbiter
) -> Callable[[str, int | None], str]:
    """The call of the control service that reports a level; it returns the level before."""

    def dispatch(word: str, free_bytes: int | None) -> str:
        before = arbiter.status().level.name.lower()
        dispatched.dispatch(read_level(word), free_bytes)
        return before

    return dispatch
