"""The last events in a node's memory and their reasons, in words for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kakeya.core.units import format_bytes
from kakeya.memory.arbiter.events import (
    EngineDrained,
    EngineKilled,
    EngineShrunk,
    Event,
    Evicted,
    LoadFailure,
    MemoryPressure,
    ModelLoad,
    ModelUnload,
    RequestRefused,
)
from kakeya.memory.arbiter.plan import Exhausted, Reason
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.leases.rules import CAPABILITY as JOB
from kakeya.memory.leases.rules import waits_on

KEPT = 20
_ENDS = {
    Reason.RELEASE: "its engine failed, or it was unloaded on request",
    Reason.IDLE: "it was not used for long",
    Reason.SHUTDOWN: "the node stops",
}


@dataclass(frozen=True, slots=True)
class Happening:
    """An event in words; `model` "" = of no model in particular."""

    at_mono: float
    what: str
    model: str
    why: str

    @property
    def told(self) -> tuple[str, str, str]:
        """All fields but the time."""
        return self.what, self.model, self.why


class MemoryLog:
    """Keeps the last events; a listener of the arbiter."""

    def __init__(self, mono: Callable[[], float]) -> None:
        self._mono = mono
        self._last: deque[Happening] = deque(maxlen=KEPT)
        self._evictions: deque[Happening] = deque(maxlen=KEPT)
        self._source = "none"
        self._level = PressureLevel.NOMINAL

    @property
    def source(self) -> str:
        """The source of the present level of pressure."""
        return self._source

    def last(self) -> tuple[Happening, ...]:
        """The last events, the newest last."""
        return tuple(self._last)

    def evictions(self) -> tuple[Happening, ...]:
        """The last evictions, however many other events came since; the newest last."""
        return tuple(self._evictions)

    def take(self, happened: Event) -> None:
        """Keep an event, if it is of interest to people."""
        if isinstance(happened, ModelLoad | ModelUnload) and happened.key.capability == JOB:
            self._take_job(happened)
        else:
            self._take(happened)

    def _take_job(self, happened: ModelLoad | ModelUnload) -> None:
        job = happened.key.model_key
        if isinstance(happened, ModelLoad):
            self._note("leased", job, f"{format_bytes(happened.estimate_bytes)} to another process")
        else:
            self._note("lease ended", job, "nothing of it lives, or it was given back")

    def _take(self, happened: Event) -> None:
        match happened:
            case ModelLoad():
                why = f"{happened.load_s:.1f} s, estimated {format_bytes(happened.estimate_bytes)}"
                if happened.measured_bytes is not None:
                    why += f", lent {format_bytes(happened.measured_bytes)}"
                self._note("loaded", happened.key.model_key, why)
            case ModelUnload() if happened.reason in _ENDS:
                self._note("unloaded", happened.key.model_key, _ENDS[happened.reason])
            case Evicted():
                self._note("evicted", happened.key.model_key, self._why_evicted(happened))
                self._evictions.append(self._last[-1])
            case EngineShrunk():
                why = f"gave {format_bytes(happened.bytes)}: {happened.reason}"
                self._note("shrunk", happened.key.model_key, why)
            case EngineDrained():
                self._note("drained and ended", happened.key.model_key, happened.reason)
            case EngineKilled():
                self._note("killed", happened.key.model_key, happened.reason)
            case LoadFailure():
                self._note("load failed", happened.key.model_key, happened.error.message)
            case RequestRefused() if not waits_on(happened.key, happened.error):
                self._note("refused", happened.key.model_key, happened.error.message)
            case MemoryPressure():
                self._level, self._source = happened.level, happened.source
                self._note(f"pressure {happened.level.name.lower()}", "", f"by {happened.source}")
            case Exhausted():
                kept = ", ".join(map(str, happened.kept)) or "nothing"
                self._note("pressure finds nothing to take", "", f"in use, pinned or text: {kept}")
            case _:
                pass

    def _why_evicted(self, evicted: Evicted) -> str:
        given = f"gave {format_bytes(evicted.bytes)}"
        if evicted.reason is Reason.PRESSURE:
            return f"{given}: pressure was {self._level.name.lower()} by {self._source}"
        if evicted.room_for is not None:
            return f"{given} to {evicted.room_for.model_key} ({evicted.reason.value})"
        return f"{given}: more was in use than the budget"

    def _note(self, what: str, model: str, why: str) -> None:
        # A repeated event is kept once: a request that is repeated does not push out the others.
        if self._last and (what, model, why) == self._last[-1].told:
            self._last.pop()
        self._last.append(Happening(self._mono(), what, model, why))
