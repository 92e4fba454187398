"""Each source's table of level transitions, the composite, and the monitor's cadence."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core import errors
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.machine.machine import KernelLevel
from kakeya.memory.machine.pressure import (
    LEVEL_BY_NATIVE,
    MIN_POLL_S,
    AvailableMemory,
    DispatchedPressure,
    FootprintPressure,
    MachineMemory,
    PressureMarks,
    PressureMonitor,
    PressureSource,
    Reading,
    worst,
)
from tests.fakes import FakeClock
from tests.memory.worlds import ManualClock, until

NOMINAL, LOW, CRITICAL = PressureLevel


class Box:
    """A probe whose answer tests set."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __call__(self) -> object:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


# By available memory.


@pytest.mark.parametrize(
    ("percents", "levels"),
    [
        ([50, 16, 15, 14], [NOMINAL, NOMINAL, LOW, LOW]),
        ([50, 5, 4], [NOMINAL, CRITICAL, CRITICAL]),
        ([15, 16, 16.9, 18], [LOW, LOW, LOW, NOMINAL]),
        ([5, 6, 7, 8, 50], [CRITICAL, CRITICAL, CRITICAL, LOW, NOMINAL]),
        ([5, 50], [CRITICAL, NOMINAL]),
        ([5, 16, 18], [CRITICAL, LOW, NOMINAL]),
        ([15.5, 15, 15.5, 15, 15.5], [NOMINAL, LOW, LOW, LOW, LOW]),
    ],
)
async def test_available_memory(percents: list[float], levels: list[PressureLevel]) -> None:
    """S0.19. (d) There was no hysteresis."""
    box = Box(None)
    source = AvailableMemory(box)  # type: ignore[arg-type]
    seen = []
    for percent in percents:
        box.value = MachineMemory(1000, int(percent * 10))
        seen.append((await source.read()).level)
    assert seen == levels


async def test_loads_may_take_what_is_above_the_critical_mark() -> None:
    reading = await AvailableMemory(lambda: MachineMemory(1000, 400)).read()
    assert reading.available_bytes == 350
    reading = await AvailableMemory(lambda: MachineMemory(1000, 10)).read()
    assert reading.available_bytes == 0


@given(st.integers(1, 10**6), st.floats(0, 1))
async def test_what_it_wants_back_makes_it_nominal_and_what_it_spares_keeps_it_so(
    total: int, share: float
) -> None:
    box = Box(MachineMemory(total, int(share * total)))
    source = AvailableMemory(box)  # type: ignore[arg-type]
    reading = await source.read()
    assert reading.spare_bytes is not None
    calm = box.value.available_bytes - reading.spare_bytes
    if not 2 < calm < total:
        return
    if reading.level is not NOMINAL:
        box.value = MachineMemory(total, calm - 2)
        assert (await source.read()).level is not NOMINAL
    box.value = MachineMemory(total, calm + 1)
    assert (await source.read()).level is NOMINAL


@pytest.mark.parametrize(
    ("low", "critical", "margin"),
    [(0.1, 0.1, 0.0), (0.1, 0.2, 0.0), (1.1, 0.1, 0.0), (0.2, -0.1, 0.0), (0.2, 0.1, 1.0),
     (float("nan"), 0.1, 0.0)],
)  # fmt: skip
def test_marks_that_make_no_sense_are_refused(low: float, critical: float, margin: float) -> None:
    with pytest.raises(errors.ConfigError):
        PressureMarks(low=low, critical=critical, margin=margin)


@given(st.lists(st.floats(0, 1), min_size=1))
def test_a_level_is_never_better_than_the_figure_says(fractions: list[float]) -> None:
    marks, level = PressureMarks(), NOMINAL
    for fraction in fractions:
        level = marks.level(fraction, level)
        assert level >= marks.level(fraction, NOMINAL)
        assert level <= marks.level(fraction - marks.margin, NOMINAL)


# By footprint.


@pytest.mark.parametrize(
    ("used", "levels"),
    [
        ([90, 100, 101, 110, 111], [NOMINAL, NOMINAL, LOW, LOW, CRITICAL]),
        ([111, 108, 104, 96, 95], [CRITICAL, CRITICAL, LOW, LOW, NOMINAL]),
    ],
)
async def test_footprint_against_the_budget(used: list[int], levels: list[PressureLevel]) -> None:
    """A huge footprint is pressure even if the system still has memory."""
    box = Box(None)
    source = FootprintPressure(box)  # type: ignore[arg-type]
    seen = []
    for size in used:
        box.value = (size, 100)
        reading = await source.read()
        assert reading is not None
        assert reading.spare_bytes == 95 - size
        seen.append(reading.level)
    assert seen == levels
    box.value = (50, 0)
    assert await source.read() is None


def test_footprint_marks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(errors.ConfigError):
        FootprintPressure(lambda: (0, 0), low=1.1, critical=1.0)


# By dispatch.


def test_native_words_are_those_of_android_and_ios() -> None:
    """S0.20, S0.21."""
    assert {
        "TRIM_MEMORY_RUNNING_LOW": LOW,
        "TRIM_MEMORY_BACKGROUND": LOW,
        "TRIM_MEMORY_RUNNING_CRITICAL": CRITICAL,
        "TRIM_MEMORY_COMPLETE": CRITICAL,
        "UIApplicationDidReceiveMemoryWarning": CRITICAL,
    } == LEVEL_BY_NATIVE


async def test_a_dispatched_level_stands_until_the_next() -> None:
    clock = ManualClock()
    source = DispatchedPressure(mono=clock.mono, hold_s=None)
    assert await source.read() is None
    source.dispatch("TRIM_MEMORY_RUNNING_LOW", free_bytes=77)
    clock.advance(1e6)
    assert await source.read() == Reading(level=LOW, source="dispatched", available_bytes=77)
    source.dispatch(CRITICAL)
    assert await source.read() == Reading(level=CRITICAL, source="dispatched")
    source.dispatch(NOMINAL)
    assert await source.read() is None


async def test_a_warning_that_is_never_taken_back_passes() -> None:
    clock = ManualClock()
    source = DispatchedPressure(mono=clock.mono)
    source.dispatch("UIApplicationDidReceiveMemoryWarning")
    clock.advance(59)
    assert await source.read() == Reading(level=CRITICAL, source="dispatched")
    clock.advance(1)
    assert await source.read() is None


def test_an_unknown_word_is_refused() -> None:
    source = DispatchedPressure(mono=ManualClock().mono)
    with pytest.raises(errors.InvalidArgument, match="TRIM_MEMORY_RUNNING_LOW"):
        source.dispatch("TRIM_MEMORY_SOMETIMES")


# By the kernel, and together.


async def test_the_kernels_level() -> None:
    for level in PressureLevel:
        reading = await KernelLevel(lambda level=level: level).read()  # type: ignore[misc]
        assert reading == Reading(level=level, source="kernel")


def test_the_worst_counts_and_the_least_that_is_available() -> None:
    readings = [
        Reading(level=LOW, source="a", available_bytes=5),
        Reading(level=CRITICAL, source="b"),
        Reading(level=CRITICAL, source="c", available_bytes=9),
    ]
    assert worst(readings) == Reading(level=CRITICAL, source="b", available_bytes=5)
    assert worst([]) == Reading(level=NOMINAL, source="none")


def test_the_least_to_spare_counts_where_all_know_who_press() -> None:
    low = Reading(level=LOW, source="a", spare_bytes=-900)
    one = Reading(level=CRITICAL, source="b", spare_bytes=-5)
    two = Reading(level=CRITICAL, source="c", spare_bytes=-7)
    unknown = Reading(level=CRITICAL, source="kernel")
    assert worst([low, one, two]).spare_bytes == -7
    assert worst([low, one, unknown]).spare_bytes is None
    assert worst([low, unknown]).spare_bytes is None
    calm = Reading(level=NOMINAL, source="os", spare_bytes=5)
    assert worst([calm, Reading(level=NOMINAL, source="kernel")]).spare_bytes == 5


def monitor(
    sources: list[PressureSource], told: list[Reading], clock: ManualClock
) -> PressureMonitor:
    return PressureMonitor(sources, tell=told.append, clock=clock)


async def test_it_recovers_when_all_have() -> None:
    one, two = Box(CRITICAL), Box(LOW)
    told: list[Reading] = []
    watch = monitor([Named("one", one), Named("other", two)], told, ManualClock())
    await watch.poll()
    one.value = NOMINAL
    await watch.poll()
    two.value = NOMINAL
    await watch.poll()
    assert [reading.level for reading in told] == [CRITICAL, LOW, NOMINAL]


class Named:
    """A source that answers on the loop: a poll waits a bounded real time for a thread."""

    def __init__(self, name: str, probe: Box) -> None:
        self.name = name
        self._probe = probe

    async def read(self) -> Reading:
        return Reading(level=self._probe(), source=self.name)  # type: ignore[arg-type]


async def test_a_source_that_cannot_be_read_hides_no_other() -> None:
    broken, other = Box(errors.PeerProtocol("vm_stat printed nonsense")), Box(LOW)
    told: list[Reading] = []
    watch = monitor([Named("broken", broken), Named("other", other)], told, ManualClock())
    await watch.poll()
    assert told == [Reading(level=LOW, source="other")]
    empty = AvailableMemory(lambda: MachineMemory(0, 0))
    await monitor([empty], told, ManualClock()).poll()
    assert told[-1].level is NOMINAL


async def test_a_source_that_falls_silent_counts_as_low_and_not_as_full() -> None:
    box = Box(NOMINAL)
    told: list[Reading] = []
    watch = monitor([Named("kernel", box)], told, ManualClock())
    fault = errors.PeerProtocol("nonsense")
    for value in (NOMINAL, fault, CRITICAL, fault, fault, NOMINAL):
        box.value = value
        await watch.poll()
    levels = [reading.level for reading in told]
    assert levels == [NOMINAL, LOW, CRITICAL, LOW, LOW, NOMINAL]
    assert told[1] == Reading(level=LOW, source="kernel (silent)", spare_bytes=0, is_partial=True)


class Frozen:
    """A source that answers once, and then only when tests let it."""

    name = "frozen"

    def __init__(self) -> None:
        self.asked = 0
        self.thaws = asyncio.Event()

    async def read(self) -> Reading:
        self.asked += 1
        if self.asked > 1:
            await self.thaws.wait()
        return Reading(level=NOMINAL, source=self.name, available_bytes=900, spare_bytes=800)


async def test_a_source_that_hangs_is_silent_is_not_asked_again_and_holds_up_no_other() -> None:
    frozen, other = Frozen(), Box(NOMINAL)
    told: list[Reading] = []
    clock = ManualClock()
    watch = PressureMonitor(
        [frozen, Named("kernel", other)],
        tell=told.append,
        clock=clock,
        answer_s=0.2,
    )
    await watch.poll()
    await watch.poll()
    clock.advance(0.2)
    await watch.poll()
    other.value = CRITICAL
    await watch.poll()
    assert [(one.level, one.is_partial) for one in told] == [
        (NOMINAL, False),
        (NOMINAL, False),
        (LOW, True),
        (CRITICAL, True),
    ]
    assert frozen.asked == 2
    frozen.thaws.set()
    other.value = NOMINAL
    await watch.poll()
    assert told[-1] == told[0]


async def test_beside_a_source_of_no_opinion_one_that_hangs_holds_up_no_other() -> None:
    """A host that has told no level has no opinion, for as long as the node lives."""
    told: list[Reading] = []
    box, host = Box(NOMINAL), DispatchedPressure(mono=ManualClock().mono)
    watch = PressureMonitor(
        [Frozen(), Named("kernel", box), host],
        tell=told.append,
        clock=ManualClock(),
        answer_s=300.0,
    )
    await watch.poll()
    async with asyncio.timeout(60):
        box.value = CRITICAL
        await watch.poll()
    assert told[-1].level is CRITICAL


async def test_a_source_that_was_never_read_has_no_opinion() -> None:
    told: list[Reading] = []
    box = Box(errors.PeerUnavailable("there is none"))
    await monitor([KernelLevel(box)], told, ManualClock()).poll()  # type: ignore[arg-type]
    assert told == [Reading(level=NOMINAL, source="none")]


def test_beside_a_silent_source_no_bytes_are_to_spare_and_no_wish_is_lost() -> None:
    silent = Reading(level=CRITICAL, source="os (silent)", is_partial=True)
    calm = Reading(level=NOMINAL, source="other", available_bytes=9, spare_bytes=7)
    short = Reading(level=LOW, source="other", available_bytes=9, spare_bytes=-7)
    unknown = Reading(level=LOW, source="kernel")
    assert worst([silent, calm]) == Reading(
        level=CRITICAL, source="os (silent)", available_bytes=9, spare_bytes=0, is_partial=True
    )
    assert worst([silent, short]).spare_bytes == -7
    assert worst([silent, unknown]).spare_bytes is None


async def pump() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_it_tells_at_each_poll_and_at_once_when_something_was_dispatched() -> None:
    clock = ManualClock()
    told: list[Reading] = []
    source = DispatchedPressure(mono=clock.mono)
    watch = monitor([source], told, clock)
    source.when_told(watch.poll_now)
    running = asyncio.ensure_future(watch.run())
    await until(lambda: len(told) == 1)
    source.dispatch(CRITICAL)
    await until(lambda: len(told) == 2)
    assert told[-1].level is CRITICAL
    await pump()
    clock.advance(4.9)
    await pump()
    assert len(told) == 2
    clock.advance(0.2)
    await until(lambda: len(told) == 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_it_wakes_seldom_until_a_request_waits() -> None:
    clock = FakeClock()
    told: list[float] = []
    waiting: list[str] = []
    watch = PressureMonitor(
        [],  # one would answer in a thread, which takes real time
        tell=lambda _: told.append(clock.mono()),
        clock=clock,
        is_short=lambda: bool(waiting),
    )
    running = asyncio.ensure_future(watch.run())
    await clock.sleep(100)
    assert len(told) <= 21
    assert clock.sleeps <= 45
    waiting.append("a request")
    began, count = clock.mono(), len(told)
    watch.poll_soon()
    await clock.sleep(10)
    assert told[count] - began <= MIN_POLL_S
    assert len(told) - count >= 19
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_two_sources_of_one_name_and_a_frantic_pace_are_refused() -> None:
    clock = ManualClock()
    pair: list[PressureSource] = [Named("a", Box(LOW)), Named("a", Box(LOW))]
    with pytest.raises(errors.ConfigError, match="share a name"):
        monitor(pair, [], clock)
    with pytest.raises(errors.ConfigError, match="poll_s"):
        PressureMonitor([], tell=print, clock=clock, poll_s=0.4)
