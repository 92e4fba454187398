"""The steps against an engine that occupies more than its lease. Pure, `now` is an argument.

    WITHIN     the engine is within its lease
    SHRINKING  above it: asked to free memory, and again each `ask_again_s`
    DRAINING   far above it after that: no sequence gets in, running ones may end
    ENDING     drained, or `drain_s` over: asked to end; running sequences go on in the next child
    KILLED     it did not end within `end_s`

    WITHIN -> SHRINKING -> DRAINING -> ENDING -> KILLED
       ^          | ^          |          |         |
       +-- calm --+ +- rescued +          +---------+--> WITHIN, with another child

Laws, held by the tests: no step is skipped or taken in another order; an engine within its lease is
left alone; it is asked when it goes above, then at intervals.

An engine is ended only where that can help: at least `rest_s` after the last end, then twice, four
times ... as long. An engine that is above its lease right after its start had too small a lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kakeya.core.units import format_bytes


class Stage(StrEnum):
    """The step at which an engine is."""

    WITHIN = "within"
    SHRINKING = "shrinking"
    DRAINING = "draining"
    ENDING = "ending"
    KILLED = "killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EscalationRules:
    """Shares are of the lease."""

    full: float = 1.0
    """Above this share, the engine is asked to free memory."""
    high: float = 1.1
    """An engine that was asked and is still above this share is drained. Between the two shares it
    is only asked: the ledger counts its real memory."""
    calm: float = 0.95
    """Below this share, all is well again; the asked amount brings the engine there."""
    shrink_wait_s: float = 4.0
    """Seconds from asking to draining: two measurements."""
    ask_again_s: float = 30.0
    drain_s: float = 10.0
    """Seconds for sequences to end by themselves; the limit of all draining in a node."""
    end_s: float = 5.0
    """Seconds from asking an engine to end to killing it: 2 for its streams, 2 for its thread."""
    rest_s: float = 60.0
    """Seconds between two ends of one model's engines, doubled for each end in the last hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSight:
    """One measurement of an engine. `child` is its process, `running` its sequences."""

    child: int
    resident_bytes: int
    lease_bytes: int
    running: int


@dataclass(frozen=True, slots=True)
class ShrinkIt:
    """Ask the engine for so many bytes."""

    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class HoldIt:
    """Let no new sequence in."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResumeIt:
    """Let sequences in again."""


@dataclass(frozen=True, slots=True)
class EndIt:
    """Ask the child to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class KillIt:
    """End the child."""

    reason: str


Step = ShrinkIt | HoldIt | ResumeIt | EndIt | KillIt
_HOUR_S = 3600.0


class Escalation:
    """The state of one model's engines. The caller runs `see` at intervals, and does its answer."""

    def __init__(self, rules: EscalationRules | None = None) -> None:
        self._rules = rules or EscalationRules()
        self._child: int | None = None
        self._since_mono = 0.0
        self._asked_mono = float("-inf")
        self._ends_mono: tuple[float, ...] = ()
        self.stage = Stage.WITHIN

    def see(self, sight: EngineSight, now: float) -> Step | None:
        """Decide by a measurement at `now`."""
        if sight.child != self._child:
            return self._begin(sight.child, now) or self._within(sight, now)
        match self.stage:
            case Stage.WITHIN:
                return self._within(sight, now)
            case Stage.SHRINKING:
                return self._shrinking(sight, now)
            case Stage.DRAINING:
                return self._draining(sight, now)
            case Stage.ENDING:
                return self._ending(sight, now)
            case Stage.KILLED:
                return None

    def may_end(self, now: float) -> bool:
        """Whether the last end is long enough ago for another one."""
        recent = [at for at in self._ends_mono if now - at < _HOUR_S]
        if not recent:
            return True
        return now - recent[-1] >= self._rules.rest_s * 2.0 ** (len(recent) - 1)

    def is_settled(self, resident_bytes: int, lease_bytes: int) -> bool:
        """Whether no step but asking is near, as long as the engine occupies what it does."""
        is_asked = (
            self.stage is Stage.SHRINKING and resident_bytes <= self._rules.high * lease_bytes
        )
        return self.stage is Stage.WITHIN or is_asked

    def _begin(self, child: int, now: float) -> Step | None:
        """Begin again with another child."""
        was_held = self.stage is Stage.DRAINING
        self._child = child
        self._move(Stage.WITHIN, now)
        return ResumeIt() if was_held else None

    def _within(self, sight: EngineSight, now: float) -> Step | None:
        if not self._is_above(sight, self._rules.full):
            return None
        self._move(Stage.SHRINKING, now)
        return self._ask(sight, now)

    def _shrinking(self, sight: EngineSight, now: float) -> Step | None:
        if not self._is_above(sight, self._rules.calm):
            self._move(Stage.WITHIN, now)
            return None
        has_waited = now >= self._asked_mono + self._rules.shrink_wait_s
        if self._is_above(sight, self._rules.high) and has_waited and self.may_end(now):
            self._move(Stage.DRAINING, now)
            return HoldIt(_words(sight))
        is_due = now >= self._asked_mono + self._rules.ask_again_s
        if self._is_above(sight, self._rules.full) and is_due:
            return self._ask(sight, now)
        return None

    def _draining(self, sight: EngineSight, now: float) -> Step | None:
        if not self._is_above(sight, self._rules.full):
            self._move(Stage.SHRINKING, now)
            return ResumeIt()
        if sight.running and now < self._since_mono + self._rules.drain_s:
            return None
        self._move(Stage.ENDING, now)
        self._ends_mono = (*(at for at in self._ends_mono if now - at < _HOUR_S), now)
        return EndIt(_words(sight))

    def _ending(self, sight: EngineSight, now: float) -> Step | None:
        """Decide for an engine that was asked to end. If it is within its lease and still does not
        end, its backend probes it."""
        is_late = now >= self._since_mono + self._rules.end_s
        if not is_late or not self._is_above(sight, self._rules.full):
            return None
        self._move(Stage.KILLED, now)
        return KillIt(f"{_words(sight)} and did not end within {self._rules.end_s:g} s")

    def _ask(self, sight: EngineSight, now: float) -> ShrinkIt:
        self._asked_mono = now
        wanted = sight.resident_bytes - int(self._rules.calm * sight.lease_bytes)
        return ShrinkIt(wanted, _words(sight))

    def _is_above(self, sight: EngineSight, share: float) -> bool:
        return sight.resident_bytes > share * sight.lease_bytes

    def _move(self, stage: Stage, now: float) -> None:
        self.stage = stage
        self._since_mono = now


def _words(sight: EngineSight) -> str:
    return (
        f"occupied {format_bytes(sight.resident_bytes)} of a lease of "
        f"{format_bytes(sight.lease_bytes)}"
    )
