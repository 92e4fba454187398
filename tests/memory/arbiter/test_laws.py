"""Laws of the arbiter, whatever is asked in whatever order, and plans carried out late or badly.

- all that is committed lies within the budget, unless others or measurement brought it above: not
  when a tenant gives up less than it offered, and never by loads that have not begun
- nothing leased is in an eviction plan, nor comes to be leased while it is
- a load serves all that wait for it at once, and what was just loaded does not go for age alone
- what a plan frees and what it says is short reach what it was asked
- residents only go the ways of the table
- every request is granted or refused, once; requests for one model in the order they came
- what is foreseen comes true: who would be granted is not refused, who would not be is not served
- a tenant grows into room that nobody needs, is counted once, and reserved bytes come back
- a tenant that waits for room gets it as a request does, and takes it from nobody who is at work
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kakeya.core import errors
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.plan import FOREVER, ArbiterOutcome, Ask, Plan, Reason, ResidentEviction
from kakeya.memory.arbiter.policy import (
    PressureLevel,
    Rules,
    Rung,
    Tenant,
    turn_end_mono,
    yields_to,
)
from kakeya.memory.arbiter.queue import LoadTicket
from kakeya.memory.arbiter.resident import (
    ROOM,
    TRANSITIONS,
    LeaseId,
    RequestPriority,
    Resident,
    ResidentKey,
    Role,
    State,
    Warmth,
)
from kakeya.memory.arbiter.tickets import Tickets
from tests.laws import laws_of
from tests.memory.worlds import MANY, ROLE_OF, World, ask

BUDGET = 100
MODELS: dict[str, tuple[str | Role, int]] = {
    "see:a": ("vision", 30),
    "see:b": ("vision", 45),
    "draw:a": ("vision", 60),
    "draft:a": ("drafter", 20),
    "hear:a": ("asr", 25),
    "text:a": ("text-target", 40),
    "text:b": ("text-target", 55),
    "any:a": (MANY, 35),
    "any:b": (MANY, 35),
    "huge:a": (MANY, 101),
}
WARMTHS = (Warmth(), Warmth(stay_warm_s=60), Warmth(stay_warm_s=5, unload_after_s=20))


def _reachable(state: State) -> set[State]:
    found = {state}
    while True:
        more = {after for one in found for after in TRANSITIONS[one]} - found
        if not more:
            return found
        found |= more


class ArbiterMachine(RuleBasedStateMachine):
    """Plans are carried out step by step, in order, between other events."""

    leases = Bundle("leases")
    arbiter_type = Arbiter

    def __init__(self) -> None:
        super().__init__()
        self.arbiter = self.arbiter_type(BUDGET)
        self.now = 0.0
        self.asks: dict[LeaseId, Ask] = {}
        self.waiting: set[LeaseId] = set()
        self.held: set[LeaseId] = set()
        self.todo: list[Plan] = []
        self.loading: list[ResidentKey] = []
        self.leaving: set[ResidentKey] = set()
        self.granted: list[LeaseId] = []
        self.may_be_over = False
        self.is_settled = True
        """Whether an event came after the tenant's last report, which takes effect with one."""
        self.tenant = Tenant(name="pages", rung=Rung.PAGES, held_bytes=0)
        self.arbiter.report(self.tenant)

    # What is done with an outcome.

    def take(self, outcome: ArbiterOutcome) -> None:
        self.is_settled = True
        for grant in outcome.grants:
            assert grant.lease in self.waiting, "granted once, to somebody who waits"
            assert grant.key == self.asks[grant.lease].key
            self.waiting.remove(grant.lease)
            self.granted.append(grant.lease)
            if grant.key.capability == ROOM.name:
                self.room_made(grant.lease)
            else:
                self.held.add(grant.lease)
        for refusal in outcome.refusals:
            assert refusal.lease in self.waiting, "refused once, and only who waits"
            assert str(refusal.error).strip()
            self.waiting.remove(refusal.lease)
        for plan in outcome.plans:
            self._check(plan)
            self.todo.append(plan)

    def is_surely_within(self) -> bool:
        """Whether it is within the budget even if the tenant gives nothing of what it was told."""
        snapshot = self.arbiter.snapshot()
        return snapshot.committed_bytes + snapshot.promised_bytes <= BUDGET

    def room_made(self, lease: LeaseId) -> None:
        """The tenant grows by what it was granted, which stays counted once."""
        before = self.arbiter.snapshot().committed_bytes
        size = self.asks[lease].estimate_bytes
        self.tenant = replace(self.tenant, held_bytes=self.tenant.held_bytes + size)
        self.arbiter.report(self.tenant)
        assert self.arbiter.snapshot().committed_bytes == before

    def _check(self, plan: Plan) -> None:
        freed = sum(one.bytes for one in plan.evict) + sum(one.bytes for one in plan.shrink)
        assert freed + plan.short_bytes >= plan.asked_bytes
        for eviction in plan.evict:
            assert eviction.key not in self.leaving, "evicted once"
            resident = self.arbiter.find(eviction.key)
            assert resident is not None
            assert not resident.leases
            assert not resident.warmth.is_pinned
            if eviction.reason in ("pressure", "fit"):
                assert resident.role.yields
            self.leaving.add(eviction.key)
            assert self._may_leave_its_turn(resident, plan)
        if plan.load is not None and not self.may_be_over:
            assert self.arbiter.snapshot().committed_bytes <= BUDGET

    def _may_leave_its_turn(self, one: Resident, plan: Plan) -> bool:
        """Age alone takes no room from a model that was just loaded; another one of its role, for
        which there is one place, may."""
        is_its_turn = plan.load is not None and self.now < turn_end_mono(one, Rules())
        if plan.is_preload or not is_its_turn or one.role.places is not None:
            return True
        wishes = [self.asks[lease] for lease in self.waiting]
        return any(
            wish.key == plan.load and yields_to(one, wish.priority.rank, self.now)
            for wish in wishes
        )

    # Events.

    @rule(
        target=leases,
        name=st.sampled_from(sorted(MODELS)),
        priority=st.sampled_from(list(RequestPriority)),
        warmth=st.sampled_from(WARMTHS),
        patience=st.sampled_from([2.0, 30.0, FOREVER]),
        may_displace_text=st.booleans(),
    )
    def ask(
        self,
        name: str,
        priority: RequestPriority,
        warmth: Warmth,
        patience: float,
        may_displace_text: bool,
    ) -> LeaseId:
        role, size = MODELS[name]
        wish = ask(
            name,
            role,
            size,
            priority=priority,
            warmth=warmth,
            deadline=self.now + patience,
            may_displace_text=may_displace_text,
        )
        lease, outcome = self.arbiter.ask(wish, self.now)
        self.asks[lease] = wish
        self.waiting.add(lease)
        self.take(outcome)
        return lease

    @rule(lease=consumes(leases))
    def leave(self, lease: LeaseId) -> None:
        """Release what is held, withdraw what waits."""
        if lease in self.held:
            self.held.remove(lease)
            self.check_release(lease)
            self.take(self.arbiter.release(lease, self.now))
        else:
            self.waiting.discard(lease)
            self.take(self.arbiter.withdraw(lease, self.now))

    def check_release(self, lease: LeaseId) -> None:
        """Where nothing is said to follow from a release, nothing does."""
        rehearsed = deepcopy(self.arbiter)
        if not rehearsed.write_release(lease, self.now):
            before = rehearsed.snapshot()
            assert rehearsed.settle(self.now) == ArbiterOutcome()
            assert rehearsed.snapshot() == before
            assert rehearsed.next_wake_mono(self.now) is None

    @rule(target=leases, lease=leases)
    def retain(self, lease: LeaseId) -> LeaseId | object:
        if lease not in self.held:
            return multiple()
        another = self.arbiter.retain(lease, self.now)
        self.asks[another] = self.asks[lease]
        self.held.add(another)
        return another

    @rule(name=st.sampled_from(sorted(MODELS)))
    def preload(self, name: str) -> None:
        role, size = MODELS[name]
        _, outcome = self.arbiter.preload(ask(name, role, size), self.now)
        assert not [one for plan in outcome.plans for one in plan.evict if plan.is_preload]
        self.take(outcome)

    @rule(target=leases, name=st.sampled_from(sorted(MODELS)))
    def lend(self, name: str) -> LeaseId | object:
        """Take what is there without waiting: never what is claimed or leaves."""
        role, size = MODELS[name]
        wish = ask(name, role, size)
        resident = self.arbiter.find(wish.key)
        lease = self.arbiter.lend(wish.key, RequestPriority.BATCH, self.now)
        if lease is None:
            return multiple()
        assert resident is not None
        assert resident.state is State.READY
        self.asks[lease] = wish
        self.held.add(lease)
        return lease

    @rule(target=leases, name=st.sampled_from(sorted(MODELS)))
    def foresee(self, name: str) -> LeaseId:
        """Ask whether it would be granted, then ask."""
        role, size = MODELS[name]
        wish = ask(name, role, size)
        before = self.arbiter.snapshot()
        is_foreseen = self.arbiter.would_grant(wish, self.now)
        assert self.arbiter.snapshot() == before, "it changed something"
        lease, outcome = self.arbiter.ask(wish, self.now)
        self.asks[lease] = wish
        self.waiting.add(lease)
        refused = {one.lease for one in outcome.refusals}
        served = {one.lease for one in outcome.grants}
        loaded = {plan.load for plan in outcome.plans}
        assert not is_foreseen or lease not in refused
        assert is_foreseen or (lease not in served and wish.key not in loaded)
        self.take(outcome)
        return lease

    @rule(size=st.integers(0, 40), part=st.sampled_from([0.0, 0.5, 1.0]))
    def tenant_grows(self, size: int, part: float) -> None:
        before = self.arbiter.snapshot()
        if not self.arbiter.may_grow("pages", size):
            assert self.arbiter.snapshot() == before
            return
        assert size <= before.free_bytes
        assert not before.waiting
        assert self.arbiter.snapshot().committed_bytes == before.committed_bytes + size
        grown = int(size * part)
        self.tenant = replace(self.tenant, held_bytes=self.tenant.held_bytes + grown)
        self.arbiter.report(self.tenant)
        assert self.arbiter.snapshot().committed_bytes == before.committed_bytes + size
        self.take(self.arbiter.grown("pages", self.now))

    @rule(target=leases, patience=st.sampled_from([2.0, 30.0, FOREVER]))
    def tenant_waits_for_room(self, patience: float) -> LeaseId:
        """What idles goes for it in its turn; nobody who uses a model is kept from it.

        Who waits for a model may have others drained once the room is gone that it waited for.
        """
        before = self.arbiter.snapshot()
        used = {one.key: one.state for one in before.residents if one.leases and not before.waiting}
        wish = ask("room:pages", ROOM, 12, deadline=self.now + patience, may_displace_text=True)
        lease, outcome = self.arbiter.ask(wish, self.now)
        self.asks[lease] = wish
        self.waiting.add(lease)
        self.take(outcome)
        for one in self.arbiter.snapshot().residents:
            assert one.key not in used or one.state in (used[one.key], State.READY)
        return lease

    @rule()
    def tenant_leaves(self) -> None:
        """And another of its name comes."""
        self.take(self.arbiter.forget("pages", self.now))
        assert not self.arbiter.snapshot().tenants
        self.tenant = Tenant(name="pages", rung=Rung.PAGES, held_bytes=0)
        self.arbiter.report(self.tenant)

    @rule(seconds=st.floats(0.1, 30))
    def time_goes_by(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.arbiter.next_wake_mono(self.now)) is not None and due <= end:
            assert due > self.now
            self.now = due
            self.take(self.arbiter.settle(self.now))
        self.now = end

    @rule(
        level=st.sampled_from(list(PressureLevel)),
        available=st.sampled_from([None, 10, 50, 500]),
        spare=st.sampled_from([None, None, -40, -5, 0, 30]),
    )
    def observe(self, level: PressureLevel, available: int | None, spare: int | None) -> None:
        self.take(self.arbiter.observe(level, available, self.now, spare_bytes=spare))

    @rule(size=st.integers(0, 60))
    def others_hold(self, size: int) -> None:
        self.may_be_over = True
        self.take(self.arbiter.hold("training", size, self.now))
        self.may_be_over = not self.is_surely_within()

    @rule(held=st.integers(0, 30), spare=st.integers(0, 30))
    def tenant_reports(self, held: int, spare: int) -> None:
        if self.arbiter.snapshot().free_bytes >= held:
            self.tenant = Tenant(
                name="pages", rung=Rung.PAGES, held_bytes=held, spare_bytes=min(held, spare)
            )
            self.arbiter.report(self.tenant)
            self.may_be_over, self.is_settled = True, False

    @rule(gives=st.sampled_from([1.0, 1.0, 0.5]))
    def carry_out(self, gives: float) -> None:
        """Make the next plan's room, and begin its load."""
        if not self.todo:
            return
        plan = self.todo.pop(0)
        for shrink in plan.shrink:
            given = min(int(shrink.bytes * gives), self.tenant.spare_bytes)
            self.tenant = Tenant(
                name="pages",
                rung=Rung.PAGES,
                held_bytes=self.tenant.held_bytes - given,
                spare_bytes=self.tenant.spare_bytes - given,
            )
            self.take(self.arbiter.shrunk(shrink, self.tenant, self.now))
        for eviction in plan.evict:
            self.leaving.remove(eviction.key)
            self.take(self.arbiter.unloaded(eviction.key, self.now))
        goes_on, outcome = self.arbiter.begin_load(plan, self.now)
        if goes_on:
            assert plan.load is not None
            self.loading.append(plan.load)
        self.take(outcome)

    @rule(fails=st.sampled_from([False, False, True]), more=st.sampled_from([None, 0, -5, 5]))
    def end_load(self, fails: bool, more: int | None) -> None:
        if not self.loading:
            return
        key = self.loading.pop(0)
        if fails:
            error = errors.LoadFailed("broken file")
            self.take(self.arbiter.load_failed(key, lambda: error, self.now))
            return
        resident = self.arbiter.find(key)
        assert resident is not None
        size = None if more is None else max(0, resident.bytes + more)
        self.may_be_over = self.may_be_over or (more or 0) > 0
        is_critical = self.arbiter.snapshot().level is PressureLevel.CRITICAL
        waited = [lease for lease in self.waiting if self.asks[lease].key == key]
        self.take(self.arbiter.loaded(key, size, self.now))
        assert is_critical or not self.waiting.intersection(waited), "one load serves all of them"

    @rule()
    def catch_up(self) -> None:
        """Carry out all plans, and load all that they load."""
        for _ in range(20):
            if not self.todo and not self.loading:
                return
            self.carry_out(1.0)
            self.end_load(False, None)

    @rule(
        target=leases,
        names=st.lists(st.sampled_from(sorted(MODELS)), min_size=2, max_size=5),
        priority=st.sampled_from(list(RequestPriority)),
    )
    def crowd(self, names: list[str], priority: RequestPriority) -> object:
        """Several ask, and are served as far as that goes."""
        asked = [self.ask(name, priority, WARMTHS[1], FOREVER, False) for name in names]
        self.catch_up()
        return multiple(*asked)

    # What always holds.

    @invariant()
    def the_ledger_adds_up(self) -> None:
        self.arbiter.check_integrity()

    @invariant()
    def the_budget_holds(self) -> None:
        snapshot = self.arbiter.snapshot()
        if self.is_surely_within() and not self.todo:
            self.may_be_over = False
        assert self.may_be_over or snapshot.committed_bytes <= BUDGET

    @invariant()
    def nothing_is_reserved_above_the_budget(self) -> None:
        snapshot = self.arbiter.snapshot()
        if self.is_settled and snapshot.committed_bytes > BUDGET:
            reserved = {one.key for one in snapshot.residents if one.state is State.LOADING}
            assert reserved <= set(self.loading)

    @invariant()
    def what_is_leased_is_there_and_does_not_leave(self) -> None:
        leased = {lease for one in self.arbiter.snapshot().residents for lease in one.leases}
        assert leased == self.held
        for one in self.arbiter.snapshot().residents:
            assert one.is_leaving == (one.key in self.leaving)
            if one.leases:
                assert one.state in (State.READY, State.DRAINING)
                assert not one.is_leaving
            assert one.state in _reachable(State.ABSENT)

    @invariant()
    def roles_with_one_place_have_one(self) -> None:
        there: dict[str, int] = {}
        for one in self.arbiter.snapshot().residents:
            if not one.is_leaving and one.role.places is not None:
                there[one.role.name] = there.get(one.role.name, 0) + 1
        assert all(count <= ROLE_OF[name].places for name, count in there.items())  # type: ignore[operator]

    @invariant()
    def one_model_is_lent_in_the_order_it_was_asked_for(self) -> None:
        for kind in {(self.asks[lease].key, self.asks[lease].priority) for lease in self.granted}:
            same = [
                lease
                for lease in self.granted
                if (self.asks[lease].key, self.asks[lease].priority) == kind
            ]
            assert all(a < b for a, b in pairwise(same))

    @invariant()
    def nobody_waits_for_what_is_free(self) -> None:
        assert len(self.arbiter.snapshot().waiting) == len(self.waiting)
        if self.waiting:
            assert self.arbiter.next_wake_mono(self.now) is not None or self.todo or self.loading

    def teardown(self) -> None:
        """When others let go, nobody is left waiting."""
        self.take(self.arbiter.hold("training", 0, self.now))
        self.take(self.arbiter.observe(PressureLevel.NOMINAL, None, self.now))
        for _ in range(400):
            if not self.waiting and not self.todo and not self.loading:
                break
            for lease in sorted(self.held):
                self.held.remove(lease)
                self.take(self.arbiter.release(lease, self.now))
            self.carry_out(1.0)
            self.end_load(False, None)
            self.time_goes_by(1.0)
        assert not self.waiting, "a waiter was lost"


def test_what_is_foreseen_looks_at_who_waits_already() -> None:
    """A model that is there, and is claimed by who came before, is not lent; under critical
    pressure who asks for it is refused."""
    for priority, patience in ((RequestPriority.HIGH, 2.0), (RequestPriority.URGENT, FOREVER)):
        state = ArbiterMachine()
        state.crowd(names=["any:a", "draft:a"], priority=priority)
        state.ask("text:b", RequestPriority.URGENT, Warmth(), patience, False)
        if priority is RequestPriority.URGENT:
            state.time_goes_by(seconds=9.0)  # it counts as more urgent by now
        claimed = state.arbiter.find(ResidentKey("draft", "a"))
        assert claimed is not None
        assert claimed.state is State.DRAINING
        state.observe(level=PressureLevel.CRITICAL, available=None, spare=None)
        state.foresee(name="draft:a")
        state.teardown()


@pytest.mark.parametrize("held", [0, 5, 9])
def test_a_tenant_that_has_less_than_it_was_told_to_give_grows_by_what_it_was_granted(
    held: int,
) -> None:
    """What it gave up meanwhile counts towards what it was told to give, and only once."""
    state = ArbiterMachine()
    state.tenant_reports(held=30, spare=30)
    state.ask("text:b", RequestPriority.NORMAL, Warmth(), FOREVER, False)
    state.ask("any:a", RequestPriority.NORMAL, Warmth(), FOREVER, False)
    assert [shrink.bytes for plan in state.todo for shrink in plan.shrink] == [20]
    state.tenant_waits_for_room(patience=FOREVER)
    state.tenant_reports(held=held, spare=held)
    state.the_budget_holds()
    state.catch_up()
    state.teardown()


TestArbiterLaws = laws_of(ArbiterMachine, cases=10_000, part=130)


def test_three_models_on_a_budget_for_two_serve_all_of_200_requests() -> None:
    """The pressure drill: none failed, none over budget, every eviction explained, and no wait
    longer than ageing and draining allow."""
    rng = random.Random(7)
    world = World.of(200)
    warm = Warmth(stay_warm_s=300)
    ends: list[tuple[float, LeaseId]] = []
    asked: dict[LeaseId, float] = {}
    longest = 0.0
    for _ in range(200):
        wish = ask(rng.choice("abc"), MANY, warmth=warm, priority=rng.choice(list(RequestPriority)))
        asked[world.ask(wish)] = world.now
        world.wait(rng.random())
        for lease in sorted(world.grants.keys() & asked.keys()):
            longest = max(longest, world.now - asked.pop(lease))
            ends.append((world.now + 3 * rng.random(), lease))
        for end in [one for one in sorted(ends) if one[0] <= world.now]:
            ends.remove(end)
            world.release(end[1])
        assert world.arbiter.snapshot().committed_bytes <= 200
    while asked or ends:
        world.wait(0.5)
        for lease in sorted(world.grants.keys() & asked.keys()):
            del asked[lease]
            ends.append((world.now + 1, lease))
        for end in [one for one in sorted(ends) if one[0] <= world.now]:
            ends.remove(end)
            world.release(end[1])
    assert not world.refusals
    assert len(world.grants) == 200
    assert longest < 40
    assert {reason for _, reason in world.gone} == {"fit"}


# Controls: an arbiter with a fault must be found by the machine.


class Robbed(Arbiter):
    """Forgets that loads under way have reserved bytes."""

    def _walk(self, answer: Any, opened: frozenset[ResidentKey], now: float) -> None:
        ledger = self._ledger
        hidden = {one.key: one for one in ledger.residents if one.state is State.LOADING}
        budget = ledger.budget_bytes
        ledger.budget_bytes += sum(one.bytes for one in hidden.values())
        super()._walk(answer, opened, now)
        ledger.budget_bytes = budget


class Forgetful(Arbiter):
    """Loses who waits when a lease is released."""

    def release(self, lease: LeaseId, now: float) -> ArbiterOutcome:
        for first in list(self._tickets._tickets)[:1]:
            self._tickets.remove(first)
        return super().release(lease, now)


class Yanking(Arbiter):
    """Lets pressure take what is in use."""

    def _settle(self, answer: Any, now: float) -> ArbiterOutcome:
        for one in self._ledger.residents:
            is_critical = self._reclaimer.level is PressureLevel.CRITICAL
            if is_critical and one.leases and one.role.yields:
                self._ledger.put(replace(one, state=State.DRAINING, is_leaving=True))
                eviction = ResidentEviction(key=one.key, reason=Reason.PRESSURE, bytes=one.bytes)
                answer.plans.append(Plan(plan_id=self._planner.number(), evict=(eviction,)))
        return super()._settle(answer, now)


class Backwards(Tickets):
    def of(self, key: ResidentKey) -> list[LoadTicket]:
        return super().of(key)[::-1]


class Unfair(Arbiter):
    """Serves the last who came first."""

    def __init__(self, budget: int, *, rules: Rules | None = None) -> None:
        super().__init__(budget, rules=rules)
        self._tickets = Backwards()


class Trusting(Arbiter):
    """Keeps room reserved that was promised, and not given."""

    def __init__(self, budget: int, *, rules: Rules | None = None) -> None:
        super().__init__(budget, rules=rules)
        self._planner.fit = lambda _: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "faulty",
    [
        Robbed,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (Forgetful, Yanking, Unfair, Trusting)
        ),
    ],
)
def test_the_machine_finds_a_fault(faulty: type[Arbiter]) -> None:
    class Machine(ArbiterMachine):
        arbiter_type = faulty

    found = settings(
        max_examples=400,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, errors.KakeyaError, KeyError)):
        run_state_machine_as_test(Machine, settings=found)
