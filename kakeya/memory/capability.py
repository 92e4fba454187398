"""What a plug-in brings: a capability, that is one handler of one kind of model, and its role.

    class Camera:
        async def load(self, model_key: str) -> Loaded: ...
        async def unload(self, model_key: str, backend: object) -> None: ...
        async def run(self, backend: object, payload: object) -> object: ...

    def capability() -> Capability:      # named by an entry point of the group kakeya.capabilities
        return Capability(name="vision-describe", role=VISION, handler=Camera(), estimate=sizes)

A distribution offers it with

    [project.entry-points."kakeya.capabilities"]
    vision-describe = "camera.plugin:capability"

A new capability takes the role that says what it is worth to the node (a re-ranker is an
`EMBEDDING`), or brings a role of its own, which tells what its eviction costs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from kakeya.core import errors
from kakeya.memory.resident import Role, Warmth

MAX_WAITING = 10
"""Requests that may wait for one model before more are refused; a queue in front holds longer
lines, and knows their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loaded model. `measured_bytes` is what memory really grew by, None = not measured."""

    backend: object
    measured_bytes: int | None = None


class Handler(Protocol):
    """Loads, runs and unloads models of one kind. The arbiter calls it; nobody else does.

    Loads and runs of different models overlap. Calls for one model do not, beyond `concurrency`
    runs, so a handler need not serialise anything.
    """

    async def load(self, model_key: str) -> Loaded:
        """Load a model; called once until it is unloaded. Cancelled when the node stops; then it
        leaves nothing behind."""
        ...

    async def unload(self, model_key: str, backend: object) -> None:
        """Give the model's memory back. A second call for the same backend does nothing."""
        ...

    async def run(self, backend: object, payload: object) -> object:
        """Serve one request. It ends soon when cancelled, and keeps nothing in the backend that a
        later run relies on: the model may be loaded anew in between."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One capability. `estimate` says by model key how many bytes a load is expected to take; it
    decides until a measurement is there. Raises what the caller should get for an unknown model.
    """

    name: str
    role: Role
    handler: Handler
    estimate: Callable[[str], int]
    warmth: Warmth | None = None
    """None = kept warm as its role is."""
    concurrency: int = 1
    max_waiting: int = MAX_WAITING

    def __post_init__(self) -> None:
        if not self.name or self.concurrency < 1 or self.max_waiting < 0:
            raise errors.InvalidArgument(
                f"capability {self.name!r} with concurrency {self.concurrency} and "
                f"{self.max_waiting} waiting; a name, at least 1 and at least 0 are needed"
            )

    @property
    def default_warmth(self) -> Warmth:
        """How long its models stay without being used."""
        return self.warmth or Warmth(stay_warm_s=self.role.stay_warm_s)


class Timings:
    """How long something took of late. What lies back is forgotten, so that a slow minute does not
    refuse for ever who would show that it has passed."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._taken: deque[tuple[float, float]] = deque(maxlen=64)

    def add(self, seconds: float, now: float) -> None:
        """Note a duration."""
        self._taken.append((now, seconds))

    def longest_s(self, now: float) -> float | None:
        """The longest of the last 64 that are not forgotten; None = none is known."""
        return max((s for at, s in self._taken if now - at <= self._keep_s), default=None)


class Lane:
    """Who runs on one model: `concurrency` at a time, first come first served, a bounded line."""

    def __init__(self, name: str, concurrency: int, max_waiting: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(concurrency)
        self._limit = concurrency + max_waiting
        self._inside = 0

    @asynccontextmanager
    async def turn(self, run_s: float | None) -> AsyncIterator[None]:
        """Wait for a turn. Raises QueueFull; `run_s` is how long a run takes, where known."""
        if self._inside >= self._limit:
            raise errors.QueueFull(
                f"{self._inside} requests wait for {self._name} already; ask again later",
                retry_after_s=run_s,
            )
        self._inside += 1
        try:
            async with self._free:
                yield
        finally:
            self._inside -= 1

    @property
    def is_empty(self) -> bool:
        """Whether nobody runs or waits."""
        return self._inside == 0
