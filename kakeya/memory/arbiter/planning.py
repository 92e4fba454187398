"""Plans in the making. Each reserves what it names, so that no other plan can take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kakeya.memory.arbiter.ledger import Ledger
from kakeya.memory.arbiter.plan import (
    ArbiterOutcome,
    Ask,
    Exhausted,
    Grant,
    Plan,
    Reason,
    Refusal,
    ResidentEviction,
)
from kakeya.memory.arbiter.policy import Relief, ShrinkTenant
from kakeya.memory.arbiter.queue import LoadNow
from kakeya.memory.arbiter.resident import Resident, ResidentKey, State


@dataclass(slots=True)
class DraftOutcome:
    """An outcome in the making."""

    grants: list[Grant] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    exhausted: Exhausted | None = None

    def done(self) -> ArbiterOutcome:
        """Freeze the outcome."""
        return ArbiterOutcome(
            grants=tuple(self.grants),
            refusals=tuple(self.refusals),
            plans=tuple(self.plans),
            exhausted=self.exhausted,
        )


class Planner:
    """Makes plans, and writes into the ledger what they take away and what they promise."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._numbers = 0
        self._planned: dict[ResidentKey, int] = {}

    def number(self) -> int:
        """Draw a number for a plan or a lease; each is drawn once."""
        self._numbers += 1
        return self._numbers

    def load(self, ask: Ask, load: LoadNow, now: float) -> Plan:
        """Plan a load with its evictions and shrinks."""
        self._take(tuple(self._ledger.get(eviction.key) for eviction in load.evict), load.shrink)
        absent = Resident(
            key=ask.key,
            role=ask.role,
            state=State.ABSENT,
            estimate_bytes=ask.estimate_bytes,
            warmth=ask.warmth,
            last_priority=ask.priority,
            last_used_mono=now,
        )
        self._ledger.put(absent.moved(State.LOADING))
        self._planned[ask.key] = plan_id = self.number()
        return Plan(
            plan_id=plan_id,
            evict=load.evict,
            shrink=load.shrink,
            load=ask.key,
            asked_bytes=load.asked_bytes,
        )

    def begin(self, plan: Plan) -> Resident | None:
        """Begin the load of a plan and return its resident; None = the plan was taken back."""
        if plan.load is None or self._planned.get(plan.load) != plan.plan_id:
            return None
        del self._planned[plan.load]
        return self._ledger.get(plan.load)

    def fit(self, urgency: Callable[[ResidentKey], tuple[float, ...]]) -> None:
        """Take back loads that have not begun while more is committed than the budget holds.

        That happens when a tenant gave up less than it promised, or grew. The least urgent load
        goes first; its requests are in the queue again. The evictions of its plan go on.
        """
        ledger = self._ledger
        if ledger.committed_bytes <= ledger.budget_bytes or not self._planned:
            return
        for key in sorted(self._planned, key=urgency, reverse=True):
            if ledger.committed_bytes <= ledger.budget_bytes:
                return
            del self._planned[key]
            ledger.put(ledger.get(key).moved(State.ABSENT))

    def eviction(self, victims: tuple[Resident, ...], reason: Reason) -> Plan:
        """Plan the eviction of residents."""
        return self.relief(Relief(victims=victims), reason, 0)

    def relief(self, relief: Relief, reason: Reason, asked_bytes: int) -> Plan:
        """Plan shrinks and evictions that are to free `asked_bytes`."""
        self._take(relief.victims, relief.shrinks)
        return Plan(
            plan_id=self.number(),
            evict=tuple(
                ResidentEviction(key=one.key, reason=reason, bytes=one.bytes)
                for one in relief.victims
            ),
            shrink=relief.shrinks,
            asked_bytes=asked_bytes,
            short_bytes=relief.short_bytes,
        )

    def _take(self, victims: tuple[Resident, ...], shrinks: tuple[ShrinkTenant, ...]) -> None:
        for victim in victims:
            self._ledger.put(self._ledger.get(victim.key).leaving())
        self._ledger.promise(shrinks)
