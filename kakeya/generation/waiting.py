"""For what a request waits, where it stands and for how long: told to its client and the owner.

The model tells it while the request has no model, then the attempt at the generation. Both are
asked through a `WaitTeller`, which stays the same for the life of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kakeya.core.figures import Json
from kakeya.core.units import ordinal
from kakeya.generation.frames import QueuePlace


class WaitReason(StrEnum):
    """The thing for which a request waits."""

    MEMORY = "memory"  # its model is in line for memory
    PULL = "pull"  # the files of its model come from peers
    LOAD = "load"  # its model loads
    RESTART = "restart"  # the engine of its model starts again
    ADAPTER = "adapter"  # its adapter is on its way to a slot
    PREFIX = "prefix"  # another request computes the prefix of its prompt, or its blocks come
    HELD = "held"  # the engine takes no generations for a moment, for the sake of memory
    PLACE = "place"  # other generations have all places of the engine
    PROMPT = "prompt"  # its own prompt is computed


_SAYS = {
    WaitReason.MEMORY: "{place} for memory, {model}",
    WaitReason.PULL: "bringing {model} here",
    WaitReason.LOAD: "loading {model}",
    WaitReason.RESTART: "starting {model} again",
    WaitReason.ADAPTER: "loading the adapter, {model}",
    WaitReason.PREFIX: "a prefix that another request computes, {model}",
    WaitReason.HELD: "memory for generations, {model}",
    WaitReason.PLACE: "{place} for a place, {model}",
    WaitReason.PROMPT: "reading the prompt, {model}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWait:
    """The wait of a request at this moment.

    `position` counts from 1; of a model in line for memory it is the model's. `seconds` are an
    estimate of the time that is left, None = nothing was measured. `progress` says how far a load
    is.
    """

    reason: WaitReason
    model_id: str
    position: int | None = None
    seconds: float | None = None
    progress: str = ""

    def describe(self) -> str:
        """As "2nd for a place, MODEL, about 3 s"."""
        place = "" if self.position is None else ordinal(self.position)
        said = _SAYS[self.reason].format(place=place, model=self.model_id)
        if self.progress:
            said += f", {self.progress}"
        return f"{said}, about {self.seconds:.0f} s" if self.seconds and self.seconds >= 1 else said

    def as_json(self) -> Json:
        """For status and `kakeya explain`."""
        return {
            "reason": self.reason.value,
            "position": self.position,
            "seconds": None if self.seconds is None else round(self.seconds, 1),
            "says": self.describe(),
        }


class WaitTeller:
    """Tells the wait of one request; `ask` is of the part that has the request."""

    __slots__ = ("ask", "place")

    def __init__(self, ask: Callable[[], RequestWait | None]) -> None:
        self.ask = ask
        self.place: QueuePlace | None = None
        """The last place that an engine told; None = none yet."""

    def describe(self) -> str:
        """The wait in words; "" = it does not wait."""
        wait = self.ask()
        return "" if wait is None else wait.describe()
