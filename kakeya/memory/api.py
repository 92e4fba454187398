"""The one owner of models in memory, as programs and plug-ins use it.

    async with MemoryArbiter(budget=4 * GIB, clock=SystemClock()) as arbiter:
        arbiter.register(capability)
        answer = await arbiter.request("vision-describe", "tiny-vl", image)
        async with arbiter.acquire("vision-describe", "tiny-vl") as handle:
            for frame in frames:
                await handle.run(frame)

The first request for a model loads it, and later ones share it. A model with a handle is not
evicted; afterwards it stays until its room is needed. A plug-in never loads a model by itself: the
ledger could not count it.

    measured by   a handler's `load`, which returns the size of a model; `measure` for an engine's
                  later growth; `observe` for the machine's memory (see `pressure`)
    held by       a handle, through which alone a backend is reached; an open session holds one
    other jobs    a capability of its own role, with a load that notes the holder; or `hold`,
                  for bytes that were taken without asking
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Self

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, TaskHealth
from kakeya.core.units import MIB
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.capability import Capability
from kakeya.memory.arbiter.events import Event, EventListeners, Evicted, MemoryPressure
from kakeya.memory.arbiter.handle import Handle, LiveModels
from kakeya.memory.arbiter.keeper import FORCE_S, Keeper, TenantSource, within
from kakeya.memory.arbiter.plan import FOREVER, PLAIN, Ask, Reason, Snapshot, Terms
from kakeya.memory.arbiter.policy import PressureLevel, Rules
from kakeya.memory.arbiter.resident import (
    ROOM,
    VISION,
    LeaseId,
    Resident,
    ResidentKey,
    Role,
    State,
)
from kakeya.memory.arbiter.runner import Runner
from kakeya.memory.embeddings import TENANT, VisionEmbedding, VisionEmbeddingCache
from kakeya.memory.forecast import Forecast, UsualTimes
from kakeya.memory.machine.pressure import Reading

__all__ = ["GRACE_S", "PLAIN", "Handle", "MemoryArbiter", "Terms"]
_log = logging.getLogger(__name__)
GRACE_S = 10.0
"""The longest wait of the shutdown for models in use."""
_FIRST_LOAD_S = 3.0
_FIRST_LOAD_BYTES_PER_S = 150 * MIB
"""A guess at a load that was never measured, which a caller is told: a process starts, and reads
weights from a slow disk."""


class MemoryArbiter:
    """See the module. One for each node, on one event loop, within `async with`."""

    def __init__(
        self,
        *,
        budget: int,
        clock: Clock,
        rules: Rules | None = None,
        embeddings: VisionEmbeddingCache | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._arbiter = Arbiter(budget, rules=rules)
        self._capabilities: dict[str, Capability] = {}
        self._roles: dict[str, Role] = {}
        self._listeners = EventListeners()
        self._live = LiveModels(self._capabilities, clock)
        self._keeper = Keeper(
            self._arbiter, models=self._live, listeners=self._listeners, clock=clock
        )
        self._embeddings = embeddings or VisionEmbeddingCache(mono=clock.mono)
        self._keeper.add_tenant(self._embeddings)
        self._listeners.add(self._forget_images)
        self._runner = Runner(clock=clock, listeners=self._listeners, rules=rules or Rules())
        times = UsualTimes(
            load_s=lambda key: self._live.mean_load_s(key) or self._guessed_s(key),
            load_left_s=self._live.left_s,
            unload_s=self._live.unload_s,
            use_s=self._use_s,
            asks_per_s=self._asks_per_s,
        )
        self._forecast = Forecast(self._arbiter, times, clock)
        self._tasks: Supervisor | None = None
        self._is_over = False

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # Plug-ins.

    def register(self, capability: Capability) -> None:
        """Add a capability. Raises Conflict when its name has a handler already, or when its
        role's name means another role."""
        if self._is_over:
            raise errors.Refused(f"the arbiter is shutting down; {capability.name} is not taken")
        if capability.name in self._capabilities:
            raise errors.Conflict(f"capability {capability.name!r} is already registered")
        role = capability.role
        if self._roles.setdefault(role.name, role) != role:
            raise errors.Conflict(
                f"role {role.name!r} of {capability.name!r} is already defined with another "
                "meaning; use that one, or choose another name"
            )
        self._capabilities[capability.name] = capability

    def capability(self, name: str) -> Capability:
        """A registered capability. Raises NotFound."""
        if name not in self._capabilities:
            known = ", ".join(sorted(self._capabilities)) or "none"
            raise errors.NotFound(f"no capability registered as {name!r}; known: {known}")
        return self._capabilities[name]

    async def request(
        self, capability: str, model_key: str, payload: object, terms: Terms = PLAIN
    ) -> object:
        """Acquire, run, release. Cancelling it cancels the run, or leaves the queue.

        Raises NotFound, MemoryRefused, DrainTimeout, QueueFull, LoadFailed, DeadlineExceeded (at
        once, when loading and running usually take longer), and the errors of the run.
        """
        key = self._key(capability, model_key)
        self._check_time(key, terms, self._runner.usual_s(key) or 0.0)
        work = self._serve(key, payload, terms, self._clock.mono() + terms.timeout_s)
        late = errors.DeadlineExceeded(
            f"{key} did not answer within {terms.timeout_s:.3g} s; allow more time"
        )
        return await within(self._clock, terms.timeout_s, work, late)

    @asynccontextmanager
    async def acquire(
        self, capability: str, model_key: str, terms: Terms = PLAIN
    ) -> AsyncIterator[Handle]:
        """Hold a model for many calls. `timeout_s` covers the wait for the handle only.

        Raises the errors of `request`, but for those of a run.
        """
        key = self._key(capability, model_key)
        self._check_time(key, terms, terms.run_s)
        handle = await self._handle(key, terms, self._clock.mono() + terms.timeout_s)
        try:
            yield handle
        finally:
            handle.release()

    def try_acquire(self, capability: str, model_key: str, terms: Terms = PLAIN) -> Handle | None:
        """A handle of a loaded model; None = it is not loaded, or drains for a request ahead.

        It never loads and never waits: for callers that can do without the model.
        """
        key = self._key(capability, model_key)
        lease = self._arbiter.lend(key, terms.priority, self._clock.mono())
        return None if lease is None else Handle(self, key, lease, terms)

    def on_event(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Tell `listener` of events until the returned function is called."""
        return self._listeners.add(listener)

    def when_waiting(self, call: Callable[[], None]) -> None:
        """Have `call` called, in place of an earlier one, at each request that has to wait."""
        self._keeper.on_wait = call

    def cached_embedding(self, key: str) -> VisionEmbedding | None:
        """The projected tokens of a recent image; see `embeddings.embedding_key`."""
        return self._embeddings.get(key)

    def cache_embedding(self, key: str, embedding: VisionEmbedding) -> None:
        """Keep an image's projected tokens for a while: in spare room, else in the room of older
        ones."""
        self._embeddings.put(key, embedding, partial(self.may_grow, TENANT))
        self.grown(TENANT)

    # The node.

    async def preload(self, capability: str, model_key: str, terms: Terms = PLAIN) -> bool:
        """Begin to load without a request, if there is room to spare; False = not now."""
        key = self._key(capability, model_key)
        self._keeper.count_tenants()
        taken, outcome = self._arbiter.preload(self._ask(key, terms, FOREVER), self._clock.mono())
        self._keeper.take(outcome)
        return taken

    def keep_warm(self, capability: str, model_key: str, seconds: float) -> None:
        """Keep a loaded model warm for `seconds` from now at least; another one is ignored."""
        key = ResidentKey(capability, model_key)
        self._arbiter.keep_warm(key, self._clock.mono() + seconds)

    def renew_warmth(self, capability: str, model_key: str) -> None:
        """Give a loaded model the warmth that its capability says at this moment."""
        ask = self._ask(self._key(capability, model_key), PLAIN, FOREVER)
        self._keeper.take(self._arbiter.renew_warmth(ask, self._clock.mono()))

    def unload(self, capability: str, model_key: str) -> None:
        """Begin to unload. Raises NotFound, and Conflict while it is in use."""
        key = ResidentKey(capability, model_key)
        self._keeper.take(self._arbiter.unload(key, self._clock.mono()))

    def measure(self, capability: str, model_key: str, size: int, unfilled_bytes: int = 0) -> None:
        """Report the bytes of a loaded model. `unfilled_bytes` of them are lent to it and not
        used yet, so that the machine shows them as available."""
        key = ResidentKey(capability, model_key)
        now = self._clock.mono()
        self._keeper.take(self._arbiter.measure(key, size, now, unfilled_bytes=unfilled_bytes))

    def unlearn(self, capability: str, model_key: str) -> None:
        """Forget the sizes and times of a model that will not come back, unless it is loaded."""
        key = ResidentKey(capability, model_key)
        self._arbiter.unlearn(key)
        self._live.unlearn(key)

    def observe(self, reading: Reading) -> None:
        """Report the machine's memory: at each poll, whether it changed or not."""
        before = self._arbiter.snapshot().level
        self._keeper.count_tenants()
        outcome = self._arbiter.observe(
            reading.level,
            reading.available_bytes,
            self._clock.mono(),
            spare_bytes=reading.spare_bytes,
            is_partial=reading.is_partial,
        )
        if reading.level is not before:
            event(
                _log,
                "memory pressure",
                level=logging.INFO if reading.level is PressureLevel.NOMINAL else logging.WARNING,
                pressure=reading.level.name.lower(),
                source=reading.source,
            )
            self._listeners.tell(MemoryPressure(level=reading.level, source=reading.source))
        self._keeper.take(outcome)

    def hold(self, holder: str, size: int, unfilled_bytes: int = 0) -> None:
        """Report the bytes of another process; 0 = none. `unfilled_bytes` as in `measure`."""
        now = self._clock.mono()
        self._keeper.take(self._arbiter.hold(holder, size, now, unfilled_bytes=unfilled_bytes))

    def tell(self, happened: Event) -> None:
        """Tell the listeners of an event in memory that another part has caused."""
        self._listeners.tell(happened)

    def set_budget(self, budget: int) -> None:
        """Change the budget; idle models are evicted when it has become too small."""
        self._keeper.take(self._arbiter.set_budget(budget, self._clock.mono()))

    def add_tenant(self, source: TenantSource) -> None:
        """Count a cache, an arena or sessions, and ask them to shrink when room is needed."""
        self._keeper.add_tenant(source)

    def remove_tenant(self, name: str) -> None:
        """Stop counting a tenant, if it is counted."""
        self._keeper.remove_tenant(name)

    def may_grow(self, name: str, size: int) -> bool:
        """Reserve spare bytes for a tenant that wants to grow; False = not now.

        They stay reserved until the tenant reports that it grew by them, or until `grown`. Nothing
        is evicted for it, and no waiting request loses its room. Raises NotFound for an unknown
        tenant.
        """
        self._keeper.count_tenants()
        return self._arbiter.may_grow(name, size)

    async def make_room(self, name: str, size: int, timeout_s: float) -> None:
        """Reserve bytes for a tenant that a request waits for; idle models are evicted for it, in
        its turn.

        As `may_grow` otherwise; for one growth of a tenant at a time. Raises MemoryRefused,
        DeadlineExceeded, Refused at the end, NotFound for an unknown tenant.
        """
        ask = Ask(
            key=ResidentKey(ROOM.name, name),
            role=ROOM,
            estimate_bytes=size,
            deadline_mono=self._clock.mono() + timeout_s,
            may_displace_text=True,
        )
        try:
            await self._keeper.lease(ask)
        except BaseException:  # it may have been granted at the moment of the cancellation
            self.grown(name)
            raise

    def grown(self, name: str) -> None:
        """End a tenant's reservation: it has grown, or it will not."""
        self._keeper.count_tenants()
        self._keeper.take(self._arbiter.grown(name, self._clock.mono()))

    def find(self, capability: str, model_key: str) -> Resident | None:
        """One resident of the ledger; None = it is not in memory."""
        return self._arbiter.find(ResidentKey(capability, model_key))

    def load_left_s(self, capability: str, model_key: str) -> float:
        """Seconds until a model is loaded, by its measured loads; 0 = it is, or not known."""
        return self._live.left_s(ResidentKey(capability, model_key))

    def wait_of(self, capability: str, model_key: str) -> RequestWait | None:
        """For what a request for a model waits now, its load or memory; None = for neither."""
        resident = self.find(capability, model_key)
        if resident is not None and resident.state is State.LOADING:
            left_s = self.load_left_s(capability, model_key) or None
            return RequestWait(reason=WaitReason.LOAD, model_id=model_key, seconds=left_s)
        key = ResidentKey(capability, model_key)
        place = self._arbiter.place_of(key, self._clock.mono())
        if place is None:
            return None
        seconds = self._forecast.seconds(key)
        return RequestWait(
            reason=WaitReason.MEMORY, model_id=model_key, position=place, seconds=seconds
        )

    def would_grant(self, capability: str, model_key: str, terms: Terms = PLAIN) -> bool:
        """Whether a request would be served now or in its turn, without waiting for models to
        drain. Changes nothing. Raises NotFound."""
        key = self._key(capability, model_key)
        return self._arbiter.would_grant(self._ask(key, terms, FOREVER), self._clock.mono())

    @property
    def is_short(self) -> bool:
        """Whether the machine is under pressure, or requests wait for memory."""
        return self._arbiter.is_short

    @property
    def budget_bytes(self) -> int:
        """The bytes that all models together may have."""
        return self._arbiter.snapshot().budget_bytes

    @property
    def is_in_use(self) -> bool:
        """Whether a model loads, or a request or a job of another process uses memory."""
        return any(not one.is_idle for one in self._arbiter.snapshot().residents)

    def status(self) -> Snapshot:
        """The ledger."""
        self._keeper.count_tenants()
        return self._arbiter.snapshot()

    def check_integrity(self) -> None:
        """Check what holds of the ledger between any two events. Raises InvariantBroken."""
        self._arbiter.check_integrity()

    def health(self) -> tuple[TaskHealth, ...]:
        """The background task that carries out plans."""
        return self._tasks.health() if self._tasks else ()

    async def shutdown(self) -> None:
        """Refuse new requests, wait for those in use, unload everything. A second call does
        nothing.

        A handle that is not released in time loses its model: its runs are cancelled first.
        """
        if self._is_over:
            return
        self._is_over = True
        self._keeper.take(self._arbiter.stop(self._clock.mono()))
        if self._tasks is None:
            return
        try:
            if await self._keeper.drain(self._grace_s):
                await self._end_by_force()
        finally:
            await self._tasks.aclose()

    # Handles.

    def backend(self, key: ResidentKey) -> object:
        """The live model of a leased key. Raises Conflict when the shutdown took it."""
        if key not in self._live.backends:
            raise errors.Conflict(f"{key} is gone: the arbiter was shut down")
        return self._live.backends[key]

    async def run_held(self, key: ResidentKey, payload: object, terms: Terms) -> object:
        """Run a request on a leased key."""
        capability = self._capabilities[key.capability]
        return await self._runner.run(key, capability, self.backend(key), payload, terms)

    def retain(self, lease: LeaseId) -> LeaseId:
        """Add a lease beside one that is held."""
        return self._arbiter.retain(lease, self._clock.mono())

    def release(self, lease: LeaseId) -> None:
        """Release a lease. Where nothing follows from it, no tenant is counted and no queue is
        walked."""
        now = self._clock.mono()
        if self._arbiter.write_release(lease, now):
            self._keeper.count_tenants()
            self._keeper.take(self._arbiter.settle(now))

    # The course of a request.

    def _start(self) -> None:
        if self._is_over or self._tasks is not None:
            raise errors.Conflict("an arbiter cannot start after shutdown, nor twice; make another")
        self._tasks = Supervisor(self._clock)
        self._tasks.start("memory keeper", self._keeper.run)

    def _key(self, capability: str, model_key: str) -> ResidentKey:
        self.capability(capability)
        if self._tasks is None:
            raise errors.Conflict("the arbiter was not started; use it inside `async with`")
        return ResidentKey(capability, model_key)

    def _ask(self, key: ResidentKey, terms: Terms, deadline_mono: float) -> Ask:
        capability = self._capabilities[key.capability]
        return Ask(
            key=key,
            role=capability.role,
            estimate_bytes=capability.estimate(key.model_key),
            priority=terms.priority,
            warmth=terms.warmth or capability.warmth_of(key.model_key),
            deadline_mono=deadline_mono,
            may_displace_text=terms.may_displace_text,
            load_s=self._live.load_s(key) or self._guessed_s(key),
            run_s=terms.run_s,
        )

    def _guessed_s(self, key: ResidentKey) -> float:
        size = self._capabilities[key.capability].estimate(key.model_key)
        return _FIRST_LOAD_S + size / _FIRST_LOAD_BYTES_PER_S

    def _asks_per_s(self, key: ResidentKey) -> float:
        capability = self._capabilities.get(key.capability)
        return 0.0 if capability is None else capability.asks_per_s(key.model_key)

    def _use_s(self, key: ResidentKey, waiting: int, more: int) -> float | None:
        capability = self._capabilities.get(key.capability)
        if capability is None:  # memory that is lent to another process
            return None
        own_s = capability.use_s(key.model_key, waiting, more)
        return self._runner.usual_s(key) if own_s is None else own_s

    def _check_time(self, key: ResidentKey, terms: Terms, run_s: float) -> None:
        """Refuse a request whose time is too short by what was measured; its model is loaded for
        the next try."""
        load_s = self._live.left_s(key)
        if terms.timeout_s >= load_s + run_s:
            return
        if load_s:
            now = self._clock.mono()
            ask = self._ask(key, replace(terms, run_s=run_s), now + terms.timeout_s)
            error, outcome = self._arbiter.decline(ask, now)
            self._keeper.take(outcome)
            raise error
        if not terms.run_s:  # a caller that runs a loaded model by itself judges its time better
            raise errors.DeadlineExceeded(
                f"too long: {key} is estimated to take {run_s:.3g} s to run, and the deadline is "
                f"{terms.timeout_s:.3g} s; allow more time"
            )

    async def _serve(
        self, key: ResidentKey, payload: object, terms: Terms, deadline_mono: float
    ) -> object:
        async with self._runner.turn_to_ask(key, self._capabilities[key.capability], terms):
            with await self._handle(key, terms, deadline_mono) as handle:
                return await handle.run(payload)

    async def _handle(self, key: ResidentKey, terms: Terms, deadline_mono: float) -> Handle:
        if terms.wait is not None:
            terms.wait.ask = partial(self.wait_of, *key)
        lease = await self._keeper.lease(self._ask(key, terms, deadline_mono))
        return Handle(self, key, lease, terms)

    async def _end_by_force(self) -> None:
        await self._runner.cancel_all()
        await self._keeper.cancel_loads()
        for key in await self._keeper.drain(FORCE_S):
            event(
                _log,
                "model is still held at the end; it is unloaded",
                level=logging.WARNING,
                model=str(key),
            )
            await self._keeper.unload_now(key)

    def _forget_images(self, happened: Event) -> None:
        """Drop projected images when pressure evicts vision."""
        if isinstance(happened, Evicted) and happened.reason is Reason.PRESSURE:
            role = self._capabilities[happened.key.capability].role
            if role.name == VISION.name:
                self._embeddings.clear()
