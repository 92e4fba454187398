"""Events in memory, for listeners: metrics, status, the card, plug-ins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kakeya.core import errors
from kakeya.core.log import event
from kakeya.memory.arbiter.plan import Exhausted, Reason
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import ResidentKey

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """A model was loaded. `measured_bytes` is None where its handler does not measure."""

    key: ResidentKey
    load_s: float
    estimate_bytes: int
    measured_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnload:
    """A model left memory."""

    key: ResidentKey
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """A model was evicted for another one, for pressure or for the budget."""

    key: ResidentKey
    reason: Reason
    bytes: int
    room_for: ResidentKey | None = None
    """The model that needed its room; None = none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPressure:
    """The level of pressure changed. `source` is the source with the worst level."""

    level: PressureLevel
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRun:
    """A run ended, well or not."""

    key: ResidentKey
    run_s: float
    is_failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """A load failed; the requests that waited for it get the same error."""

    key: ResidentKey
    error: errors.KakeyaError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused:
    """A request for a model was refused."""

    key: ResidentKey
    error: errors.KakeyaError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShrunk:
    """An engine above its lease was asked for memory, and gave back so many bytes."""

    key: ResidentKey
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDrained:
    """An engine that stayed above its lease was drained and asked to end, which frees so many
    bytes. Generations that still ran go on in the next engine."""

    key: ResidentKey
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKilled:
    """A drained engine did not end and was killed; it occupied so many bytes."""

    key: ResidentKey
    bytes: int
    reason: str


Event = (
    ModelLoad
    | ModelUnload
    | Evicted
    | MemoryPressure
    | CapabilityRun
    | Exhausted
    | LoadFailure
    | RequestRefused
    | EngineShrunk
    | EngineDrained
    | EngineKilled
)
Listener = Callable[[Event], None]


class EventListeners:
    """The listeners. One that raises is told of no further events."""

    def __init__(self) -> None:
        self._by_number: dict[int, Listener] = {}
        self._count = 0

    def add(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of events until the returned function is called."""
        self._count += 1
        number = self._count
        self._by_number[number] = listener

        def unsubscribe() -> None:
            self._by_number.pop(number, None)

        return unsubscribe

    def tell(self, happened: Event) -> None:
        """Tell all listeners, in the order in which they were added."""
        for number, listener in tuple(self._by_number.items()):
            try:
                listener(happened)
            except Exception as fault:  # noqa: BLE001 - foreign code
                self._by_number.pop(number, None)
                event(
                    _log,
                    "listener of memory events dropped",
                    level=logging.WARNING,
                    told=type(happened).__name__,
                    error=repr(fault),
                )
