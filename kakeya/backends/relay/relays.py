"""The backends of a node that answer whole requests: found by the names of models, and counted.

Requests pass through here, so that what a backend fails with is remembered and typed, be it of this
package or of another. A backend that failed is the last choice of tasks for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, Self

from kakeya.backends.registry import Backends
from kakeya.backends.relay.backend import Backend, BackendSettings, Finished
from kakeya.backends.request import Request
from kakeya.core.clock import Clock
from kakeya.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KakeyaError,
    LoadFailed,
    NotFound,
    PeerProtocol,
)
from kakeya.core.figures import Figure, Json, counter, gauge
from kakeya.core.log import event
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.waiting import RequestWait
from kakeya.text.tools.answer import Part

_log = logging.getLogger(__name__)
FAULT_S = 30.0
"""How long a fault counts against a backend that says no time of its own."""


class _TooLate(DeadlineExceeded):
    """The time of a request is up, be it ever so short."""


_OF_REQUESTS = (InvalidArgument, NotFound, _TooLate)
"""Faults of a request and not of its backend."""


class Relay(Protocol):
    """A backend that answers whole requests, of this node or of a peer."""

    @property
    def kind(self) -> str:
        """The kind of its table."""
        ...

    @property
    def name(self) -> str:
        """That of its table, or of the peer."""
        ...

    @property
    def nodes(self) -> Sequence[str]:
        """The peers that have it, by their labels; none = this node has it."""
        ...

    @property
    def problem(self) -> str:
        """Why requests should go elsewhere, in one sentence; "" = they need not."""
        ...

    async def check(self, asked: Request) -> Sequence[str]:
        """As `Backend.check`. Raises LoadFailed where it was not started."""
        ...

    def answer(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        """Answer as `Backend.handle`. Raises DeadlineExceeded where no part comes in the
        request's time, and PeerProtocol for a backend that breaks its contract."""
        ...


class OwnRelay:
    """A `Relay` of this node: what it was asked, and how it is."""

    nodes: Sequence[str] = ()

    def __init__(self, kind: str, name: str, settings: BackendSettings, clock: Clock) -> None:
        self.kind = kind
        self.name = name
        self.settings = settings
        self.requests = 0
        self.running = 0
        self.last_error = ""
        self._clock = clock
        self._failed_until_mono = 0.0
        self._backend: Backend | None = None

    @property
    def problem(self) -> str:
        """See `Relay`."""
        if self._backend is None:
            return self.last_error or f"{self.name} was not started"
        is_failed = self._clock.mono() < self._failed_until_mono
        return self._backend.health() or (self.last_error if is_failed else "")

    async def start(self) -> None:
        """Start the backend; one that cannot be started says why to each request."""
        try:
            backend = self.settings.open(self.name)
            await backend.start()
        except Exception as fault:  # noqa: BLE001 - foreign code
            reason = str(fault) or repr(fault)
            self.last_error = f"the backend {self.name} cannot be started: {reason}"
        else:
            self._backend = backend
        if problem := self.problem:
            event(_log, "backend", level=logging.WARNING, name=self.name, problem=problem)

    async def stop(self) -> None:
        """Stop the backend."""
        if self._backend is None:
            return
        try:
            await self._backend.stop()
        except Exception as fault:  # noqa: BLE001 - foreign code
            event(_log, "backend did not stop", level=logging.WARNING, name=self.name, fault=fault)

    async def check(self, asked: Request) -> Sequence[str]:
        """See `Relay`."""
        return self._started().check(asked)

    async def answer(self, asked: Request) -> AsyncGenerator[Part | Finished, None]:
        """See `Relay`."""
        backend = self._started()
        self.requests += 1
        self.running += 1
        try:
            async with aclosing(backend.handle(asked)) as parts:
                first = await self._first(parts, asked.params.deadline_s)
                if first is not None:
                    yield first
                async for part in parts:
                    yield part
        except KakeyaError as known:
            self._failed(known)
            raise
        except Exception as unknown:  # foreign code
            fault = PeerProtocol(f"the backend {self.name} failed: {unknown!r}")
            self._failed(fault)
            raise fault from unknown
        finally:
            self.running -= 1

    async def _first(
        self, parts: AsyncGenerator[Part | Finished, None], deadline_s: float | None
    ) -> Part | Finished | None:
        """The first part; None = there is none."""
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                return await anext(parts, None)
        except TimeoutError as late:
            if not limit.expired():
                raise
            raise _TooLate(f"{self.name} gave no text within {deadline_s:g} s") from late

    def _started(self) -> Backend:
        if self._backend is None:
            raise LoadFailed(self.problem)
        return self._backend

    def _failed(self, fault: KakeyaError) -> None:
        if isinstance(fault, _OF_REQUESTS):
            return
        self.last_error = fault.message
        wait_s = FAULT_S if fault.retry_after_s is None else fault.retry_after_s
        self._failed_until_mono = self._clock.mono() + wait_s

    def status(self) -> Json:
        """The backend, its settings without secrets, and what it was asked."""
        return {
            "name": self.name,
            "kind": self.kind,
            **self.settings.describe(),
            "problem": self.problem,
            "last_error": self.last_error,
            "requests": self.requests,
            "running": self.running,
        }


@dataclass(frozen=True, slots=True)
class RelayedModel:
    """A model that a backend answers for, by the name that requests give it."""

    model_id: str
    relay: Relay

    @property
    def state(self) -> ModelState:
        """READY, or FAILED while its backend has a problem."""
        return ModelState.FAILED if self.relay.problem else ModelState.READY

    @property
    def facts(self) -> ModelFacts | None:
        """None: nothing of it is in the memory of this node."""
        return None

    def waits_for(self) -> RequestWait | None:
        """None: what a backend waits for is its own."""
        return None


class Relays:
    """All backends of a node, in an `async with` that starts and stops them."""

    def __init__(self, backends: Backends, clock: Clock) -> None:
        self._relays = tuple(
            OwnRelay(kind, name, settings, clock)
            for kind, tables in backends.items()
            for name, settings in tables.items()
        )

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(relay.start() for relay in self._relays))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(relay.stop() for relay in self._relays))

    def find(self, model_id: str) -> RelayedModel | None:
        """Find a model by its name; None = it is of no backend."""
        relay = self._relay(model_id)
        return None if relay is None else RelayedModel(model_id, relay)

    def models(self, named: Sequence[str] = ()) -> list[RelayedModel]:
        """The models that the backends tell of, and those of them that are `named` elsewhere."""
        told = [one for relay in self._relays for one in relay.settings.model_ids(relay.name)]
        found = map(self.find, dict.fromkeys((*told, *named)))
        return [model for model in found if model is not None]

    def shared(self, model_id: str) -> OwnRelay:
        """The backend of a model that peers may ask for. Raises NotFound."""
        relay = self._relay(model_id)
        if relay is None or not relay.settings.shared_ids(relay.name):
            raise NotFound(f"no model {model_id[:80]!r} is shared here")
        return relay

    def offered(self) -> list[tuple[str, str]]:
        """The kind of each backend that peers may ask, with each of its `shared_ids`."""
        return [
            (relay.kind, name)
            for relay in self._relays
            for name in relay.settings.shared_ids(relay.name)
        ]

    def status(self) -> list[Json]:
        """All backends."""
        return [relay.status() for relay in self._relays]

    def figures(self) -> Iterator[Figure]:
        """Backends that are no engines: whether they are well, and what they were asked."""
        relays = {relay.name: relay for relay in self._relays}
        well = {name: float(not relay.problem) for name, relay in relays.items()}
        yield gauge("kakeya_backend_up{backend}", "1 while a backend has no problem", well)
        running = {name: relay.running for name, relay in relays.items()}
        yield gauge("kakeya_backend_running{backend}", "Requests at a backend now", running)
        asked = {name: relay.requests for name, relay in relays.items()}
        yield counter(
            "kakeya_backend_requests{backend}", "Requests that a backend was asked", asked
        )

    def problems(self) -> list[str]:
        """The problems of backends, a sentence each."""
        return [relay.problem for relay in self._relays if relay.problem]

    def describe(self) -> Json:
        """The settings of the backends, by kind and name, without secrets."""
        found: dict[str, dict[str, object]] = {}
        for relay in self._relays:
            found.setdefault(relay.kind, {})[relay.name] = relay.settings.describe()
        return dict(found)

    def _relay(self, model_id: str) -> OwnRelay | None:
        return next((one for one in self._relays if one.settings.serves(one.name, model_id)), None)
