"""The laws of the book of leases, whatever is asked, dies or is lost in between."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kakeya.core import errors
from kakeya.core.units import MIB
from kakeya.memory.arbiter.resident import RequestPriority
from kakeya.memory.leases import rules
from kakeya.memory.leases.lease import (
    Book,
    Granter,
    LeaseDenial,
    LeaseState,
    Process,
    ProcessLease,
    Wish,
    in_order,
)
from kakeya.memory.leases.rules import EXPIRE_S, MachineSight
from tests.laws import laws_of

BOOT = "boot-1"
BUDGET = 1000 * MIB
NAMES = ("gpu:0", "gpu:1", "gpu:2", "gpu:10", "disk")
NODE = Process(1, "0", BOOT)


def process(pid: int) -> Process:
    return Process(pid, str(pid), BOOT)


def sight(now: float = 0.0, *, boot: str = BOOT, **living: bool) -> MachineSight:
    return MachineSight(boot=boot, now_mono=now, living=living)


def asked(
    book: Book,
    lease_id: str,
    size: int = 100 * MIB,
    *resources: str,
    at: float = 0.0,
    priority: RequestPriority = RequestPriority.NORMAL,
) -> Book:
    wish = Wish(
        name=lease_id, size_bytes=size, priority=priority, resources=tuple(in_order(resources))
    )
    return rules.ask(book, wish, lease_id, process(book.next_number + 100), sight(at))[0]


def alone(book: Book, now: float = 0.0, available: int | None = None, **living: bool) -> Book:
    return rules.settle_alone(
        book, sight(now, **living), budget_bytes=BUDGET, available_bytes=available
    )


def states(book: Book) -> dict[str, str]:
    return {key: one.state.value for key, one in book.leases.items()}


def test_resources_have_one_order_with_numbers_as_numbers() -> None:
    assert in_order(["gpu:10", "gpu:2", "disk", "gpu:2"]) == ["disk", "gpu:2", "gpu:10"]


@given(st.lists(st.text("ab019:-", min_size=1, max_size=6), max_size=8))
def test_the_order_of_resources_does_not_depend_on_how_they_were_named(names: list[str]) -> None:
    assert in_order(names) == in_order(reversed(names))
    assert all(in_order([a, b]) == [a, b] for a, b in pairwise(in_order(names)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"size_bytes": 0}, "0 bytes"),
        ({"size_bytes": 1 << 60}, "can be asked"),
        ({"name": ""}, "lease name"),
        ({"name": "two\nlines"}, "lease name"),
        ({"name": "x" * 65}, "lease name"),
        ({"resources": ("GPU",)}, "'GPU'"),
        ({"resources": ("memory",)}, "in MB"),
        ({"resources": ("gpu:1", "gpu:0")}, "order"),
        ({"resources": tuple(f"gpu:{n}" for n in range(33))}, "33 resources"),
    ],
)
def test_a_wish_that_cannot_be_meant_is_refused_with_its_value(
    fields: dict[str, object], says: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=says):
        Wish(**({"name": "job", "size_bytes": MIB} | fields))


def test_what_fits_is_granted_and_what_never_fits_is_refused_in_words() -> None:
    book = alone(asked(asked(Book(), "a"), "b", 2000 * MIB))
    assert states(book) == {"a": "granted", "b": "refused"}
    no = book.leases["b"].no
    assert no is not None
    assert no.code == "memory_refused"
    assert "2.0 GiB" in no.message
    assert "1000.0 MiB" in no.message


def test_who_waits_is_told_for_what_and_from_whom() -> None:
    book = alone(asked(asked(Book(), "big", 800 * MIB, "gpu:0"), "next", 300 * MIB))
    book = alone(asked(book, "third", 1 * MIB, "gpu:0"), 1.0, big=True, next=True, third=True)
    assert "big (pid 101) holds 800.0 MiB" in book.leases["next"].note
    assert book.leases["third"].note == "gpu:0, which big (pid 101) has"


def test_nobody_overtakes_the_first_who_waits_for_memory() -> None:
    book = alone(asked(Book(), "holder", 600 * MIB))
    book = asked(asked(book, "big", 500 * MIB), "small", 10 * MIB)
    book = alone(book, 1.0)
    assert states(book) == {"holder": "granted", "big": "waiting", "small": "waiting"}
    book = alone(book.without("holder"), 2.0)
    assert states(book) == {"big": "granted", "small": "granted"}


def test_a_more_urgent_one_goes_first_until_the_other_has_waited_long() -> None:
    book = alone(asked(Book(), "holder", 1000 * MIB))
    book = asked(book, "batch", 1000 * MIB, priority=RequestPriority.BATCH)
    early = asked(book, "urgent", 1000 * MIB, at=1.0, priority=RequestPriority.URGENT)
    assert states(alone(early.without("holder"), 1.0))["urgent"] == "granted"
    late = asked(book, "urgent", 1000 * MIB, at=100.0, priority=RequestPriority.URGENT)
    settled = alone(late.without("holder"), 100.0, batch=True, urgent=True)
    assert states(settled)["batch"] == "granted"


def test_what_the_machine_lacks_is_not_granted_although_the_budget_has_it() -> None:
    book = alone(asked(Book(), "a", 100 * MIB), available=50 * MIB)
    assert states(book) == {"a": "waiting"}
    assert states(alone(book, available=100 * MIB)) == {"a": "granted"}


def test_what_a_holder_has_not_used_yet_is_not_lent_twice() -> None:
    book = alone(asked(Book(), "a", 400 * MIB), available=500 * MIB)
    book = alone(asked(book, "b", 200 * MIB), available=500 * MIB, a=True)
    assert states(book)["b"] == "waiting"
    grown, _ = rules.beat(
        book, book.leases["a"], 1.0, processes=(process(101),), used_bytes=400 * MIB
    )
    assert states(alone(grown, available=200 * MIB, a=True))["b"] == "granted"


def test_a_refusal_gives_back_what_was_taken() -> None:
    book = alone(asked(asked(Book(), "a", 100 * MIB, "gpu:0", "gpu:1"), "b", MIB, "gpu:1"))
    held = rules.take_resources(asked(Book(), "c", MIB, "gpu:0", "gpu:1"))
    assert held.leases["c"].taken == ("gpu:0", "gpu:1")
    refused = rules.refuse(held, "c", LeaseDenial(code="memory_refused", message="no"))
    assert refused.leases["c"].taken == ()
    freed = alone(book.without("a"))
    assert freed.leases["b"].taken == ("gpu:1",)


def test_death_release_and_refusal_come_too_late_for_nothing() -> None:
    book = alone(asked(Book(), "a"))
    assert rules.grant(book, "gone", 1.0) is book
    assert rules.grant(book, "a", 1.0) is book
    assert rules.refuse(book, "a", LeaseDenial(code="x", message="x")) is book
    assert rules.note(book, "a", "x") is book
    assert book.without("gone") is book


def test_memory_is_granted_last() -> None:
    book = rules.take_resources(asked(asked(Book(), "a", MIB, "gpu:0"), "b", MIB, "gpu:0"))
    with pytest.raises(errors.InvariantBroken, match="granted last"):
        rules.grant(book, "b", 0.0)


def test_a_holder_that_is_seen_to_live_is_never_taken_for_dead() -> None:
    book = alone(asked(Book(), "a"))
    after, dead = rules.expire(book, sight(1e9, a=True))
    assert (after, dead) == (book, ())


def test_a_holder_that_is_seen_to_be_gone_is_out_at_once() -> None:
    book = alone(asked(Book(), "a", MIB, "gpu:0"))
    after, dead = rules.expire(book, sight(0.0, a=False))
    assert [one.lease_id for one in dead] == ["a"]
    assert after.leases == {}


def test_a_holder_that_cannot_be_seen_is_believed_for_six_beats() -> None:
    book = alone(asked(Book(), "a"))
    assert rules.expire(book, sight(EXPIRE_S))[1] == ()
    assert len(rules.expire(book, sight(EXPIRE_S + 0.1))[1]) == 1


def test_stamps_of_another_boot_mean_nothing() -> None:
    book = alone(asked(Book(), "a", at=1e6))
    book = rules.become_granter(book, "n", NODE, BUDGET, MachineSight(boot=BOOT, now_mono=1e6))
    book = rules.begin_drain(book, sight(), 7, 0.0)
    after, dead = rules.expire(book, sight(3.0, boot="boot-2", a=True))
    assert len(dead) == 1
    assert after.granter is None
    assert after.drain is None
    assert after.budget_bytes == BUDGET


def test_while_a_node_grants_nobody_else_does_and_a_node_that_hangs_still_does() -> None:
    seen = MachineSight(boot=BOOT, now_mono=0.0, granter_lives=True)
    book = rules.become_granter(asked(Book(), "a"), "n", NODE, BUDGET, seen)
    late = replace(seen, now_mono=1e6, living={"a": True})
    kept = rules.settle_alone(book, late, budget_bytes=BUDGET, available_bytes=None)
    assert states(kept) == {"a": "waiting"}
    gone = replace(late, granter_lives=False)
    after = rules.settle_alone(book, gone, budget_bytes=BUDGET, available_bytes=None)
    assert states(after) == {"a": "granted"}


def test_a_granter_that_cannot_be_seen_owes_beats_from_the_first_lease_on() -> None:
    seen = MachineSight(boot=BOOT, now_mono=0.0)
    book = rules.become_granter(Book(), "n", NODE, BUDGET, seen)
    assert rules.has_granter(book, sight(1e6))
    book = asked(book, "a", at=1e6)
    assert rules.has_granter(book, sight(1e6 + EXPIRE_S))
    assert not rules.has_granter(book, sight(1e6 + EXPIRE_S + 1))


def test_of_two_nodes_one_grants_until_it_is_gone() -> None:
    other = Process(2, "0", BOOT)
    seen = MachineSight(boot=BOOT, now_mono=0.0, granter_lives=True)
    book = rules.become_granter(Book(), "first", NODE, BUDGET, seen)
    assert rules.become_granter(book, "second", other, 1, seen) is book
    assert rules.leave_granter(book, other) is book
    free = rules.leave_granter(book, NODE)
    assert free.budget_bytes == BUDGET
    after = rules.become_granter(free, "second", other, 1, replace(seen, granter_lives=None))
    assert after.granter == Granter(node_id="second", process=other, boot=BOOT, beat_mono=0.0)


def test_a_lease_that_the_book_lost_is_written_down_again_by_its_holder() -> None:
    lease = alone(asked(asked(Book(), "x"), "a", 100 * MIB, "gpu:0")).leases["a"]
    book, again = rules.beat(Book(), lease, 9.0, processes=lease.processes, used_bytes=5)
    assert again == replace(lease, beat_mono=9.0, used_bytes=5)
    assert book.leases["a"] == again
    assert book.next_number == 3


def test_a_drain_refuses_who_waits_and_who_asks_and_leaves_holders_alone() -> None:
    book = asked(alone(asked(Book(), "holder")), "waits", 2000 * MIB)
    book = rules.begin_drain(book, sight(), 77, 0.0)
    assert states(book) == {"holder": "granted", "waits": "refused"}
    with pytest.raises(errors.LeaseRefused, match="pid 77"):
        asked(book, "late")
    assert "late" in asked(rules.end_drain(book), "late").leases


class LeaseMachine(RuleBasedStateMachine):
    """Any order of asking, dying, granting and losing the store."""

    @initialize()
    def begin(self) -> None:
        self.book = Book()
        self.now = 0.0
        self.asked: set[str] = set()
        self.gone: set[str] = set()
        self.dead: set[str] = set()

    def sight(self) -> MachineSight:
        living = {key: key not in self.dead for key in self.book.leases}
        return MachineSight(boot=BOOT, now_mono=self.now, living=living)

    def settle(self) -> None:
        self.book = rules.settle_alone(
            self.book, self.sight(), budget_bytes=BUDGET, available_bytes=None
        )
        self.gone |= self.dead

    @rule(
        size=st.integers(1, 1000),
        resources=st.sets(st.sampled_from(NAMES), max_size=3),
        priority=st.sampled_from(RequestPriority),
    )
    def ask(self, size: int, resources: set[str], priority: RequestPriority) -> None:
        lease_id = f"l{len(self.asked)}"
        self.asked.add(lease_id)
        self.book = asked(
            self.book, lease_id, size * MIB, *resources, at=self.now, priority=priority
        )

    @rule()
    def settle_line(self) -> None:
        self.settle()

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take_by_a_node(self) -> None:
        self.book = rules.take_resources(self.book)

    @precondition(lambda self: self.book.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.book.leases)))
        self.gone.add(lease_id)
        self.book = self.book.without(lease_id)

    @precondition(lambda self: self.book.leases)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.dead.add(data.draw(st.sampled_from(sorted(self.book.leases))))

    @precondition(lambda self: self.book.of(LeaseState.WAITING))
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        waiting = [one.lease_id for one in self.book.of(LeaseState.WAITING)]
        lease_id = data.draw(st.sampled_from(waiting))
        self.book = rules.refuse(
            self.book, lease_id, LeaseDenial(code="memory_refused", message="no")
        )

    @precondition(lambda self: self.book.leases)
    @rule(data=st.data())
    def holder_beats(self, data: st.DataObject) -> None:
        lease = self.book.leases[data.draw(st.sampled_from(sorted(self.book.leases)))]
        self.book, _ = rules.beat(
            self.book, lease, self.now, processes=lease.processes, used_bytes=0
        )

    @invariant()
    def each_resource_has_one_holder(self) -> None:
        taken = [name for one in self.book.leases.values() for name in one.taken]
        assert len(taken) == len(set(taken))

    @invariant()
    def resources_are_taken_in_order(self) -> None:
        for one in self.book.leases.values():
            assert one.taken == one.wish.resources[: len(one.taken)]
            assert one.state is not LeaseState.GRANTED or not one.missing

    @invariant()
    def no_more_is_granted_than_the_budget_has(self) -> None:
        assert sum(one.held_bytes for one in self.book.leases.values()) <= BUDGET

    @invariant()
    def no_lease_is_lost(self) -> None:
        assert self.asked - set(self.book.leases) <= self.gone

    @invariant()
    def places_in_the_line_are_unique(self) -> None:
        numbers = [one.number for one in self.book.leases.values()]
        assert len(numbers) == len(set(numbers))
        assert all(number < self.book.next_number for number in numbers)

    def teardown(self) -> None:
        """Whoever waits is served once the others have ended: there is no deadlock."""
        if not hasattr(self, "book"):
            return
        waiting = len(self.book.of(LeaseState.WAITING))
        for _ in range(waiting + 1):
            self.settle()
            granted: tuple[ProcessLease, ...] = self.book.of(LeaseState.GRANTED)
            left = self.book.of(LeaseState.WAITING)
            assert granted or not left, f"nobody is served, yet these wait: {left}"
            self.book = self.book.without(*(one.lease_id for one in granted))
        assert not self.book.of(LeaseState.WAITING)


TestLeaseMachine = laws_of(LeaseMachine, cases=150, part=3, steps=30)
