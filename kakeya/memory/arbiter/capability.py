"""A capability: a handler of one kind of model and its role, as a plug-in brings it.

    class Camera:
        async def load(self, model_key: str) -> Loaded: ...
        async def unload(self, model_key: str, backend: object) -> None: ...
        async def run(self, backend: object, payload: object) -> object: ...

    def capability() -> Capability:  # named by an entry point; called once, on the event loop
        return Capability(name="vision-describe", role=VISION, handler=Camera(), estimate=sizes)

A distribution offers it with

    [project.entry-points."kakeya.capabilities"]
    vision-describe = "camera.plugin:capability"

A run that takes long may tell its caller how far it is, also in a thread of its own:

    async def run(self, backend: object, payload: object) -> object:
        report_progress(0.5, "half of the pages are read")

A new capability takes the role that gives its worth to the node (a re-ranker is an `EMBEDDING`), or
brings a role of its own, which tells what its eviction costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from kakeya.core import errors
from kakeya.memory.arbiter.resident import Role, Warmth

MAX_WAITING = 10
"""The most requests that wait for one model; more are refused. A queue in front may hold more,
in an order of its own."""


ProgressListener = Callable[[float, str], None]
"""Hears the share of a run that is done, from 0 to 1, and a phrase; in any thread."""
_listener: ContextVar[ProgressListener | None] = ContextVar("kakeya_progress", default=None)


def report_progress(share: float, phrase: str = "") -> None:
    """Tell the caller of a run how far it is. Without a caller that listens, nothing happens."""
    if (listener := _listener.get()) is not None:
        listener(share, phrase)


@contextmanager
def progress_to(listener: ProgressListener) -> Iterator[None]:
    """Hear the progress of the requests that are made inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loaded model. `measured_bytes` is the growth of memory by the load, None = not measured.

    `unfilled_bytes` of them are its own and not used yet, such as room for later computations.
    """

    backend: object
    measured_bytes: int | None = None
    unfilled_bytes: int = 0


class Handler(Protocol):
    """Loads, runs and unloads models of one kind. Only the arbiter calls it.

    Loads and runs of different models overlap. Calls for one model do not, beyond `concurrency`
    runs, so a handler need not serialise anything.
    """

    async def load(self, model_key: str) -> Loaded:
        """Load a model; called once until it is unloaded. A cancelled load leaves nothing
        behind."""
        ...

    async def unload(self, model_key: str, backend: object) -> None:
        """Give the model's memory back. A second call for the same backend does nothing."""
        ...

    async def run(self, backend: object, payload: object) -> object:
        """Serve one request. It ends soon when cancelled, and keeps nothing in the backend that a
        later run relies on: the model may be loaded anew in between.

        From a client of the node the payload is any JSON value, and the result goes back as JSON.
        Raise InvalidArgument for a payload that is not of the right form."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One capability.

    `estimate` gives the expected bytes of a load by model key, and `load_s` its expected seconds,
    None = not known; they count until a measurement is there. They answer at once, and raise the
    caller's error for an unknown model.
    """

    name: str
    role: Role
    handler: Handler
    estimate: Callable[[str], int]
    load_s: Callable[[str], float | None] = lambda _: None
    use_s: Callable[[str, int, int], float | None] = lambda *_: None
    """Seconds until the requests that hold a model have ended, (0, 0), or that so many take that
    wait for it and so many others; None = not known, then the times of past runs count."""
    asks_per_s: Callable[[str], float] = lambda _: 0.0
    """How many requests for a model came a second lately."""
    warmth: Warmth | None = None
    """None = the role's."""
    own_warmth: Callable[[str], Warmth | None] = lambda _: None
    """The warmth of a model by its key, which wins over `warmth` and `pinned`; None = these."""
    pinned: frozenset[str] = frozenset()
    """Models that stay once they are loaded."""
    concurrency: int = 1
    max_waiting: int = MAX_WAITING
    may_repeat: bool = True
    """Whether a run that was cut off by the end of the node may be run again from its payload."""

    def __post_init__(self) -> None:
        if not self.name or self.concurrency < 1 or self.max_waiting < 0:
            raise errors.InvalidArgument(
                f"capability {self.name!r} with concurrency {self.concurrency} and "
                f"{self.max_waiting} waiting; a name, at least 1 and at least 0 are needed"
            )

    def warmth_of(self, model_key: str) -> Warmth:
        """The warmth of a model where its callers give none."""
        if own := self.own_warmth(model_key):
            return own
        warmth = self.warmth or Warmth(stay_warm_s=self.role.stay_warm_s)
        return replace(warmth, is_pinned=True) if model_key in self.pinned else warmth
