"""Measure the memory of engines, and carry out the decisions of `escalation.py`.

Each engine is measured every POLL_S: its resident size as the system reports it, its idle KV as the
engine reports it. Both go to the ledger. The *spare* idle KV, which the lease can do without, is a
tenant of its own, so that it can be freed before any model has to leave. The engine counts with its
lease, or with its resident size if that is larger, less its spare idle KV. The other idle KV is
only asked for under pressure: freeing it makes no room for other models.

Idle KV that is given up for another model lowers the engine's KV bound and its lease, and so does
rest: an engine without requests gives back the room for KV that it does not fill. Both grow again
when the engine asks (`kv_lender`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, assert_never

from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.escalation import (
    EndIt,
    EngineSight,
    Escalation,
    EscalationRules,
    HoldIt,
    KillIt,
    ResumeIt,
    ShrinkIt,
    Step,
)
from kakeya.backends.engine.guard import EngineGuard, GuardedEngine
from kakeya.backends.engine.kv_lender import KvLender
from kakeya.backends.engine.lease import EngineLease
from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound
from kakeya.core.log import event
from kakeya.core.process import resident_bytes, signal_group
from kakeya.core.tasks import Supervisor, TaskHealth, shared_pause_s
from kakeya.core.units import MIB
from kakeya.generation.facts import Footprint
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.events import EngineDrained, EngineKilled, EngineShrunk
from kakeya.memory.arbiter.policy import PressureLevel, Rung, Tenant
from kakeya.memory.arbiter.resident import ResidentKey

_log = logging.getLogger(__name__)
POLL_S = 2.0
"""Seconds between two measurements: a large model grows its KV by some 30 MB in that time."""
CALM_S = 64.0
"""The same of an engine that has rested and whose memory, as the guard sees it, is what it was but
for `_CALM_SHARE` of its lease. A call wakes a dozen threads of gRPC."""
_CALM_SHARE = 0.01
REST_S = 20.0
"""After so long without a request an engine gives back unfilled room: an agent's next turn comes
sooner, mostly."""


@dataclass(slots=True, eq=False)
class _Watched(GuardedEngine):
    """One engine under watch."""

    lease: EngineLease
    way: Escalation = field(kw_only=True)
    lender: KvLender | None = None
    used_mono: float = 0.0
    """When it last had a request."""
    resident_bytes: int = 0
    footprint: Footprint | None = None
    last_reason: str = ""
    is_attended: bool = False
    is_calm: bool = False
    due_mono: float = 0.0
    """When a calm engine is measured again."""
    steps: dict[str, int] = field(
        default_factory=lambda: {"shrink": 0, "drain": 0, "end": 0, "kill": 0}
    )

    @property
    def idle_kv_bytes(self) -> int:
        return self.footprint.idle_kv_bytes if self.footprint else 0

    @property
    def spare_kv_bytes(self) -> int:
        """The idle KV that the lease can do without."""
        return min(self.idle_kv_bytes, self.lease.spare_kv_bytes)


class EngineKvTenant:
    """The idle KV of one engine, as a tenant of the arbiter."""

    def __init__(self, watched: _Watched) -> None:
        self._watched = watched

    def usage(self) -> Tenant:
        """The last counted bytes."""
        spare = self._watched.parted_bytes
        return Tenant(
            name=tenant_name(self._watched.key.model_key),
            rung=Rung.SESSIONS,
            held_bytes=spare,
            spare_bytes=spare,
            lent_bytes=max(0, self._watched.idle_kv_bytes - spare),
        )

    async def shrink(self, size: int) -> None:
        """Let the engine drop idle KV, the oldest first, and lower its lease by that."""
        watched = self._watched
        before = watched.footprint
        if before is None:
            return
        # The engine frees unused buffers first, so they are asked for beside the KV.
        backend = watched.lease.backend
        watched.footprint = await backend.shrink(before.mlx_cache_bytes + size)
        freed = max(0, before.idle_kv_bytes - watched.idle_kv_bytes)
        lowered = await watched.lease.lower(freed)
        watched.parted_bytes = max(0, watched.parted_bytes - lowered)


def tenant_name(model_id: str) -> str:
    """Return the name of a model's idle KV in the ledger."""
    return f"idle KV of {model_id}"


class EngineWatch:
    """Watches all engines of a node, inside an `async with`."""

    def __init__(
        self,
        arbiter: MemoryArbiter,
        clock: Clock,
        *,
        rules: EscalationRules | None = None,
        poll_s: float = POLL_S,
        resident: Callable[[int], int | None] = resident_bytes,
        kill: Callable[[int], None] = signal_group,
    ) -> None:
        self._arbiter = arbiter
        self._clock = clock
        self._rules = rules or EscalationRules()
        self._poll_s = poll_s
        self._resident = resident
        self._watched: dict[str, _Watched] = {}
        self._tasks = Supervisor(clock)
        self.guard = EngineGuard(
            arbiter, clock, ended=self._ended_by_guard, resident=resident, kill=kill
        )

    async def __aenter__(self) -> Self:
        self._tasks.start("engine watch", self._run)
        self._tasks.start("engine guard", self.guard.run)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.aclose()
        for model_id in tuple(self._watched):
            self.detach(model_id)

    def attach(
        self,
        model_id: str,
        backend: EngineBackend,
        lease_bytes: int,
        *,
        capability: str = "text",
        kv_share: float = 1.0,
    ) -> None:
        """Watch an engine, in place of an earlier one of its model.

        `lease_bytes` is at least its memory after the load and its KV; `kv_share` as in `KvLender`.
        """
        self.detach(model_id)
        watched = _Watched(
            key=ResidentKey(capability, model_id),
            lease=EngineLease(backend, lease_bytes),
            way=Escalation(self._rules),
            used_mono=self._clock.mono(),
        )
        backend.kv_source = watched.lender = KvLender(
            watched.key,
            watched.lease,
            self._arbiter,
            tenant=tenant_name(model_id),
            counted=lambda: self._measure(watched),
            share=kv_share,
        )
        self._watched[model_id] = watched
        self._arbiter.add_tenant(EngineKvTenant(watched))
        self.guard.add(watched)

    def detach(self, model_id: str) -> None:
        """Stop watching a model's engine; an unknown one is ignored."""
        watched = self._watched.pop(model_id, None)
        if watched is None:
            return
        self.guard.remove(watched)
        self._arbiter.remove_tenant(tenant_name(model_id))
        watched.footprint = None
        watched.lease.backend.resume()  # the engine may be draining, and no other code resumes it
        # Its idle KV ends as a tenant; the whole lease is also the size of the next request for it.
        self._measure(watched)

    async def lend_slots(self, model_id: str, size: int) -> bool:
        """Lend a watched engine the bytes of its adapter slots, present and coming.

        False if there is no room now: the missing bytes come out of its KV bound, and are lent as
        soon as they are free.
        """
        watched = self._watched.get(model_id)
        if watched is None:
            return False
        lease = watched.lease
        lease.slot_bytes = size
        change, name = size - lease.lent_slot_bytes, tenant_name(model_id)
        if change > 0 and not self._arbiter.may_grow(name, change):
            change = 0
        lease.lent_slot_bytes += change
        self._arbiter.grown(name)  # first, since bytes that count twice look like too much
        self._measure(watched)
        await lease.lent(change)
        self._measure(watched)
        return not lease.short_bytes

    def health(self) -> tuple[TaskHealth, ...]:
        """The watching task."""
        return self._tasks.health()

    def status(self) -> dict[str, dict[str, object]]:
        """Return the step, the memory and the counts of each model's engine, as JSON."""
        return {
            model_id: {
                "stage": one.way.stage.value,
                "resident_bytes": one.resident_bytes,
                "lease_bytes": one.lease.bytes,
                "kv_bytes": one.lease.kv_bytes,
                "kv_most_bytes": one.lease.backend.limits.kv_most_bytes,
                "idle_kv_bytes": one.idle_kv_bytes,
                "slot_bytes": one.lease.slot_bytes,
                "lent_slot_bytes": one.lease.lent_slot_bytes,
                "max_running": one.lease.backend.limits.max_running
                or one.lease.backend.options.max_running,
                "steps": dict(one.steps),
                "last_reason": one.last_reason,
            }
            for model_id, one in self._watched.items()
        }

    async def look(self) -> None:
        """Measure each engine once and carry out the decisions."""
        await asyncio.gather(*(self._attend(one) for one in tuple(self._watched.values())))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await self._clock.sleep(shared_pause_s(self._poll_s, self._clock.mono()))
                for watched in self._watched.values():
                    if self._is_due(watched):
                        group.create_task(self._attend(watched))

    def _is_due(self, watched: _Watched) -> bool:
        if watched.is_attended:  # an engine that hangs does not delay the others
            return False
        now, was_calm = self._clock.mono(), watched.is_calm
        changed = abs(watched.guarded_bytes - watched.resident_bytes)
        watched.is_calm = (
            not watched.is_at_work
            and watched.way.is_settled(watched.resident_bytes, watched.lease.bytes)
            and changed <= _CALM_SHARE * watched.lease.bytes
        )
        if was_calm and watched.is_calm and now < watched.due_mono:
            return False
        has_rested = now - watched.used_mono >= REST_S and not watched.lease.short_bytes
        watched.due_mono = now + (shared_pause_s(CALM_S, now) if has_rested else REST_S)
        return True

    async def _attend(self, watched: _Watched) -> None:
        watched.is_attended = True
        try:
            await self._look_at(watched)
        finally:
            watched.is_attended = False

    async def _look_at(self, watched: _Watched) -> None:
        backend = watched.lease.backend
        pid = backend.pid
        if pid is None:
            watched.resident_bytes, watched.footprint = 0, None
            self._measure(watched)
            return
        occupied = await asyncio.to_thread(self._resident, pid)
        # An engine that ends may not answer, so the watch does not wait for it.
        told = await backend.footprint()
        if occupied is None or backend.pid != pid or not self._is_watched(watched):
            return
        sight = EngineSight(
            child=pid,
            resident_bytes=occupied,
            lease_bytes=watched.lease.bytes,
            running=backend.running,
        )
        step = watched.way.see(sight, self._clock.mono())
        if isinstance(step, ShrinkIt):
            # Before counting: memory that the engine frees need not come from other tenants.
            told = await self._shrink(watched, step, sight) or told
            occupied = told.resident_bytes if told else occupied
            if not self._is_watched(watched):
                return
        watched.resident_bytes, watched.footprint = occupied, told
        self._measure(watched)
        if step is not None:
            self._do(watched, step)
        elif watched.lease.short_bytes and self._has_room_for(watched.lease.short_bytes):
            await self.lend_slots(watched.key.model_key, watched.lease.slot_bytes)
        elif await self._rests(watched):
            self._measure(watched)

    async def _rests(self, watched: _Watched) -> bool:
        """Whether an engine gave back unfilled room, or learnt of another bound of its growth."""
        lease, backend, now = watched.lease, watched.lease.backend, self._clock.mono()
        if backend.running or backend.waiting:
            watched.used_mono = now
        unfilled = lease.spare_kv_bytes - watched.idle_kv_bytes
        if now - watched.used_mono >= REST_S and unfilled > 0:
            return await lease.lower(unfilled) > 0 and self._is_watched(watched)
        most = watched.lender.most_bytes() if watched.lender is not None else 0
        if lease.kv_bytes and abs(most - backend.limits.kv_most_bytes) >= MIB:
            with contextlib.suppress(KakeyaError):
                await backend.set_limits(kv_most_bytes=most)
            return self._is_watched(watched)
        return False

    def _ended_by_guard(self, engine: GuardedEngine, occupied: int, why: str) -> None:
        watched = self._watched.get(engine.key.model_key)
        if watched is engine:
            watched.resident_bytes = occupied
            self._do(watched, KillIt(why))
        else:  # it loads
            engine.lease.backend.kill(why)
            self._arbiter.tell(EngineKilled(key=engine.key, bytes=occupied, reason=why))

    def _do(self, watched: _Watched, step: Step) -> None:
        backend, key = watched.lease.backend, watched.key
        match step:
            case ShrinkIt():
                pass  # already done before the count
            case HoldIt(reason):
                self._note(watched, "drain", reason)
                backend.hold()
            case ResumeIt():
                backend.resume()
            case EndIt(reason):
                self._note(watched, "end", reason)
                backend.end(reason)
                gone = watched.resident_bytes
                self._arbiter.tell(EngineDrained(key=key, bytes=gone, reason=reason))
            case KillIt(reason):
                self._note(watched, "kill", reason)
                backend.kill(reason)
                gone = watched.resident_bytes
                self._arbiter.tell(EngineKilled(key=key, bytes=gone, reason=reason))
            case _:
                assert_never(step)

    async def _shrink(
        self, watched: _Watched, step: ShrinkIt, sight: EngineSight
    ) -> Footprint | None:
        """Ask an engine to free memory; return its figures after that.

        None = no answer, and nothing freed: the next measurement decides.
        """
        key, freed, told = watched.key, 0, None
        try:
            told = await watched.lease.backend.shrink(step.bytes)
            freed = max(0, sight.resident_bytes - told.resident_bytes)
        except KakeyaError as error:
            event(_log, "engine did not shrink", model=key.model_key, error=error.message)
        self._note(watched, "shrink", step.reason)
        self._arbiter.tell(EngineShrunk(key=key, bytes=freed, reason=step.reason))
        return told

    def _measure(self, watched: _Watched) -> None:
        """Report to the ledger. An engine that loads or leaves is not a resident."""
        lease, occupied = watched.lease.bytes, watched.resident_bytes
        watched.parted_bytes = watched.spare_kv_bytes
        counted = max(lease, occupied) - watched.parted_bytes
        key = watched.key
        with contextlib.suppress(NotFound):
            self._arbiter.measure(
                key.capability,
                key.model_key,
                max(0, counted),
                unfilled_bytes=min(max(0, counted), max(0, lease - occupied)),
            )
        self.guard.tell(watched)  # before the engine learns of a larger lease

    def _note(self, watched: _Watched, what: str, reason: str) -> None:
        watched.steps[what] += 1
        watched.last_reason = reason
        model = watched.key.model_key
        # A little above its lease is usual: an estimate met what a model really takes.
        level = logging.INFO if what == "shrink" else logging.WARNING
        event(_log, f"engine: {what}", level=level, model=model, reason=reason)

    def _has_room_for(self, size: int) -> bool:
        ledger = self._arbiter.status()
        is_calm = ledger.level is PressureLevel.NOMINAL and not ledger.waiting
        return is_calm and ledger.spare_bytes >= size

    def _is_watched(self, watched: _Watched) -> bool:
        return self._watched.get(watched.key.model_key) is watched
