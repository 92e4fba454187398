"""The keeper: carries out the arbiter's plans, and reports the results to it. It decides nothing.

    plan A   shrink, evict ───────────┐
    plan B   shrink, evict ──┐        ├── load A
                             └────────┴── load B

Plans make their room side by side, so that a short shrink waits for no slow unload. A load begins
when its own room and that of all earlier plans is there, since it may count on bytes that they
free; then loads go on side by side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.core.tasks import is_cancelled
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.capability import Loaded
from kakeya.memory.arbiter.events import (
    EventListeners,
    Evicted,
    LoadFailure,
    ModelLoad,
    ModelUnload,
    RequestRefused,
)
from kakeya.memory.arbiter.plan import ArbiterOutcome, Ask, Plan, Reason, ResidentEviction
from kakeya.memory.arbiter.policy import ShrinkTenant, Tenant
from kakeya.memory.arbiter.resident import LeaseId, ResidentKey, State

_log = logging.getLogger(__name__)
UNLOAD_LIMIT_S = SHRINK_LIMIT_S = 30.0
"""The longest wait of other plans for an unload or a tenant: three times the drain limit."""
FORCE_S = 2.0
"""The limit of each step of a forced end: handlers may ignore that they are cancelled."""
_TELLING = frozenset({Reason.SWAP, Reason.FIT, Reason.PRESSURE})
Result = TypeVar("Result")


class ModelHandlers(Protocol):
    """The owner of the live models."""

    async def load(self, key: ResidentKey) -> Loaded:
        """Load a model and return it with its measured size."""
        ...

    async def unload(self, key: ResidentKey) -> None:
        """Unload a model and free its bytes."""
        ...


class TenantSource(Protocol):
    """A holder of many small things: a cache, the page arena, the sessions."""

    def usage(self) -> Tenant:
        """The bytes that it holds now."""
        ...

    async def shrink(self, size: int) -> None:
        """Give up `size` bytes, expired ones first; less when fewer can be spared by now."""
        ...


@dataclass(slots=True, eq=False)
class _CountedTenant:
    """A tenant that is asked for one shrink at a time, and for none while one does not end."""

    source: TenantSource
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_stuck: bool = False

    def usage(self) -> Tenant:
        """The bytes that it holds; all are in use while a shrink does not end."""
        usage = self.source.usage()
        return replace(usage, expired_bytes=0, spare_bytes=0) if self.is_stuck else usage


async def within(
    clock: Clock,
    seconds: float,
    work: Coroutine[object, object, Result],
    late: errors.DeadlineExceeded,
) -> Result:
    """The result of `work`. At its time limit it is cancelled, and `late` is raised."""
    task = asyncio.ensure_future(work)
    if seconds == float("inf"):
        return await task
    sleeper = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((task, sleeper), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise late
        return task.result()
    finally:
        for pending in (task, sleeper):
            pending.cancel()
        await asyncio.gather(task, sleeper, return_exceptions=True)


async def has_ended(clock: Clock, seconds: float, task: asyncio.Task[None]) -> bool:
    """Wait for a task for `seconds` at most; it goes on after them."""
    sleeper = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((task, sleeper), return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleeper.cancel()
    return task.done()


async def cancelled(clock: Clock, seconds: float, tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their ends, for `seconds` at most."""
    for task in tasks:
        task.cancel()
    if tasks:
        ends = asyncio.ensure_future(asyncio.wait(tasks))
        sleeper = asyncio.ensure_future(clock.sleep(seconds))
        await asyncio.wait((ends, sleeper), return_when=asyncio.FIRST_COMPLETED)
        ends.cancel()
        sleeper.cancel()


class Keeper:
    """Performs the outcomes of one arbiter while `run` runs."""

    def __init__(
        self, arbiter: Arbiter, *, models: ModelHandlers, listeners: EventListeners, clock: Clock
    ) -> None:
        self._arbiter = arbiter
        self._models = models
        self._listeners = listeners
        self._clock = clock
        self._tenants: dict[str, _CountedTenant] = {}
        self._waiters: dict[LeaseId, asyncio.Future[None]] = {}
        self.on_wait: Callable[[], None] = lambda: None
        self._plans: asyncio.Queue[Plan] = asyncio.Queue()
        self._rooms: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._loads: set[asyncio.Task[None]] = set()
        self._unloads: dict[ResidentKey, asyncio.Task[None]] = {}
        self._shrinks: set[asyncio.Task[None]] = set()

    def add_tenant(self, source: TenantSource) -> None:
        """Count the bytes of a tenant, and ask it to shrink when room is needed."""
        tenant = source.usage()
        if tenant.name in self._tenants:
            raise errors.Conflict(f"tenant {tenant.name!r} is already registered")
        self._tenants[tenant.name] = _CountedTenant(source)
        self._arbiter.report(tenant)

    def remove_tenant(self, name: str) -> None:
        """Stop counting a tenant, and forget the bytes that it was told to give up."""
        if self._tenants.pop(name, None) is not None:
            self.take(self._arbiter.forget(name, self._clock.mono()))

    async def lease(self, ask: Ask) -> LeaseId:
        """Wait for a lease. A cancelled wait leaves the queue, or releases the lease."""
        self.count_tenants()
        lease, outcome = self._arbiter.ask(ask, self._clock.mono())
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[lease] = waiter
        self.take(outcome)
        if not waiter.done():
            self.on_wait()
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiters.pop(lease, None)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen: a refusal that came too late to be read
            self.take(self._arbiter.withdraw(lease, self._clock.mono()))
            raise
        return lease

    def count_tenants(self) -> None:
        """Report the bytes of each tenant to the arbiter."""
        for tenant in self._tenants.values():
            self._arbiter.report(tenant.usage())

    def take(self, outcome: ArbiterOutcome) -> None:
        """Perform an outcome: answer requests, and queue its plans."""
        for grant in outcome.grants:
            waiter = self._waiters.pop(grant.lease)
            if not waiter.done():  # cancelled this very turn: its `lease` gives back
                waiter.set_result(None)
        for refusal in outcome.refusals:
            waiter = self._waiters.pop(refusal.lease)
            if not waiter.done():
                waiter.set_exception(refusal.error)
            self._listeners.tell(RequestRefused(key=refusal.key, error=refusal.error))
        for plan in outcome.plans:
            self._plans.put_nowait(plan)
        if outcome.exhausted is not None:
            held = ", ".join(map(str, outcome.exhausted.kept))
            event(
                _log,
                "memory pressure finds nothing to take",
                level=logging.WARNING,
                pressure=outcome.exhausted.level.name.lower(),
                kept=held,
            )
            self._listeners.tell(outcome.exhausted)
        self._wake.set()
        self._changed.set()

    async def run(self) -> None:
        """Carry out plans and keep time, until cancelled; then loads are cancelled too."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_time())
                group.create_task(self._carry_out_all(group))
        finally:
            tasks = (*self._loads, *self._unloads.values(), *self._shrinks)
            await cancelled(self._clock, FORCE_S, tasks)

    async def drain(self, grace_s: float) -> tuple[ResidentKey, ...]:
        """Unload all released models in time; return those that are still in use or loading."""
        until_mono = self._clock.mono() + grace_s
        while True:
            self._changed.clear()
            self.take(self._arbiter.clear(self._clock.mono()))
            left = tuple(one.key for one in self._arbiter.snapshot().residents)
            left_s = until_mono - self._clock.mono()
            if not left or left_s <= 0:
                return left
            self._changed.clear()
            await self._clock.sleep(left_s, self._changed)

    async def cancel_loads(self) -> None:
        """Cancel loads that are under way; their requests are refused."""
        await cancelled(self._clock, FORCE_S, tuple(self._loads))

    async def unload_now(self, key: ResidentKey) -> None:
        """Unload a model that is still held, at the very end."""
        task = asyncio.get_running_loop().create_task(self._unload(key))
        await has_ended(self._clock, FORCE_S, task)
        task.cancel()
        self._listeners.tell(ModelUnload(key=key, reason=Reason.SHUTDOWN))

    async def _keep_time(self) -> None:
        while True:
            self._wake.clear()
            now = self._clock.mono()
            due = self._arbiter.next_wake_mono(now)
            if due is None:
                await self._wake.wait()
                continue
            await self._clock.sleep(due - now, self._wake)
            self.take(self._arbiter.settle(self._clock.mono()))

    async def _carry_out_all(self, group: asyncio.TaskGroup) -> None:
        while True:
            plan = await self._plans.get()
            room = group.create_task(self._make_room(plan))
            self._rooms.add(room)
            room.add_done_callback(self._rooms.discard)
            if plan.load is not None:
                group.create_task(self._begin_load(plan, plan.load, tuple(self._rooms)))

    async def _make_room(self, plan: Plan) -> None:
        for shrink in plan.shrink:
            await self._shrink(shrink)
        for eviction in plan.evict:
            await self._evict(eviction, plan.load)

    async def _begin_load(
        self, plan: Plan, key: ResidentKey, rooms: Collection[asyncio.Task[None]]
    ) -> None:
        await asyncio.wait(rooms)
        goes_on, outcome = self._arbiter.begin_load(plan, self._clock.mono())
        if goes_on:
            # Only the end of the node cancels it: a model without requests stays warm.
            task = asyncio.get_running_loop().create_task(self._load(key))
            self._loads.add(task)
            task.add_done_callback(self._loads.discard)
        self.take(outcome)

    async def _shrink(self, shrink: ShrinkTenant) -> None:
        tenant = self._tenants.get(shrink.name)
        if tenant is None:
            return
        async with tenant.turn:
            if not tenant.is_stuck:
                await self._ask_back(tenant, shrink)
            if self._tenants.get(shrink.name) is tenant:  # else it left, and its promise with it
                self.take(self._arbiter.shrunk(shrink, tenant.usage(), self._clock.mono()))

    async def _ask_back(self, tenant: _CountedTenant, shrink: ShrinkTenant) -> None:
        task = asyncio.get_running_loop().create_task(self._give_up(tenant.source, shrink))
        self._shrinks.add(task)
        task.add_done_callback(self._shrinks.discard)
        if not await has_ended(self._clock, SHRINK_LIMIT_S, task):
            # Its bytes count as in use until the shrink ends.
            _warn("shrink of a tenant does not end; its bytes stay counted", tenant=shrink.name)
            tenant.is_stuck = True
            task.add_done_callback(lambda _: self._unstuck(tenant))

    def _unstuck(self, tenant: _CountedTenant) -> None:
        tenant.is_stuck = False
        self.count_tenants()
        self.take(self._arbiter.settle(self._clock.mono()))

    async def _give_up(self, source: TenantSource, shrink: ShrinkTenant) -> None:
        try:
            await source.shrink(shrink.bytes)
        except (Exception, asyncio.CancelledError) as fault:
            if isinstance(fault, asyncio.CancelledError) and is_cancelled():
                raise
            _warn("tenant failed to shrink", tenant=shrink.name, error=repr(fault))

    async def _evict(self, eviction: ResidentEviction, room_for: ResidentKey | None) -> None:
        key = eviction.key
        task = asyncio.get_running_loop().create_task(self._unload(key))
        self._unloads[key] = task
        task.add_done_callback(lambda _: self._unloads.pop(key))
        if not await has_ended(self._clock, UNLOAD_LIMIT_S, task):
            # It is left alone: its bytes stay in the ledger as foreign ones until it ends, and its
            # model is not loaded meanwhile.
            _warn("unload does not end; its bytes stay counted", model=str(key))
            held = f"unload of {key}"
            self.take(self._arbiter.hold(held, eviction.bytes, self._clock.mono()))
            task.add_done_callback(lambda _: self._freed(held))
        self.take(self._arbiter.unloaded(key, self._clock.mono()))
        self._listeners.tell(ModelUnload(key=key, reason=eviction.reason))
        if eviction.reason in _TELLING:
            self._listeners.tell(
                Evicted(key=key, reason=eviction.reason, bytes=eviction.bytes, room_for=room_for)
            )

    def _freed(self, held: str) -> None:
        self.take(self._arbiter.hold(held, 0, self._clock.mono()))

    async def _unload(self, key: ResidentKey) -> None:
        try:
            await self._models.unload(key)
        except Exception as fault:  # noqa: BLE001 - a handler's fault; its bytes are measured anew
            _warn("unload failed", model=str(key), error=repr(fault))

    def _check_unloaded(self, key: ResidentKey) -> None:
        """Refuse a load beside an unload: calls for one model do not overlap."""
        if key in self._unloads:
            raise errors.MemoryRefused(
                f"the last unload of {key} does not end, and its memory is still held; ask again "
                "later",
                retry_after_s=UNLOAD_LIMIT_S,
            )

    async def _load(self, key: ResidentKey) -> None:
        began_mono = self._clock.mono()
        resident = self._arbiter.find(key)
        if resident is None or resident.state is not State.LOADING:
            raise errors.InvariantBroken("load of a resident", f"{key} is not loading")
        try:
            self._check_unloaded(key)
            loaded = await self._models.load(key)
        except asyncio.CancelledError:
            if is_cancelled():
                self._failed(key, errors.Refused(f"the node stops while {key} loads"))
                raise
            self._failed(key, errors.LoadFailed(f"the load of {key} was cancelled from within"))
        except errors.KakeyaError as error:
            self._failed(key, error)
        except Exception as fault:  # noqa: BLE001 - a handler's fault is its callers' answer
            failure = errors.LoadFailed(f"{key} could not be loaded: {fault!r}")
            failure.__cause__ = fault
            self._failed(key, failure)
        else:
            now = self._clock.mono()
            self._listeners.tell(
                ModelLoad(
                    key=key,
                    load_s=now - began_mono,
                    estimate_bytes=resident.estimate_bytes,
                    measured_bytes=loaded.measured_bytes,
                )
            )
            self.take(
                self._arbiter.loaded(
                    key, loaded.measured_bytes, now, unfilled_bytes=loaded.unfilled_bytes
                )
            )

    def _failed(self, key: ResidentKey, error: errors.KakeyaError) -> None:
        _warn("load failed", model=str(key), error=error.message)
        self._listeners.tell(LoadFailure(key=key, error=error))
        self.take(self._arbiter.load_failed(key, lambda: error, self._clock.mono()))


def _warn(message: str, **fields: object) -> None:
    event(_log, message, level=logging.WARNING, **fields)
