"""Evictions that no request asks for: idle for too long, above the budget, wanted back by
pressure."""

from __future__ import annotations

from kakeya.memory.arbiter.ledger import Ledger
from kakeya.memory.arbiter.plan import Exhausted, Reason
from kakeya.memory.arbiter.planning import DraftOutcome, Planner
from kakeya.memory.arbiter.policy import PressureLevel, Rules, fit, pressure_key, relieve


class Reclaimer:
    """Plans such evictions at the arbiter's word. `level` is the machine's pressure."""

    def __init__(self, ledger: Ledger, planner: Planner, rules: Rules) -> None:
        self._ledger = ledger
        self._planner = planner
        self._rules = rules
        self._relieved_mono = float("-inf")
        self._reported_mono = self._took_mono = float("-inf")
        self._wanted: int | None = None
        self.level = PressureLevel.NOMINAL

    def press(self, level: PressureLevel, wanted_bytes: int | None) -> None:
        """Note a reading of the machine; `wanted_bytes` None = the need is not known.

        A higher level evicts at once. Bytes that are on their way back already are not wanted
        again.
        """
        if level > self.level:
            self._relieved_mono = self._reported_mono = float("-inf")
        if self.level is PressureLevel.NOMINAL:
            self._took_mono = float("-inf")
        self.level = level
        self._wanted = None
        if wanted_bytes is not None:
            leaving = sum(one.bytes for one in self._ledger.residents if one.is_leaving)
            self._wanted = max(0, wanted_bytes - leaving - self._ledger.promised_bytes)

    def take(self, answer: DraftOutcome, now: float) -> None:
        """Add the plans of evictions that are due."""
        self._unload_overdue(answer, now)
        self._fit_budget(answer, now)
        self._relieve(answer, now)

    @property
    def is_idle(self) -> bool:
        """Whether no eviction is due, nor will be by time alone."""
        is_over = self._ledger.committed_bytes > self._ledger.budget_bytes
        return not is_over and not self.due()

    def due(self) -> list[float]:
        """The monotonic times at which evictions are due by time alone."""
        due = [
            overdue_mono
            for one in self._ledger.residents
            # First what is cheap and mostly decides: a release at rest comes by here.
            if one.warmth.unload_after_s is not None and one.is_idle
            if (overdue_mono := one.overdue_mono) is not None
        ]
        if self.level is not PressureLevel.NOMINAL:
            due.append(self._relieved_mono + self._rules.cooldown_s)
            due.append(self._report_mono)
        return due

    def _unload_overdue(self, answer: DraftOutcome, now: float) -> None:
        overdue = tuple(
            one
            for one in self._ledger.residents
            if one.is_idle and one.overdue_mono is not None and now >= one.overdue_mono
        )
        if overdue:
            answer.plans.append(self._planner.eviction(overdue, Reason.IDLE))

    def _fit_budget(self, answer: DraftOutcome, now: float) -> None:
        """Evict what measurements or foreign processes brought above the budget."""
        over = self._ledger.committed_bytes - self._ledger.budget_bytes
        if over <= 0:
            return
        idle = [
            one
            for one in self._ledger.residents
            if one.is_idle and one.role.yields and not one.warmth.is_pinned
        ]
        taken = fit(over, idle, self._ledger.tenants, lambda one: pressure_key(one, now))
        if taken.victims or taken.shrinks:
            answer.plans.append(self._planner.relief(taken, Reason.FIT, over))

    def _relieve(self, answer: DraftOutcome, now: float) -> None:
        if self.level is PressureLevel.NOMINAL:
            return
        is_busy = self._ledger.has_promises or any(r.is_leaving for r in self._ledger.residents)
        is_low = self.level is PressureLevel.LOW
        if is_low and (is_busy or now < self._relieved_mono + self._rules.cooldown_s):
            return
        residents, tenants = self._ledger.residents, self._ledger.tenants
        taken = relieve(
            self.level, residents, tenants, wanted_bytes=self._wanted, now=now, rules=self._rules
        )
        if taken.victims or taken.shrinks:
            self._relieved_mono = self._took_mono = now
            asked = self._wanted or 0
            answer.plans.append(self._planner.relief(taken, Reason.PRESSURE, asked))
            self._wanted = None if self._wanted is None else taken.short_bytes
        elif self._wanted != 0 and not is_busy and now >= self._report_mono:
            self._reported_mono = now
            kept = tuple(one.key for one in residents)
            answer.exhausted = Exhausted(level=self.level, kept=kept)

    @property
    def _report_mono(self) -> float:
        """The next time at which a shortage is reported: long after the last report, and after the
        last time that something was taken."""
        return max(self._reported_mono, self._took_mono) + self._rules.exhausted_s
