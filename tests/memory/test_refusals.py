"""No refusal outlives its cause: whatever the history, freed memory admits within a second.

The real chain runs on a clock of the test: sources, monitor, arbiter, queue, a toy model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kakeya.core import errors
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import ASR, TEXT_TARGET, VISION, Role
from kakeya.memory.machine.pressure import (
    ANSWER_S,
    PressureMarks,
    PressureMonitor,
    Reading,
)
from tests.fakes import FakeClock
from tests.memory.toy import Toy, capability

TOTAL, BUDGET, SIZE = 1000, 900, 300
WITHIN_S = 1.0
MARKS = PressureMarks()
ROLES: dict[str, Role] = {"text": TEXT_TARGET, "see": VISION, "hear": ASR}


class Sensor:
    """A sensor that measures what is available, is missing, or gives no answer."""

    name = "os"

    def __init__(self) -> None:
        self.available, self.is_missing = TOTAL, False
        self.thawed = asyncio.Event()
        self.thawed.set()

    async def read(self) -> Reading | None:
        await self.thawed.wait()
        if self.is_missing:
            raise errors.PeerProtocol("the sensor is missing")
        level = MARKS.level(self.available / TOTAL, PressureLevel.NOMINAL)
        spare = self.available - int(MARKS.calm() * TOTAL) - 1
        return Reading(level=level, source="os", available_bytes=self.available, spare_bytes=spare)


STEPS = st.one_of(
    st.tuples(st.just("available"), st.sampled_from((0, 40, 120, 160, 400, TOTAL))),
    st.tuples(st.sampled_from(("missing", "frozen")), st.booleans()),
    st.tuples(st.sampled_from(("use", "leave")), st.sampled_from(sorted(ROLES))),
    st.tuples(st.just("foreign"), st.sampled_from((0, 200, BUDGET))),
    st.tuples(st.just("wait"), st.sampled_from((0.1, 1.0, ANSWER_S + 1, 60.0))),
)


async def admitted_after(history: Sequence[tuple[str, object]], wanted: str) -> float:
    """The seconds from the moment when all memory is freed until a request is served."""
    clock, sensor = FakeClock(), Sensor()
    async with (
        AsyncExitStack() as stack,
        MemoryArbiter(budget=BUDGET, clock=clock, grace_s=0) as arbiter,
    ):
        for name, role in ROLES.items():
            arbiter.register(capability(name, role, Toy(), size=SIZE))
        monitor = PressureMonitor(
            [sensor], tell=arbiter.observe, clock=clock, is_short=lambda: arbiter.is_short
        )
        arbiter.when_waiting(monitor.poll_soon)
        await monitor.poll()
        polls = asyncio.create_task(monitor.run())
        stack.callback(polls.cancel)
        used: dict[str, AsyncExitStack] = {}
        for what, value in history:
            match what, value:
                case "available", int():
                    sensor.available = value
                case "missing", bool():
                    sensor.is_missing = value
                case "frozen", bool():
                    sensor.thawed.clear() if value else sensor.thawed.set()
                case "use", str() if value not in used:
                    uses = AsyncExitStack()
                    with suppress(errors.KakeyaError):
                        await uses.enter_async_context(
                            arbiter.acquire(value, "m", Terms(timeout_s=0.5))
                        )
                        used[value] = uses
                case "leave", str() if value in used:
                    await used.pop(value).aclose()
                case "foreign", int():
                    arbiter.hold("another process", value)
                case "wait", float():
                    await clock.sleep(value)
        for uses in used.values():
            await uses.aclose()
        sensor.available, sensor.is_missing = TOTAL, False
        sensor.thawed.set()
        arbiter.hold("another process", 0)
        freed_mono = clock.mono()
        while clock.mono() - freed_mono < 60:
            try:
                async with arbiter.acquire(wanted, "m", Terms(timeout_s=30.0)):
                    return clock.mono() - freed_mono
            except errors.KakeyaError:
                await clock.sleep(0.05)
    raise AssertionError("refused for a minute")


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=14), st.sampled_from(sorted(ROLES)))
def test_freed_memory_admits_within_a_second(
    history: list[tuple[str, object]], wanted: str
) -> None:
    assert asyncio.run(admitted_after(history, wanted)) <= WITHIN_S


@pytest.mark.parametrize("wanted", sorted(ROLES))
def test_a_machine_that_was_full_admits_within_a_second(wanted: str) -> None:
    full = [("available", 0), ("wait", 60.0), ("use", wanted)]
    assert asyncio.run(admitted_after(full, wanted)) <= WITHIN_S


async def test_a_frozen_sensor_is_neither_full_nor_empty() -> None:
    """It counts as low, whatever it said last."""
    told: list[Reading] = []
    for available in (0, TOTAL):
        clock, sensor = FakeClock(), Sensor()
        sensor.available = available
        monitor = PressureMonitor([sensor], tell=told.append, clock=clock, answer_s=1.0)
        await monitor.poll()
        sensor.thawed.clear()
        await monitor.poll()
        clock.advance(1.0)
        await monitor.poll()
        assert (told[-1].level, told[-1].is_partial) == (PressureLevel.LOW, True)
        sensor.thawed.set()
        await monitor.poll()
        assert not told[-1].is_partial
