"""The handle of a leased model, and the table of live models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.plan import PLAIN, Terms
from kakeya.memory.arbiter.resident import LeaseId, ResidentKey
from kakeya.memory.arbiter.runner import Timings

_LOADS_KEPT_S = 600.0


class LiveModels:
    """The live models by key, loaded and unloaded by their handlers. It decides nothing."""

    def __init__(self, capabilities: Mapping[str, Capability], clock: Clock) -> None:
        self._capabilities = capabilities
        self._clock = clock
        self._loads: dict[ResidentKey, Timings] = {}
        self._unloads: dict[ResidentKey, Timings] = {}
        self._began_mono: dict[ResidentKey, float] = {}
        self.backends: dict[ResidentKey, object] = {}

    async def load(self, key: ResidentKey) -> Loaded:
        """Load a model by its capability's handler."""
        began_mono = self._began_mono[key] = self._clock.mono()
        try:
            loaded = await self._capabilities[key.capability].handler.load(key.model_key)
        finally:
            del self._began_mono[key]
        self.backends[key] = loaded.backend
        now = self._clock.mono()
        self._loads.setdefault(key, Timings(_LOADS_KEPT_S)).add(now - began_mono, now)
        return loaded

    async def unload(self, key: ResidentKey) -> None:
        """Unload a model by its capability's handler: once for each load."""
        if key in self.backends:
            backend, began_mono = self.backends.pop(key), self._clock.mono()
            await self._capabilities[key.capability].handler.unload(key.model_key, backend)
            now = self._clock.mono()
            self._unloads.setdefault(key, Timings(_LOADS_KEPT_S)).add(now - began_mono, now)

    def unlearn(self, key: ResidentKey) -> None:
        """Forget the load times of a model that is not loaded."""
        if key not in self.backends:
            self._loads.pop(key, None)
            self._unloads.pop(key, None)

    def load_s(self, key: ResidentKey) -> float | None:
        """Seconds that a load of a model takes, by its last loads; None = not known."""
        times = self._loads.get(key)
        last_s = times and times.longest_s(self._clock.mono())
        return last_s or self._capabilities[key.capability].load_s(key.model_key)

    def unload_s(self, key: ResidentKey) -> float:
        """Seconds that an unload of a model takes, by its last ones; 0 = not known."""
        times = self._unloads.get(key)
        return (times and times.mean_s(self._clock.mono())) or 0.0

    def mean_load_s(self, key: ResidentKey) -> float | None:
        """Seconds that a load of a model takes on average; None = not known."""
        times = self._loads.get(key)
        return (times and times.mean_s(self._clock.mono())) or self.load_s(key)

    def left_s(self, key: ResidentKey) -> float:
        """Seconds until a model is loaded; 0 = it is loaded, or nothing is known."""
        if key in self.backends:
            return 0.0
        now = self._clock.mono()
        return max(0.0, (self.load_s(key) or 0.0) - (now - self._began_mono.get(key, now)))


class Lender(Protocol):
    """The lender of a handle: the arbiter."""

    def backend(self, key: ResidentKey) -> object:
        """The live model of a leased key."""
        ...

    async def run_held(self, key: ResidentKey, payload: object, terms: Terms) -> object:
        """Run a request on a leased key."""
        ...

    def retain(self, lease: LeaseId) -> LeaseId:
        """Add a lease beside one that is held."""
        ...

    def release(self, lease: LeaseId) -> None:
        """Take a lease back."""
        ...


class Handle:
    """The right to use a model until its release. Each handle is released once; further releases
    do nothing."""

    __slots__ = ("_lease", "_lender", "_terms", "key")

    def __init__(
        self, lender: Lender, key: ResidentKey, lease: LeaseId, terms: Terms = PLAIN
    ) -> None:
        self.key = key
        self._terms = terms
        self._lender = lender
        self._lease: LeaseId | None = lease

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def backend(self) -> object:
        """The loaded model, as its handler returned it. Raises Conflict after the release."""
        self._held("use")
        return self._lender.backend(self.key)

    async def run(self, payload: object) -> object:
        """Run a request in the model's lane, at the priority of the lease. Raises Conflict after
        the release, and QueueFull.

        A run that has begun, or waits for its turn, holds the model although the handle is released
        meanwhile.
        """
        self._held("run")
        with self.retain():
            return await self._lender.run_held(self.key, payload, self._terms)

    def retain(self) -> Handle:
        """Make another handle of the same model, with a release of its own."""
        lease = self._lender.retain(self._held("retain"))
        return Handle(self._lender, self.key, lease, self._terms)

    def release(self) -> None:
        """Give the model back."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._lender.release(lease)

    def _held(self, wish: str) -> LeaseId:
        if self._lease is None:
            raise errors.Conflict(f"cannot {wish} {self.key} after release; acquire it again")
        return self._lease
