"""What presses on a node's memory: the machine, its own footprint, what a host program tells."""

from __future__ import annotations

import random
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
    """A level by its own name, or by what a system calls it. Raises InvalidArgument."""
    if word in LEVELS:
        return PressureLevel[word.upper()]
    if word in LEVEL_BY_NATIVE:
        return LEVEL_BY_NATIVE[word]
    known = ", ".join((*LEVELS, *LEVEL_BY_NATIVE))
    raise InvalidArgument(f"{word[:80]!r} is no level of memory pressure; known: {known}")


def footprint(ledger: Snapshot) -> tuple[int, int]:
    """What a node really occupies and what it may, in bytes: what is lent and not used yet counts
    for nothing, what an engine occupies above its lease does.

    Nor does a load under way: the ledger takes it off what there is to spare, as a whole.
    """
    loading = sum(one.bytes for one in ledger.residents if one.state is State.LOADING)
    return ledger.committed_bytes - ledger.unfilled_bytes - loading, ledger.budget_bytes


def pressure_monitor(
    arbiter: MemoryArbiter,
    dispatched: DispatchedPressure,
    *,
    clock: Clock,
    rng: random.Random,
) -> PressureMonitor:
    """Read all sources and tell the arbiter. Blocks for a moment, to look at the machine."""
    return PressureMonitor(
        (*machine_sources(), FootprintPressure(lambda: footprint(arbiter.status())), dispatched),
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
