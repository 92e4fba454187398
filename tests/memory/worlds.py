"""What the tests of memory share: bytes, roles, a clock that only tests move, toy handlers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kakeya.memory.arbiter import resident
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.plan import FOREVER, ArbiterOutcome, Ask, Plan
from kakeya.memory.arbiter.policy import Rules
from kakeya.memory.arbiter.resident import (
    COLD,
    LeaseId,
    RequestPriority,
    ResidentKey,
    Role,
    RolePriority,
    Warmth,
)
from tests.fakes import FakeClock

MB = 1024 * 1024
ROLE_OF = {role.name: role for role in resident.ROLES}
MANY = Role(name="many", priority=RolePriority(30), eviction="nothing is lost", places=None)


class ManualClock(FakeClock):
    """Moves only when a test says so."""

    async def _jump(self) -> None:
        return


def key(name: str) -> ResidentKey:
    capability, _, model = name.partition(":")
    return ResidentKey(capability, model or "m")


def ask(
    name: str,
    role: str | Role = "vision",
    size: int = 100,
    *,
    priority: RequestPriority = RequestPriority.NORMAL,
    warmth: Warmth = COLD,
    deadline: float = FOREVER,
    may_displace_text: bool = False,
) -> Ask:
    return Ask(
        key=key(name),
        role=ROLE_OF[role] if isinstance(role, str) else role,
        estimate_bytes=size,
        priority=priority,
        warmth=warmth,
        deadline_mono=deadline,
        may_displace_text=may_displace_text,
    )


@dataclass
class World:
    """An arbiter with a keeper that carries out each plan at once and perfectly."""

    arbiter: Arbiter
    now: float = 0.0
    grants: dict[LeaseId, ResidentKey] = field(default_factory=dict)
    refusals: dict[LeaseId, Exception] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    exhausted: list[object] = field(default_factory=list)
    loads_by_hand: bool = False
    loading: list[ResidentKey] = field(default_factory=list)

    @classmethod
    def of(cls, budget: int, rules: Rules | None = None) -> World:
        return cls(Arbiter(budget, rules=rules))

    def take(self, outcome: ArbiterOutcome) -> None:
        self.grants |= {grant.lease: grant.key for grant in outcome.grants}
        self.refusals |= {refusal.lease: refusal.error for refusal in outcome.refusals}
        if outcome.exhausted is not None:
            self.exhausted.append(outcome.exhausted)
        for plan in outcome.plans:
            self.plans.append(plan)
            self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        for eviction in plan.evict:
            self.take(self.arbiter.unloaded(eviction.key, self.now))
        if plan.load is None:
            return
        goes_on, outcome = self.arbiter.begin_load(plan, self.now)
        self.take(outcome)
        if goes_on and self.loads_by_hand:
            self.loading.append(plan.load)
        elif goes_on:
            self.take(self.arbiter.loaded(plan.load, None, self.now))

    def ask(self, wish: Ask) -> LeaseId:
        lease, outcome = self.arbiter.ask(wish, self.now)
        self.take(outcome)
        return lease

    def lease(self, wish: Ask) -> LeaseId:
        """Ask for what is granted at once."""
        lease = self.ask(wish)
        assert lease in self.grants, self.refusals.get(lease, "it waits")
        return lease

    def use(self, wish: Ask) -> None:
        """Load, use and release."""
        self.release(self.lease(wish))

    def release(self, lease: LeaseId) -> None:
        self.take(self.arbiter.release(lease, self.now))

    def wait(self, seconds: float) -> None:
        """Let time go by, waking the arbiter when it wants to be."""
        end = self.now + seconds
        while (due := self.arbiter.next_wake_mono(self.now)) is not None and due <= end:
            self.now = due
            self.take(self.arbiter.settle(self.now))
        self.now = end
        self.take(self.arbiter.settle(self.now))

    @property
    def resident(self) -> set[str]:
        return {one.key.capability for one in self.arbiter.snapshot().residents}

    @property
    def gone(self) -> list[tuple[str, str]]:
        """Every eviction so far: who and why."""
        return [(one.key.capability, one.reason) for plan in self.plans for one in plan.evict]


async def until(condition: object, turns: int = 2000) -> None:
    """Let everything that can run, run, until `condition()` holds."""
    for _ in range(turns):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")
