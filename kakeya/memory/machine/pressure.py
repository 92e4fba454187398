"""Pressure: how short of memory the machine is, by several sources, of which the worst counts.

    a fraction of memory available    at most 15 %: low; at most 5 %: critical
    own footprint against the budget  over 100 %: low; over 110 %: critical
    a level that a host dispatches    as it says, until it says otherwise or its time is up

Sources are read every 5 s, every 0.5 s while memory is short, so that no refusal outlives its
cause by a second, and at once when one of them calls. A level rises at the first reading of it, and
falls when the figure has recovered by a margin, so that it does not flap.

A source that was read once and falls silent, by a fault or by no answer in time, counts as low
until it speaks again: such a machine is neither full nor empty, it is unknown.
Nothing is loaded then that can be done without, and nothing is evicted for its silence. One that
was never read has no opinion; the others count. A source that measures tells its
distance from nominal, the margin included: so many bytes are asked back, or may be taken by loads
that can be done without. An engine above its own lease is no pressure on the machine while the
budget holds: see `backends/engine/watch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.memory.arbiter.policy import PressureLevel

_log = logging.getLogger(__name__)
POLL_S = 5.0
MIN_POLL_S = 0.5
"""The shortest time between two polls, and that of polls while memory is short."""
ANSWER_S = 10.0
"""A source is silent while it has given no answer for so long; until then its last opinion counts,
and no poll waits for it longer than MIN_POLL_S, so that it holds up no other."""
_FOOTPRINT_MARGIN = 0.05
LEVEL_BY_NATIVE = {
    "TRIM_MEMORY_RUNNING_LOW": PressureLevel.LOW,
    "TRIM_MEMORY_BACKGROUND": PressureLevel.LOW,
    "TRIM_MEMORY_RUNNING_CRITICAL": PressureLevel.CRITICAL,
    "TRIM_MEMORY_COMPLETE": PressureLevel.CRITICAL,
    "UIApplicationDidReceiveMemoryWarning": PressureLevel.CRITICAL,
}
"""The levels of Android and iOS, by the names that these systems give to hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The opinion of a source; None where it does not know a figure.

    `available_bytes` may be taken by loads before the machine becomes critical, `spare_bytes` while
    its level stays nominal for sure: negative = so many have to come back first. `is_partial`: a
    source is silent, so that fewer bytes may be available than this says.
    """

    level: PressureLevel
    source: str
    available_bytes: int | None = None
    spare_bytes: int | None = None
    is_partial: bool = False


class PressureSource(Protocol):
    """One opinion on how short of memory the machine is."""

    @property
    def name(self) -> str:
        """The name for logs and status; two sources of one kind have two names."""
        ...

    async def read(self) -> Reading | None:
        """The opinion at this moment; None = no opinion. Must return soon."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureMarks:
    """The fractions at which memory becomes low and critical, and the margin of recovery."""

    low: float = 0.15
    critical: float = 0.05
    margin: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.critical < self.low <= 1 or not 0 <= self.margin < 1:
            raise errors.ConfigError(
                f"pressure marks low={self.low} critical={self.critical} margin={self.margin}; "
                "0 <= critical < low <= 1 and a margin below 1 are needed"
            )

    def level(self, fraction: float, before: PressureLevel) -> PressureLevel:
        """The level at an available fraction, after the level `before`."""
        plain = self._plain(fraction)
        return plain if plain >= before else min(before, self._plain(fraction - self.margin))

    def calm(self) -> float:
        """The fraction above which the level is nominal, whatever it was before."""
        return self.low + self.margin

    def _plain(self, fraction: float) -> PressureLevel:
        if fraction <= self.critical:
            return PressureLevel.CRITICAL
        return PressureLevel.LOW if fraction <= self.low else PressureLevel.NOMINAL


class MachineMemory(NamedTuple):
    """The memory of a machine, or of the part of it that is ours."""

    total_bytes: int
    available_bytes: int


class AvailableMemory:
    """Pressure by the fraction of memory that is available. `probe` measures; see `machine`."""

    def __init__(
        self,
        probe: Callable[[], MachineMemory],
        *,
        marks: PressureMarks | None = None,
        name: str = "os",
    ) -> None:
        self._probe = probe
        self._marks = marks or PressureMarks()
        self._name = name
        self._level = PressureLevel.NOMINAL

    @property
    def name(self) -> str:
        """The name for logs and status."""
        return self._name

    async def read(self) -> Reading:
        """Measure, off the loop."""
        memory = await asyncio.to_thread(self._probe)
        if memory.total_bytes <= 0:
            raise errors.InvariantBroken("memory probe", f"total is {memory.total_bytes} bytes")
        self._level = self._marks.level(memory.available_bytes / memory.total_bytes, self._level)
        reserve = int(self._marks.critical * memory.total_bytes)
        calm = int(self._marks.calm() * memory.total_bytes) + 1
        return Reading(
            level=self._level,
            source=self._name,
            available_bytes=max(0, memory.available_bytes - reserve),
            spare_bytes=memory.available_bytes - calm,
        )


class FootprintPressure:
    """Pressure by the bytes that a node's processes occupy, against those that they may.

    `probe` returns both; it is called on the loop, and must not block.
    """

    def __init__(
        self, probe: Callable[[], tuple[int, int]], *, low: float = 1.0, critical: float = 1.1
    ) -> None:
        if not 0 < low < critical:
            raise errors.ConfigError(f"footprint marks {low} and {critical}; 0 < low < critical")
        self._probe = probe
        self._low = low
        self._critical = critical
        self._level = PressureLevel.NOMINAL

    @property
    def name(self) -> str:
        """The name for logs and status."""
        return "footprint"

    async def read(self) -> Reading | None:
        """Compare; no opinion while the budget is 0."""
        used, allowed = self._probe()
        if allowed <= 0:
            self._level = PressureLevel.NOMINAL
            return None
        plain = self._plain(used / allowed)
        if plain < self._level:
            plain = min(self._level, self._plain(used / allowed + _FOOTPRINT_MARGIN))
        self._level = plain
        calm = int((self._low - _FOOTPRINT_MARGIN) * allowed)
        return Reading(level=plain, source=self.name, spare_bytes=calm - used)

    def _plain(self, ratio: float) -> PressureLevel:
        if ratio > self._critical:
            return PressureLevel.CRITICAL
        return PressureLevel.LOW if ratio > self._low else PressureLevel.NOMINAL


class DispatchedPressure:
    """Levels that a host program reports, as its system told it.

    A level stands for `hold_s`, None = until the next: some systems warn, and never say that it is
    over.
    """

    def __init__(
        self, *, mono: Callable[[], float], hold_s: float | None = 60.0, name: str = "dispatched"
    ) -> None:
        self._mono = mono
        self._hold_s = hold_s
        self._name = name
        self._level = PressureLevel.NOMINAL
        self._available: int | None = None
        self._told_mono = 0.0
        self._called: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        """The name for logs and status."""
        return self._name

    def dispatch(self, level: PressureLevel | str, free_bytes: int | None = None) -> None:
        """Report a level, by its name or by a system's name for it. Raises InvalidArgument."""
        if isinstance(level, str):
            if level not in LEVEL_BY_NATIVE:
                raise errors.InvalidArgument(
                    f"{level!r} is no memory warning; known are {', '.join(LEVEL_BY_NATIVE)}",
                    param="level",
                )
            level = LEVEL_BY_NATIVE[level]
        self._level, self._available, self._told_mono = level, free_bytes, self._mono()
        for call in self._called:
            call()

    def when_told(self, call: Callable[[], None]) -> None:
        """Have `call` called at each dispatch."""
        self._called.append(call)

    async def read(self) -> Reading | None:
        """The level that stands."""
        if self._hold_s is not None and self._mono() - self._told_mono >= self._hold_s:
            self._level, self._available = PressureLevel.NOMINAL, None
        if self._level is PressureLevel.NOMINAL and self._available is None:
            return None
        return Reading(level=self._level, source=self._name, available_bytes=self._available)


def worst(readings: Sequence[Reading]) -> Reading:
    """The reading that counts: the worst level and its first source, the least available bytes,
    and the least spare bytes of that level; None where a source of that level does not know.

    Of silent sources only the level counts; beside them no bytes are to spare.
    """
    silent = [reading for reading in readings if reading.is_partial]
    told = _worst_told([reading for reading in readings if not reading.is_partial])
    if not silent:
        return told
    first = max((told, *silent), key=lambda reading: reading.level)
    spare = 0 if told.level is PressureLevel.NOMINAL else told.spare_bytes
    return replace(
        told,
        level=first.level,
        source=first.source,
        spare_bytes=None if spare is None else min(0, spare),
        is_partial=True,
    )


def _worst_told(readings: Sequence[Reading]) -> Reading:
    if not readings:
        return Reading(level=PressureLevel.NOMINAL, source="none")
    level = max(reading.level for reading in readings)
    worst_ones = [reading for reading in readings if reading.level is level]
    known = [one.available_bytes for one in readings if one.available_bytes is not None]
    spare = [one.spare_bytes for one in worst_ones if one.spare_bytes is not None]
    is_known = level is PressureLevel.NOMINAL or len(spare) == len(worst_ones)
    return Reading(
        level=level,
        source=worst_ones[0].source,
        available_bytes=min(known, default=None),
        spare_bytes=min(spare, default=None) if is_known else None,
    )


@dataclass(slots=True)
class _Listened:
    """A source with its last opinion; `reading` is the question that it has not answered yet."""

    source: PressureSource
    last: Reading | None = None
    is_silent: bool = False
    reading: asyncio.Task[Reading | None] | None = None
    asked_mono: float = 0.0

    def ask(self, now: float) -> asyncio.Task[Reading | None]:
        """The question under way, or a new one: a source that hangs is not asked twice."""
        if self.reading is None:
            self.asked_mono = now
            name = f"pressure by {self.source.name}"
            self.reading = asyncio.create_task(self.source.read(), name=name)
        return self.reading

    def hear(self, now: float, answer_s: float) -> Reading | None:
        """The opinion that counts now."""
        fault = "no answer in time"
        if self.reading and not self.reading.done() and now - self.asked_mono < answer_s:
            return self.last
        if self.reading is not None and self.reading.done():
            task, self.reading = self.reading, None
            try:
                self.last = task.result()
            except (errors.KakeyaError, OSError, ValueError) as problem:
                fault = str(problem)
            else:
                self._note(is_silent=False)
                return self.last
        self._note(is_silent=True, error=fault)
        if self.last is None:
            return None
        source = f"{self.source.name} (silent)"
        return Reading(level=PressureLevel.LOW, source=source, is_partial=True)

    def _note(self, *, is_silent: bool, **what: str) -> None:
        if is_silent is not self.is_silent:
            self.is_silent = is_silent
            event(
                _log,
                "memory pressure cannot be read" if is_silent else "memory pressure is read again",
                level=logging.WARNING if is_silent else logging.INFO,
                source=self.source.name,
                **what,
            )


class PressureMonitor:
    """Reads all sources and reports the worst at each poll, whether it changed or not."""

    def __init__(
        self,
        sources: Sequence[PressureSource],
        *,
        tell: Callable[[Reading], None],
        clock: Clock,
        is_short: Callable[[], bool] = lambda: False,
        poll_s: float = POLL_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`is_short`: requests wait for memory, or are refused for the last reading; `poll_soon`
        has to be called when the first one begins to wait."""
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise errors.ConfigError(f"pressure sources {names} share a name; each needs its own")
        if not poll_s >= MIN_POLL_S:
            raise errors.ConfigError(f"poll_s is {poll_s}; at least {MIN_POLL_S} is needed")
        self._sources = tuple(map(_Listened, sources))
        self._tell = tell
        self._clock = clock
        self._poll_s = poll_s
        self._is_short = is_short
        self._answer_s = answer_s
        self._wait_s = answer_s
        """The time that a poll waits for answers: the first one has no earlier opinions to tell."""
        self._wake, self._short = asyncio.Event(), asyncio.Event()

    def poll_now(self) -> None:
        """Read at once: the call of a source that was told a level."""
        self._wake.set()
        self._short.set()

    def poll_soon(self) -> None:
        """Read as soon as MIN_POLL_S allows it: a request waits for memory."""
        self._short.set()

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                self._wake.clear()
                self._short.clear()
                began_mono = self._clock.mono()
                await self.poll()
                if not self._is_short():
                    left_s = began_mono + self._poll_s - self._clock.mono()
                    await self._clock.sleep(left_s, self._short)
                left_s = began_mono + MIN_POLL_S - self._clock.mono()
                if left_s > 0:
                    await self._clock.sleep(left_s, self._wake)
        finally:
            for one in self._sources:
                if one.reading is not None:
                    one.reading.cancel()

    async def poll(self) -> None:
        """Read all sources once, and tell."""
        if self._sources:
            asked = [one.ask(self._clock.mono()) for one in self._sources]
            await asyncio.wait(asked, timeout=self._wait_s)
            self._wait_s = min(MIN_POLL_S, self._answer_s)
        now = self._clock.mono()
        opinions = [one.hear(now, self._answer_s) for one in self._sources]
        self._tell(worst([opinion for opinion in opinions if opinion is not None]))
