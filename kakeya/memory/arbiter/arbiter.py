"""The arbiter: decides what is in memory. Each method is one event and returns an `ArbiterOutcome`.

It never awaits, logs or touches a model. The keeper reports events, performs outcomes, and asks
again at `next_wake_mono`. A lease is written down in the decision that grants it, a reservation in
the decision that plans a load, so nothing can come between.

After each event the queue is walked (see `queue`), unless nothing can follow from it (see
`lasting`); then the reclaimer evicts residents that idle for too long, and relieves pressure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

from kakeya.core import errors
from kakeya.memory.arbiter import queue
from kakeya.memory.arbiter.drain_gate import DrainGate
from kakeya.memory.arbiter.lasting import LastingDecision
from kakeya.memory.arbiter.ledger import Ledger
from kakeya.memory.arbiter.plan import ArbiterOutcome, Ask, Grant, Plan, Reason, Refusal, Snapshot
from kakeya.memory.arbiter.planning import DraftOutcome, Planner
from kakeya.memory.arbiter.policy import (
    PressureLevel,
    Rules,
    ShrinkTenant,
    Tenant,
    decay_mono,
    turn_end_mono,
)
from kakeya.memory.arbiter.reclaim import Reclaimer
from kakeya.memory.arbiter.resident import LeaseId, RequestPriority, Resident, ResidentKey, State
from kakeya.memory.arbiter.tickets import Tickets
from kakeya.memory.arbiter.wishes import grant_wishes


class Arbiter:
    """Decides for one node. `now` is monotonic, in seconds, and of the same clock throughout."""

    def __init__(self, budget: int, *, rules: Rules | None = None) -> None:
        self._ledger = Ledger(budget)
        self._rules = rules or Rules()
        self._planner = Planner(self._ledger)
        self._reclaimer = Reclaimer(self._ledger, self._planner, self._rules)
        self._tickets = Tickets()
        self._drain_gate = DrainGate(self._rules, self._ledger)
        self._holders: dict[LeaseId, ResidentKey] = {}
        self._measured: dict[ResidentKey, int] = {}
        self._is_stopping = False
        self._last = LastingDecision()

    # Requests.

    def ask(self, ask: Ask, now: float) -> tuple[LeaseId, ArbiterOutcome]:
        """Put a request at the end of the queue. The number that is returned is granted or
        refused exactly once, in this outcome or a later one."""
        ticket = queue.LoadTicket(LeaseId(self._planner.number()), self._learnt(ask), now, now)
        self._tickets.enter(ticket)
        is_behind = self._is_behind(ticket, now)
        return ticket.lease, ArbiterOutcome() if is_behind else self.settle(now)

    def withdraw(self, lease: LeaseId, now: float) -> ArbiterOutcome:
        """Cancel a request: take it out of the queue, or release the lease it was just granted."""
        ticket = self._tickets.get(lease)
        if ticket is None:
            return self.release(lease, now) if lease in self._holders else self.settle(now)
        is_behind = self._is_behind(ticket, now)
        self._tickets.withdraw(ticket, now, self._rules)
        return ArbiterOutcome() if is_behind else self.settle(now)

    def decline(self, ask: Ask, now: float) -> tuple[errors.DeadlineExceeded, ArbiterOutcome]:
        """Make the error for a request without time for a load, which begins for its next try."""
        ticket = queue.LoadTicket(LeaseId(self._planner.number()), self._learnt(ask), now, now)
        self._tickets.wish(ticket, now, self._rules)
        outcome = self.settle(now)
        return queue.late(ticket, self._view(now)), outcome

    def retain(self, lease: LeaseId, now: float) -> LeaseId:
        """Add a lease to a resident that is leased already, past the queue. Raises NotFound when
        `lease` is not held."""
        resident = self._ledger.get(self._holder(lease))
        another = LeaseId(self._planner.number())
        self._ledger.put(resident.leased({another: resident.leases[lease]}, now))
        self._holders[another] = resident.key
        return another

    def release(self, lease: LeaseId, now: float) -> ArbiterOutcome:
        """Give a lease back. Raises NotFound when it is not held."""
        return self.settle(now) if self.write_release(lease, now) else ArbiterOutcome()

    def write_release(self, lease: LeaseId, now: float) -> bool:
        """Write a release down without a decision; True = `settle`, as something may follow from
        it, now or later. Raises NotFound when the lease is not held."""
        resident = self._ledger.get(self._holder(lease))
        del self._holders[lease]
        self._ledger.put(resident.released(lease, now))
        is_quiet = self._is_calm and not self._tickets.wished
        return not (is_quiet and self._drain_gate.are_open and self._reclaimer.is_idle)

    def preload(self, ask: Ask, now: float) -> tuple[bool, ArbiterOutcome]:
        """Load a model without a request; False = not now. That needs nominal pressure, no
        request in the queue and free bytes; a role that yields needs spare bytes, so that its
        load makes no pressure. A model that is loaded is kept warm from now."""
        resident = self._ledger.find(ask.key)
        if resident is not None:
            if not resident.is_open:
                return resident.state is State.LOADING, ArbiterOutcome()
            self._ledger.put(replace(resident, last_used_mono=now))
            return True, self.settle(now)
        ask = self._learnt(ask)
        others = sum(one.role.name == ask.role.name for one in self._ledger.residents)
        has_place = ask.role.places is None or others < ask.role.places
        room = self._ledger.spare_bytes if ask.role.yields else self._ledger.free_bytes
        if not (self._is_calm and has_place and 0 < ask.estimate_bytes <= room):
            return False, self.settle(now)
        plan = replace(self._planner.load(ask, queue.LoadNow(), now), is_preload=True)
        return True, self._settle(DraftOutcome(plans=[plan]), now)

    def keep_warm(self, key: ResidentKey, until_mono: float) -> None:
        """Keep a resident warm until then at least; one that is not there is ignored."""
        if (resident := self._ledger.find(key)) is not None:
            until_mono = max(until_mono, resident.kept_warm_mono)
            self._ledger.put(replace(resident, kept_warm_mono=until_mono))

    def renew_warmth(self, ask: Ask, now: float) -> ArbiterOutcome:
        """Give a resident the warmth of an ask; one that is not there is ignored."""
        if (resident := self._ledger.find(ask.key)) is not None:
            self._ledger.put(replace(resident, warmth=ask.warmth))
        return self.settle(now)

    def unload(self, key: ResidentKey, now: float) -> ArbiterOutcome:
        """Evict a resident on request. Raises NotFound, and Conflict when it is in use or
        loading."""
        resident = self._ledger.get(key)
        if resident.is_leaving:
            return self.settle(now)
        if not resident.is_idle:
            used = f"{len(resident.leases)} leases" if resident.leases else resident.state.value
            raise errors.Conflict(f"{key} cannot be unloaded now: {used}; release it first")
        answer = DraftOutcome(plans=[self._planner.eviction((resident,), Reason.RELEASE)])
        return self._settle(answer, now)

    def stop(self, now: float) -> ArbiterOutcome:
        """Refuse all requests, waiting and new. Leases stay; see `clear`."""
        self._is_stopping = True
        return self.settle(now)

    def clear(self, now: float) -> ArbiterOutcome:
        """Plan the end of every idle resident; nothing is left when all leases were released."""
        idle = tuple(one for one in self._ledger.residents if one.is_idle)
        plans = [self._planner.eviction(idle, Reason.SHUTDOWN)] if idle else []
        return self._settle(DraftOutcome(plans=plans), now)

    def lend(self, key: ResidentKey, priority: RequestPriority, now: float) -> LeaseId | None:
        """Lease a loaded resident at once, past the queue. None = it is not loaded, drains for
        another request, or the node stops."""
        resident = self._ledger.find(key)
        if resident is None or resident.state is not State.READY or self._is_stopping:
            return None
        lease = LeaseId(self._planner.number())
        self._ledger.put(resident.leased({lease: priority}, now))
        self._holders[lease] = key
        return lease

    def would_grant(self, ask: Ask, now: float) -> bool:
        """Whether a request would be served in its turn, without waiting for others to drain."""
        return deepcopy(self).rehearse(ask, now)

    def rehearse(self, ask: Ask, now: float) -> bool:
        """Put the question of `would_grant` by asking. Changes the state: for a copy only."""
        lease, outcome = self.ask(ask, now)
        ticket = self._tickets.get(lease)
        if ticket is not None and not ticket.is_stuck:
            self._tickets.go_first(lease)
            outcome = self.settle(now)
        is_refused = any(one.lease == lease for one in outcome.refusals)
        return not is_refused and (ticket is None or not ticket.is_stuck)

    def outline(self) -> Arbiter:
        """A copy in which one request, and one lease of a resident, stands for all alike."""
        parts = (self._tickets, self._ledger)
        return deepcopy(self, {id(one): one.outline() for one in parts})

    def may_grow(self, name: str, size: int) -> bool:
        """Reserve spare bytes for a tenant; False = no request may wait, and there must be
        enough. Raises NotFound."""
        if size < 0:
            raise errors.InvalidArgument(f"{name!r} cannot grow by {size} bytes; 0 or more is due")
        if not self._is_calm or size > self._ledger.spare_bytes:
            return False
        self._ledger.grow(name, size)
        return True

    def grown(self, name: str, now: float) -> ArbiterOutcome:
        """End a tenant's reservation."""
        self._ledger.grown(name)
        return self.settle(now)

    # Facts.

    def observe(
        self,
        level: PressureLevel,
        available_bytes: int | None,
        now: float,
        spare_bytes: int | None = None,
        is_partial: bool = False,
    ) -> ArbiterOutcome:
        """Take a reading of the machine's memory. `spare_bytes` may be taken while the machine
        stays calm; negative = so many bytes have to come back; None = not known. `is_partial`: the
        machine did not tell all, and fewer bytes may be available. A reading that repeats the last
        one counts too: low pressure that lasts evicts one thing after the other."""
        self._reclaimer.press(level, None if spare_bytes is None else max(0, -spare_bytes))
        self._ledger.observe(available_bytes, spare_bytes, is_partial=is_partial)
        return self.settle(now)

    def report(self, tenant: Tenant) -> None:
        """Note the bytes of a tenant. They count from the next event on."""
        self._ledger.report(tenant)

    def hold(
        self, holder: str, size: int, now: float, *, unfilled_bytes: int = 0
    ) -> ArbiterOutcome:
        """Note the bytes that another process occupies; 0 = none. `unfilled_bytes` of them are
        lent and not used yet."""
        self._ledger.hold(holder, size, unfilled_bytes)
        return self.settle(now)

    def set_budget(self, budget: int, now: float) -> ArbiterOutcome:
        """Change the budget. When more is committed, idle residents are evicted."""
        self._ledger.budget_bytes = budget
        return self.settle(now)

    def forget(self, name: str, now: float) -> ArbiterOutcome:
        """Remove a tenant."""
        self._ledger.forget(name)
        return self.settle(now)

    def measure(
        self, key: ResidentKey, size: int, now: float, *, unfilled_bytes: int = 0
    ) -> ArbiterOutcome:
        """Note the bytes that a resident occupies; they are the estimate of its next load, too."""
        self._ledger.measured(self._ledger.get(key), size, unfilled_bytes)
        self._measured[key] = size
        return self.settle(now)

    def unlearn(self, key: ResidentKey) -> None:
        """Forget the measured size of a model that will not be loaded again."""
        if self._ledger.find(key) is None:
            self._measured.pop(key, None)

    # Plans under way.

    def begin_load(self, plan: Plan, now: float) -> tuple[bool, ArbiterOutcome]:
        """Begin a planned load, now that its evictions and shrinks are done. False = do not
        load. Either the room is a tenant's, which has it now; or no request waits for the model,
        pressure came up, or more is committed than the budget holds: then its requests wait for
        another plan."""
        self._planner.fit(partial(self._tickets.urgency, now=now, rules=self._rules))
        resident = self._planner.begin(plan)
        if resident is None:
            return False, self.settle(now)
        is_refused = self._reclaimer.level is PressureLevel.CRITICAL and resident.role.yields
        is_wanted = plan.is_preload or self._tickets.wants(resident.key)
        if is_wanted and not is_refused and not self._is_stopping:
            if resident.role.is_room:
                return False, self._room_made(resident, now)
            return True, self.settle(now)
        self._ledger.put(resident.moved(State.ABSENT))
        return False, self.settle(now)

    def loaded(
        self, key: ResidentKey, size: int | None, now: float, *, unfilled_bytes: int = 0
    ) -> ArbiterOutcome:
        """Note a load that succeeded; `size` is the measured bytes, None = not measured. All
        requests that wait for the model get their leases now, before requests that wait for its
        room: models that take turns are then not loaded once for each request. Under critical
        pressure a role that yields is still refused."""
        resident, answer = self._ledger.get(key), DraftOutcome()
        if size is not None:
            resident = self._ledger.measured(resident, size, unfilled_bytes)
            self._measured[key] = size
        resident = replace(resident.moved(State.READY), loaded_mono=now, last_used_mono=now)
        self._ledger.put(resident)
        is_refused = self._reclaimer.level is PressureLevel.CRITICAL and resident.role.yields
        if is_refused:
            for ticket in self._tickets.of(key):
                self._refuse(ticket, queue.critical(ticket.ask, self._rules), answer)
        elif timely := [one for one in self._tickets.of(key) if now < one.ask.deadline_mono]:
            self._lend(timely, answer, now)
        return self._settle(answer, now)

    def load_failed(
        self, key: ResidentKey, error: Callable[[], errors.KakeyaError], now: float
    ) -> ArbiterOutcome:
        """Note a load that failed and refuse its requests. The next request tries again."""
        self._ledger.put(self._ledger.get(key).moved(State.ABSENT))
        answer = DraftOutcome()
        for ticket in self._tickets.of(key):
            self._refuse(ticket, error(), answer)
        return self._settle(answer, now)

    def unloaded(self, key: ResidentKey, now: float) -> ArbiterOutcome:
        """Note that a resident was unloaded and its bytes are free."""
        self._ledger.gone(self._ledger.get(key))
        return self.settle(now)

    def shrunk(self, shrink: ShrinkTenant, tenant: Tenant, now: float) -> ArbiterOutcome:
        """Note the end of a shrink, and the bytes that the tenant holds after it."""
        self._ledger.shrunk(shrink, tenant)
        return self.settle(now)

    # Queries.

    def find(self, key: ResidentKey) -> Resident | None:
        """The resident of a key; None = absent."""
        return self._ledger.find(key)

    def place_of(self, key: ResidentKey, now: float) -> int | None:
        """The place of a model in the line for memory, from 1; None = no request waits for it, or
        it loads. Models are counted and not requests: a load serves all that wait for it."""
        loading = {one.key for one in self._ledger.residents if one.state is State.LOADING}
        line = [one for one in self._tickets.keys_in_order(now, self._rules) if one not in loading]
        return line.index(key) + 1 if key in line else None

    @property
    def is_short(self) -> bool:
        """Whether the machine is under pressure, or requests wait."""
        return self._reclaimer.level is not PressureLevel.NOMINAL or not self._tickets.is_empty

    def snapshot(self) -> Snapshot:
        """The whole ledger at this moment."""
        tickets = self._tickets
        return self._ledger.snapshot(self._reclaimer.level, tickets.wanted, tickets.kept)

    def check_integrity(self) -> None:
        """Check what holds of the ledger between any two events. Raises InvariantBroken."""
        self._ledger.check_integrity()

    def next_wake_mono(self, now: float) -> float | None:
        """The next time at which a decision changes without an event; None = none."""
        is_known = self._last.lasts(self._ledger, now)
        wake_mono = self._last.wake_mono if is_known else self._wake_mono(now)
        wake_mono = min(wake_mono, self._tickets.next_deadline_mono(now))
        return None if wake_mono == math.inf else wake_mono

    def _wake_mono(self, now: float) -> float:
        """The next wake, but for deadlines; infinite = none."""
        due = [*self._tickets.due(now, self._rules), *self._drain_gate.due()]
        due += self._reclaimer.due()
        if self._tickets:
            for one in self._ledger.residents:
                due += (turn_end_mono(one, self._rules), decay_mono(one, now))
        return min((at for at in due if at > now), default=math.inf)

    # Decisions.

    def settle(self, now: float) -> ArbiterOutcome:
        """Decide again, for the time that has passed."""
        return self._settle(DraftOutcome(), now)

    def _settle(self, answer: DraftOutcome, now: float) -> ArbiterOutcome:
        changes, opened = self._ledger.changes, self._drain_gate.to_open(now)
        self._planner.fit(partial(self._tickets.urgency, now=now, rules=self._rules))
        self._walk(answer, opened, now)
        grant_wishes(self._tickets, self._planner, answer, self._view(now))
        self._reclaimer.take(answer, now)
        outcome = answer.done()
        self._last = LastingDecision()
        if outcome == ArbiterOutcome() and self._ledger.changes == changes and not opened:
            self._last = LastingDecision(changes, self._wake_mono(now))
        return outcome

    def _is_behind(self, ticket: queue.LoadTicket, now: float) -> bool:
        """Whether nothing follows from a request that comes or goes now."""
        return self._last.lasts(self._ledger, now) and self._tickets.is_behind(ticket, now)

    def _walk(self, answer: DraftOutcome, opened: frozenset[ResidentKey], now: float) -> None:
        ahead = queue.EarlierClaims(opened)
        self._tickets.lapse(now)
        for ticket in self._tickets.walk(now, self._rules, ahead.keys):
            if ticket.kept_until_mono is None:
                self._serve(ticket, ahead, answer, now)
            elif (kept := queue.keep(ticket, ahead, self._view(now))) is not None:
                ahead.add(ticket.ask, kept)
        self._drain_gate.walked(ahead.claims, opened, now)

    def _serve(
        self, ticket: queue.LoadTicket, ahead: queue.EarlierClaims, answer: DraftOutcome, now: float
    ) -> None:
        match verdict := queue.decide(ticket, ahead, self._view(now)):
            case queue.Lend():
                self._lend((ticket,), answer, now)
            case queue.LoadNow():
                answer.plans.append(self._planner.load(ticket.ask, verdict, now))
            case queue.Refuse(error, keeps):
                self._refuse(ticket, error, answer)
                if isinstance(error, errors.ModelLoading) or now >= ticket.ask.deadline_mono:
                    self._tickets.wish(ticket, now, self._rules)
                if isinstance(error, errors.DrainTimeout):
                    self._tickets.keep(ticket, now + self._rules.place_s)
                if keeps is not None:
                    ahead.add(ticket.ask, keeps)
            case queue.NotYet():
                ahead.add(ticket.ask, verdict)

    def _view(self, now: float) -> queue.QueueView:
        return queue.QueueView(
            self._ledger, self._reclaimer.level, self._rules, now, self._is_stopping
        )

    def _lend(self, tickets: Sequence[queue.LoadTicket], answer: DraftOutcome, now: float) -> None:
        """Lease a resident to requests that wait for it."""
        ask = tickets[-1].ask
        leases = {one.lease: one.ask.priority for one in tickets}
        resident = self._ledger.get(ask.key).leased(leases, now)
        self._ledger.put(replace(resident, warmth=ask.warmth))
        for lease in leases:
            self._holders[lease] = ask.key
            self._tickets.remove(lease)
            answer.grants.append(Grant(lease, ask.key))

    def _refuse(
        self, ticket: queue.LoadTicket, error: errors.KakeyaError, answer: DraftOutcome
    ) -> None:
        self._tickets.remove(ticket.lease)
        answer.refusals.append(Refusal(ticket.lease, error, ticket.ask.key))

    def _room_made(self, resident: Resident, now: float) -> ArbiterOutcome:
        """Reserve the free bytes for the tenant. Its first request is granted, without a lease."""
        key, answer = resident.key, DraftOutcome()
        ticket = self._tickets.of(key)[0]
        self._ledger.put(resident.moved(State.ABSENT))
        try:
            self._ledger.grow(key.model_key, resident.bytes)
        except errors.NotFound as gone:
            self._refuse(ticket, gone, answer)
        else:
            self._tickets.remove(ticket.lease)
            answer.grants.append(Grant(ticket.lease, key))
        return self._settle(answer, now)

    @property
    def _is_calm(self) -> bool:
        is_nominal = self._reclaimer.level is PressureLevel.NOMINAL
        return is_nominal and self._tickets.is_empty and not self._is_stopping

    def _learnt(self, ask: Ask) -> Ask:
        size = self._measured.get(ask.key, ask.estimate_bytes)
        return ask if size == ask.estimate_bytes else replace(ask, estimate_bytes=size)

    def _holder(self, lease: LeaseId) -> ResidentKey:
        key = self._holders.get(lease)
        if key is None:
            raise errors.NotFound(f"lease {lease} is not held; it was released, or never granted")
        return key
