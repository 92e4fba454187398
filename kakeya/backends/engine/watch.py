"""Watches what engines occupy, and does what follows: see `memory.escalation` for the decisions.

Each engine is looked at every POLL_S: its resident size by the system's own account, which it
cannot withhold, and its idle KV by what it says itself. Both go to the ledger. The engine counts
with its lease, or with what it occupies where that is more, less what of its idle KV the lease can
do without, which is a tenant of its own: so it is counted once, and can be asked back before any
model has to leave. Idle KV that the lease cannot do without is only asked for by pressure: room for
others it would not make.

Idle KV given up for another model makes the engine's KV bound and its lease smaller, down to one
whole context; both grow again when nobody waits and the room is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
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
from kakeya.backends.engine.lease import EngineLease
from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound
from kakeya.core.log import event
from kakeya.core.process import resident_bytes
from kakeya.core.tasks import Supervisor, TaskHealth
from kakeya.generation.facts import Footprint
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.events import EngineDrained, EngineKilled, EngineShrunk
from kakeya.memory.arbiter.policy import PressureLevel, Rung, Tenant
from kakeya.memory.arbiter.resident import ResidentKey

_log = logging.getLogger(__name__)
POLL_S = 2.0
"""Between two looks: a step of a large model grows KV by some 30 MB in that time."""


@dataclass(slots=True)
class _Watched:
    """One engine under watch."""

    key: ResidentKey
    lease: EngineLease
    way: Escalation
    resident_bytes: int = 0
    footprint: Footprint | None = None
    last_reason: str = ""
    is_attended: bool = False
    parted_bytes: int = 0
    """What of its idle KV counts as a tenant's and not as the engine's. Both are counted together:
    what the lease can do without may change in between."""
    steps: dict[str, int] = field(
        default_factory=lambda: {"shrink": 0, "drain": 0, "end": 0, "kill": 0}
    )

    @property
    def idle_kv_bytes(self) -> int:
        return self.footprint.idle_kv_bytes if self.footprint else 0

    @property
    def spare_kv_bytes(self) -> int:
        """What of it the lease can do without."""
        return min(self.idle_kv_bytes, self.lease.spare_kv_bytes)


class EngineKvTenant:
    """The idle KV of one engine, as the ladder sees it."""

    def __init__(self, watched: _Watched) -> None:
        self._watched = watched

    def usage(self) -> Tenant:
        """What was counted last."""
        spare = self._watched.parted_bytes
        return Tenant(
            name=tenant_name(self._watched.key.model_key),
            rung=Rung.SESSIONS,
            held_bytes=spare,
            spare_bytes=spare,
            lent_bytes=max(0, self._watched.idle_kv_bytes - spare),
        )

    async def shrink(self, size: int) -> None:
        """Have the engine drop idle KV, oldest first, and take it off its lease."""
        watched = self._watched
        before = watched.footprint
        if before is None:
            return
        # The engine gives spare buffers first: they are asked for beside the KV.
        backend = watched.lease.backend
        watched.footprint = await backend.shrink(before.mlx_cache_bytes + size)
        freed = max(0, before.idle_kv_bytes - watched.idle_kv_bytes)
        lowered = await watched.lease.lower(freed)
        watched.parted_bytes = max(0, watched.parted_bytes - lowered)


def tenant_name(model_id: str) -> str:
    """What the idle KV of a model is called in the ledger."""
    return f"idle KV of {model_id}"


class EngineWatch:
    """All engines of a node; an `async with` around the time in which they are watched."""

    def __init__(
        self,
        arbiter: MemoryArbiter,
        clock: Clock,
        *,
        rules: EscalationRules | None = None,
        poll_s: float = POLL_S,
        resident: Callable[[int], int | None] = resident_bytes,
    ) -> None:
        self._arbiter = arbiter
        self._clock = clock
        self._rules = rules or EscalationRules()
        self._poll_s = poll_s
        self._resident = resident
        self._watched: dict[str, _Watched] = {}
        self._tasks = Supervisor(clock)

    async def __aenter__(self) -> Self:
        self._tasks.start("engine watch", self._run)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._tasks.aclose()
        for model_id in tuple(self._watched):
            self.detach(model_id)

    def attach(
        self, model_id: str, backend: EngineBackend, lease_bytes: int, *, capability: str = "text"
    ) -> None:
        """Watch an engine from now on, in place of an earlier one of its model.

        `lease_bytes` is what it may occupy: at least what it did when it was loaded, and its KV.
        """
        self.detach(model_id)
        watched = _Watched(
            key=ResidentKey(capability, model_id),
            lease=EngineLease(backend, lease_bytes),
            way=Escalation(self._rules),
        )
        self._watched[model_id] = watched
        self._arbiter.add_tenant(EngineKvTenant(watched))

    def detach(self, model_id: str) -> None:
        """Watch it no longer; one that is not watched is fine."""
        watched = self._watched.pop(model_id, None)
        if watched is None:
            return
        self._arbiter.remove_tenant(tenant_name(model_id))
        watched.footprint = None
        watched.lease.backend.resume()  # nobody else would, where it was being drained
        # Its idle KV is no tenant any more; the whole lease is also what it will ask for next time.
        self._measure(watched)

    async def lend_slots(self, model_id: str, size: int) -> bool:
        """Lend a watched engine what its slots for adapters take, or are going to take, in bytes.

        False where there is no room for it now: what is missing comes out of its KV bound, and is
        lent as soon as it is free.
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
        self._arbiter.grown(name)  # first: what is counted twice looks like too much
        self._measure(watched)
        await lease.lent(change)
        self._measure(watched)
        return not lease.short_bytes

    def health(self) -> tuple[TaskHealth, ...]:
        """The watching task."""
        return self._tasks.health()

    def status(self) -> dict[str, dict[str, object]]:
        """By model, as JSON: where it is, what it occupies, what was done so far."""
        return {
            model_id: {
                "stage": one.way.stage.value,
                "resident_bytes": one.resident_bytes,
                "lease_bytes": one.lease.bytes,
                "idle_kv_bytes": one.idle_kv_bytes,
                "slot_bytes": one.lease.slot_bytes,
                "lent_slot_bytes": one.lease.lent_slot_bytes,
                "steps": dict(one.steps),
                "last_reason": one.last_reason,
            }
            for model_id, one in self._watched.items()
        }

    async def look(self) -> None:
        """Look at each engine once and do what follows."""
        await asyncio.gather(*(self._attend(one) for one in tuple(self._watched.values())))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await self._clock.sleep(self._poll_s)
                for watched in self._watched.values():
                    if not watched.is_attended:  # one that hangs keeps nobody from the others
                        group.create_task(self._attend(watched))

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
        # While it is on its way out it may not answer, and need not be waited for.
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
            # Before it is counted: what the engine gives back, nobody else has to.
            told = await self._shrink(watched, step, sight) or told
            occupied = told.resident_bytes if told else occupied
            if not self._is_watched(watched):
                return
        watched.resident_bytes, watched.footprint = occupied, told
        self._measure(watched)
        if step is not None:
            self._do(watched, step)
        elif watched.lease.is_lowered and self._has_room_for(watched.lease.lowered_bytes):
            await self._restore(watched)
        elif watched.lease.short_bytes and self._has_room_for(watched.lease.short_bytes):
            await self.lend_slots(watched.key.model_key, watched.lease.slot_bytes)

    async def _restore(self, watched: _Watched) -> None:
        """Give back what an engine gave up for others. It counts before the engine has it: else the
        room is promised to somebody else meanwhile, and both are above the budget."""
        part = watched.lease.regain()
        self._measure(watched)
        await watched.lease.restore(part)
        if self._is_watched(watched):
            self._measure(watched)

    def _do(self, watched: _Watched, step: Step) -> None:
        backend, key = watched.lease.backend, watched.key
        match step:
            case ShrinkIt():
                pass  # done before it was counted
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
        """Ask an engine for memory; returns what it holds then. None = it does not answer, and
        gives nothing: what it occupies next time decides."""
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
        """Tell the ledger. An engine that is loading or leaving is none of its residents."""
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

    def _note(self, watched: _Watched, what: str, reason: str) -> None:
        watched.steps[what] += 1
        watched.last_reason = reason
        model = watched.key.model_key
        event(_log, f"engine: {what}", level=logging.WARNING, model=model, reason=reason)

    def _has_room_for(self, size: int) -> bool:
        ledger = self._arbiter.status()
        is_calm = ledger.level is PressureLevel.NOMINAL and not ledger.waiting
        return is_calm and ledger.spare_bytes >= size

    def _is_watched(self, watched: _Watched) -> bool:
        return self._watched.get(watched.key.model_key) is watched
