"""RouteBook: its laws, whatever happens in whatever order, and the pace of its probes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Endpoint
from kakeya.fleet.paths.endpoints import (
    MAX_PER_NODE,
    MAX_REPROBE_S,
    REPROBE_S,
    WATCH_S,
    EdgeState,
    RouteBook,
    RouteChange,
)
from tests.laws import law

NODE = NodeId("peer")
CABLE = Endpoint("169.254.1.2:50051", "thunderbolt", 10)
LAN = Endpoint("10.0.0.2:50051", "lan", 20)
VPN = Endpoint("100.64.0.2:50051", "tailscale", 30)
WAYS = (VPN, CABLE, LAN)
BY_ADDRESS = {way.address: way for way in WAYS}


@dataclass
class World:
    """Links that are up or down, and a prober that asks the book what to try each second."""

    up: set[str] = field(default_factory=lambda: set(BY_ADDRESS))
    book: RouteBook = field(default_factory=RouteBook)
    mono: float = 1000.0
    changes: list[RouteChange] = field(default_factory=list)
    probes: list[tuple[float, str]] = field(default_factory=list)
    rtt_ms: dict[str, float] = field(default_factory=dict)

    def second(self) -> None:
        self.mono += 1.0
        for node_id, address in self.book.due(self.mono, 16):
            self.probes.append((self.mono, address))
            if address in self.up:
                change = self.book.worked(
                    node_id, address, rtt_ms=self.rtt_ms.get(address, 1.0), mono=self.mono
                )
                if change is not None:
                    self.changes.append(change)
            else:
                self.book.failed(address, node_id=node_id, mono=self.mono)

    def seconds(self, count: float) -> None:
        for _ in range(int(count)):
            self.second()


def world(*ways: Endpoint) -> World:
    made = World(up={way.address for way in ways or WAYS})
    made.book.learn(NODE, ways or WAYS)
    return made


def check_choice(book: RouteBook) -> None:
    """The chosen way is of the best state there is, and the best kind of network in it."""
    chosen = book.address(NODE)
    state = book.state(NODE, chosen)
    states = {address: book.state(NODE, address) for address in BY_ADDRESS}
    assert state is min(states.values())
    rivals = [BY_ADDRESS[a].priority for a in BY_ADDRESS if states[a] is state]
    assert BY_ADDRESS[chosen].priority == min(rivals)


steps = st.lists(
    st.tuples(st.sampled_from(sorted(BY_ADDRESS)), st.booleans(), st.floats(0.01, 50)),
    max_size=60,
)


@given(steps)
@law(1200)
def test_a_failed_way_is_never_chosen_while_another_works(
    happened: list[tuple[str, bool, float]],
) -> None:
    book = RouteBook()
    book.learn(NODE, WAYS)
    for at, (address, works, rtt_ms) in enumerate(happened):
        if works:
            book.worked(NODE, address, rtt_ms=rtt_ms, mono=float(at))
        else:
            book.failed(address, mono=float(at))
        check_choice(book)


links = st.lists(st.tuples(st.sampled_from(sorted(BY_ADDRESS)), st.integers(1, 40)), max_size=15)


@given(links)
@settings(max_examples=150, deadline=None)
def test_after_any_outages_the_best_link_is_back_within_one_period(
    outages: list[tuple[str, int]],
) -> None:
    here = world()
    here.seconds(2)
    for address, seconds in outages:
        here.up ^= {address}
        here.seconds(seconds)
        check_choice(here.book)
    here.up = set(BY_ADDRESS)
    here.seconds(REPROBE_S + 1)
    assert here.book.address(NODE) == CABLE.address
    assert not here.book.routes()[0].is_downgraded


@given(links)
@settings(max_examples=150, deadline=None)
def test_changes_are_told_once_and_follow_each_other(outages: list[tuple[str, int]]) -> None:
    here = world()
    for address, seconds in outages:
        here.up ^= {address}
        here.seconds(seconds)
    for earlier, later in itertools.pairwise(here.changes):
        assert later.before == earlier.after
    for change in here.changes:
        assert change.before != change.after
        assert change.is_downgrade == (change.after.priority > change.before.priority)


def test_a_pulled_cable_is_a_downgrade_told_once_and_taken_back_once() -> None:
    here = world()
    here.seconds(3)
    assert here.book.address(NODE) == CABLE.address
    here.up.discard(CABLE.address)
    here.seconds(WATCH_S + 1)
    assert here.book.address(NODE) == LAN.address
    (route,) = here.book.routes()
    assert (route.network, route.best, route.is_downgraded) == ("lan", "thunderbolt", True)
    here.seconds(300)
    assert [(c.before, c.after, c.is_downgrade) for c in here.changes] == [(CABLE, LAN, True)]
    here.up.add(CABLE.address)
    here.seconds(REPROBE_S + 1)
    assert here.book.address(NODE) == CABLE.address
    assert [c.is_downgrade for c in here.changes] == [True, False]


def test_a_node_that_is_busy_on_every_way_is_no_downgrade() -> None:
    here = world()
    here.seconds(3)
    here.up.clear()
    here.seconds(30)
    here.up = set(BY_ADDRESS)
    here.seconds(REPROBE_S + 1)
    assert here.book.address(NODE) == CABLE.address
    assert here.changes == []


def test_a_way_that_never_worked_is_no_downgrade_and_is_tried_ever_more_seldom() -> None:
    here = world()
    here.up.discard(CABLE.address)
    here.seconds(3600)
    assert here.changes == []
    assert not here.book.routes()[0].is_downgraded
    tries = [at for at, address in here.probes if address == CABLE.address]
    assert len(tries) < 3600 / MAX_REPROBE_S + 10
    assert max(b - a for a, b in itertools.pairwise(tries)) <= MAX_REPROBE_S + 1


def test_a_better_way_is_probed_before_it_is_used() -> None:
    here = world(LAN, VPN)
    here.seconds(2)
    here.book.learn(NODE, (CABLE, LAN, VPN))
    here.up.add(CABLE.address)
    assert here.book.address(NODE) == LAN.address
    here.seconds(1)
    assert here.book.address(NODE) == CABLE.address
    assert [c.is_downgrade for c in here.changes] == [False]


def test_round_trips_decide_within_one_kind_by_a_clear_margin() -> None:
    other = Endpoint("10.0.0.3:50051", "lan", 20)
    here = world(LAN, other)
    here.rtt_ms = {LAN.address: 1.0, other.address: 0.9}
    here.seconds(2)
    first = here.book.address(NODE)
    for _ in range(60):
        here.rtt_ms = {LAN.address: here.rtt_ms[other.address], other.address: 0.95}
        here.second()
    assert here.book.address(NODE) == first
    slow = {LAN.address: 30.0, other.address: 30.0, first: 90.0}
    here.rtt_ms = slow
    here.seconds(180)
    assert here.book.address(NODE) != first


def test_a_way_that_the_card_names_no_more_is_forgotten() -> None:
    here = world()
    here.seconds(3)
    here.book.learn(NODE, (LAN, VPN))
    assert here.book.address(NODE) == LAN.address
    here.seconds(5)
    assert here.changes == []
    here.book.learn(NODE, (LAN,))
    assert here.book.address(NODE) == ""
    assert len(here.book) == 0


def test_endpoints_without_a_priority_come_last() -> None:
    here = world(Endpoint("10.0.0.9:1"), VPN)
    here.seconds(3)
    assert here.book.address(NODE) == VPN.address


def test_one_node_cannot_keep_the_others_from_being_probed() -> None:
    book = RouteBook()
    for number in range(10):
        mine = tuple(Endpoint(f"10.1.{number}.{n}:1", "lan", 20) for n in range(8))
        book.learn(NodeId(f"n{number}"), mine)
    asked = book.due(0.0, 16)
    assert len(asked) == 16
    assert max([node for node, _ in asked].count(n) for n, _ in asked) <= MAX_PER_NODE
    book.keep_only(())
    assert len(book) == 0


def test_a_failure_counts_for_every_node_that_claims_the_address() -> None:
    book = RouteBook()
    for name in ("one", "two"):
        book.learn(NodeId(name), (CABLE, LAN))
        book.worked(NodeId(name), CABLE.address, rtt_ms=1, mono=1)
        book.worked(NodeId(name), LAN.address, rtt_ms=1, mono=1)
    book.failed(CABLE.address, mono=2)
    assert {route.address for route in book.routes()} == {LAN.address}
    book.failed(LAN.address, mono=3, node_id=NodeId("one"))
    assert book.state(NodeId("two"), LAN.address) is EdgeState.WORKS


@pytest.mark.parametrize("event", ["worked", "failed"])
def test_news_of_unknown_ways_changes_nothing(event: str) -> None:
    book = RouteBook()
    if event == "worked":
        assert book.worked(NODE, "10.0.0.1:1", rtt_ms=1, mono=1) is None
    else:
        book.failed("10.0.0.1:1", mono=1)
    assert book.routes() == ()


def test_what_a_card_tells_of_its_round_trips_counts_until_they_are_measured() -> None:
    book = RouteBook()
    one, other = Endpoint("10.0.0.2:1", "lan", 20, 5.0), Endpoint("10.0.1.2:1", "lan", 20, 0.5)
    book.learn(NODE, [one, other])
    assert book.address(NODE) == other.address
    book.worked(NODE, other.address, rtt_ms=9.0, mono=1.0)
    book.worked(NODE, one.address, rtt_ms=1.0, mono=1.0)
    assert book.address(NODE) == one.address
    book.learn(NODE, [one._replace(rtt_ms=100.0), other._replace(rtt_ms=0.25)])
    assert book.address(NODE) == one.address
    assert book.routes()[0].rtt_ms == 1.0
