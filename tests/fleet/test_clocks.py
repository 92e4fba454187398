"""Clocks that are wrong, jump, stand still: liveness goes by age (RELIABILITY rows 9 to 12, 15)."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from kakeya.fleet.cards.cards import DEFAULT_TTL_S, Card, CardFault
from kakeya.fleet.view.skew import Skews
from tests.fleet.nodes import NOW, make_wire
from tests.fleet.talk import INTERVAL_S, Party, Town, ToyTrust, exchange, make_party
from tests.laws import seeds

SKEWS_S = (1.0, -1.0, 30.0, -30.0, 119.0, -119.0, 3600.0, -3600.0)
SEEDS = seeds(20, first=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_for_an_hour_no_skew_hides_the_living_or_raises_the_dead(seed: int) -> None:
    """Row 9: five nodes, four of them with wrong clocks; one is killed after a while."""
    rng = random.Random(seed)
    skews = [0.0, *rng.sample(SKEWS_S, 4)]
    town = Town([make_party(f"n{i}", skew_s=s) for i, s in enumerate(skews)], seed, loss=0.1)
    town.run(60)
    everybody = set(town.parties)
    for party in town.up():
        assert party.sees(town.t) == everybody, skews
    dead = town.parties[rng.choice(sorted(town.parties))]
    killed_at = town.t + rng.uniform(100, 1500)
    living = everybody - {dead.name}
    gone_from: set[str] = set()

    def look() -> None:
        if town.t >= killed_at:
            dead.is_up = False
        for party in town.up():
            seen = party.sees(town.t)
            assert living <= seen, (skews, party.name, town.t)
            if dead.name not in seen:
                assert not dead.is_up
                gone_from.add(party.name)
            else:
                assert party.name not in gone_from, "the dead came back"
                assert town.t < killed_at + DEFAULT_TTL_S + INTERVAL_S

    town.run(3600 - 60, look)
    assert gone_from == living


def test_the_skew_of_every_peer_is_known_to_a_second_and_the_wrong_clock_blames_itself() -> None:
    """Row 9: static skew is reported; half of the peers disagreeing is one's own fault."""
    skews = {"a": 0.0, "b": 1.0, "c": -2.0, "wrong": 119.0}
    town = Town([make_party(name, skew_s=s) for name, s in skews.items()], seed=1)
    town.run(120)
    for party in town.up():
        found = party.sync.skews.by_peer(party.times(town.t)["mono"])
        for name, skew_s in found.items():
            assert skew_s == pytest.approx(skews[name] - party.skew_s, abs=1.0)
        assert len(found) == 3
        blamed = party.sync.skews.is_own_fault(party.times(town.t)["mono"])
        assert blamed is (party.name == "wrong")


def test_the_time_that_an_answer_takes_is_no_skew() -> None:
    skews = Skews()
    skews.note("a", sent_at=NOW + 1.0, now=NOW + 2.0, rtt_s=2.0, mono=0.0)
    assert skews.by_peer(0.0) == {"a": 0.0}
    assert skews.by_peer(3601.0) == {}
    assert skews.own(3601.0) is None


def _set_clock(town: Town, name: str, skew_s: float) -> None:
    town.parties[name].skew_s = skew_s


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_costs_nobody_a_round(jump_s: float, seed: int) -> None:
    """Rows 10 and 11: an hour back, an hour ahead; later repaired."""
    town = Town([make_party(f"n{i}") for i in range(4)], seed)
    town.run(60)
    everybody = set(town.parties)

    def look() -> None:
        for party in town.up():
            assert party.sees(town.t) == everybody

    _set_clock(town, "n1", jump_s)
    town.run(300, look)
    _set_clock(town, "n1", 0.0)
    town.run(300, look)


def test_a_node_that_stamps_by_its_clock_alone_is_gone_two_minutes_after_the_jump() -> None:
    """The control of row 10: a plain node, its clock set back by an hour after a minute."""
    watcher = make_party("watcher")
    seen = {}
    for t in range(0, 400, 10):
        at = NOW + t - (3600.0 if t > 60 else 0.0)
        watcher.registry.begin_round(**watcher.times(t))
        watcher.registry.merge([make_wire("plain", at=at, is_plain=True)], **watcher.times(t))
        seen[t] = "plain" in watcher.sees(t)
    assert {t for t, is_seen in seen.items() if is_seen} == set(range(0, 60 + 120 + 1, 10))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clock_that_was_a_year_ahead_is_forgiven_within_two_rounds(seed: int) -> None:
    """Row 11: nobody takes such a stamp; after the repair the node is back in two rounds."""
    town = Town([make_party(f"n{i}") for i in range(4)], seed)
    town.run(60)
    others = set(town.parties) - {"n1"}
    _set_clock(town, "n1", 3.2e7)
    party = town.parties["n1"]
    party.registry.restamp(**party.times(town.t))

    def look() -> None:
        for watcher in town.up():
            assert others - {watcher.name} <= watcher.sees(town.t)

    town.run(300, look)
    _set_clock(town, "n1", 0.0)
    town.run(2 * INTERVAL_S * 1.1, look)
    for watcher in town.up():
        assert "n1" in watcher.sees(town.t)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_started_a_year_ahead_is_there_within_two_rounds_of_the_repair(
    seed: int,
) -> None:
    """Row 11: all its stamps, and the one that it saved, are of next year."""
    town = Town([make_party(f"n{i}") for i in range(3)], seed)
    late = make_party("late", skew_s=3.2e7, seed=seed)
    town.parties["late"] = late
    heapq.heappush(town._due, (0.5, "late"))
    others = set(town.parties) - {"late"}
    town.run(300)
    for watcher in town.up():
        assert watcher.sees(town.t) - {"late"} == others
        assert watcher is late or "late" not in watcher.sees(town.t)
    _set_clock(town, "late", 0.0)
    town.run(2 * INTERVAL_S * 1.1)
    for party in town.up():
        assert party.sees(town.t) == {*others, "late"}


def test_what_was_refused_by_a_clock_that_was_wrong_is_looked_at_again_after_its_repair() -> None:
    """By a clock a year ahead, every certificate has run out."""

    class Dated(ToyTrust):
        def fault_of(self, card: Card, now: float) -> CardFault | None:
            return CardFault.UNSIGNED if now > NOW + 1e7 else super().fault_of(card, now)

    ahead = make_party("ahead", trust=Dated("ahead"), skew_s=3.2e7)
    other = make_party("other", trust=ToyTrust("other"))
    for t in (1.0, 11.0):
        exchange(other, ahead, t)
    assert ahead.sees(11.0) == {"ahead"}
    ahead.skew_s = 0.0
    for t in (21.0, 31.0):
        exchange(other, ahead, t)
    assert ahead.sees(31.0) == other.sees(31.0) == {"ahead", "other"}


def _sleep(party: Party, town: Town, seconds: float) -> None:
    """The machine sleeps: its monotonic clock stands still, its wall clock goes on."""
    party.is_up = False
    town.run(seconds)
    party.is_up = True
    party.asleep_s += seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_after_half_an_hour_of_sleep_nothing_old_is_trusted(seed: int) -> None:
    """Row 12: everybody is suspect at once; the view is whole and trusted within two rounds."""
    town = Town([make_party(f"n{i}") for i in range(5)], seed)
    town.run(60)
    sleeper = town.parties["n2"]
    _sleep(sleeper, town, 1800)
    for party in town.up():
        assert ("n2" in party.sees(town.t)) is (party is sleeper)
    start = sleeper.registry.begin_round(**sleeper.times(town.t))
    assert start.slept_s == pytest.approx(1800, abs=2 * INTERVAL_S)
    assert start.gone == ()
    assert sleeper.registry.suspects() == set(town.parties) - {"n2"}
    town.run(2.2 * INTERVAL_S)
    everybody = set(town.parties)
    assert sleeper.sees(town.t) == everybody
    assert sleeper.registry.suspects() == frozenset()
    assert all("n2" in party.sees(town.t) for party in town.up())


def test_a_machine_that_slept_tells_nobody_of_nodes_that_it_has_not_heard_since() -> None:
    dead, alive, sleeper, new = (make_party(name) for name in ("dead", "alive", "sleeper", "new"))
    for other in (dead, alive):
        exchange(sleeper, other, 0.0)
    sleeper.registry.begin_round(**sleeper.times(1.0))
    sleeper.asleep_s += 1800.0
    sleeper.registry.begin_round(**sleeper.times(1801.0))
    assert sleeper.sees(1801.0) == {"dead", "alive", "sleeper"}
    exchange(sleeper, new, 1802.0)
    assert new.sees(1802.0) == {"new", "sleeper"}
    exchange(sleeper, alive, 1803.0)
    exchange(sleeper, new, 1804.0)
    assert new.sees(1804.0) == {"new", "sleeper", "alive"}


def test_a_clock_that_is_set_is_taken_for_sleep_and_forgiven_by_the_next_beats() -> None:
    a, b = make_party("a"), make_party("b")
    exchange(a, b, 0.0)
    a.registry.begin_round(**a.times(10.0))
    a.skew_s = 900.0
    assert a.registry.begin_round(**a.times(20.0)).slept_s == pytest.approx(900.0)
    assert a.registry.suspects() == {"b"}
    exchange(a, b, 21.0)
    assert a.registry.suspects() == frozenset()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_without_its_state_and_with_a_late_clock_is_seen_within_two_rounds(
    seed: int,
) -> None:
    """Row 15: state deleted, clock an hour back, restarted."""
    town = Town([make_party(f"n{i}", incarnation=7) for i in range(4)], seed)
    town.run(100)
    old = town.parties["n0"]
    new = make_party("n0", t=town.t, skew_s=-3600.0, incarnation=1, seed=seed)
    town.parties["n0"] = replace(new)
    town.run(2 * INTERVAL_S * 1.1)
    for party in town.up():
        card = party.registry.get("n0", mono=party.times(town.t)["mono"])
        assert card is not None
        assert card.life == new.registry.own.life != old.registry.own.life
    assert new.registry.incarnation > 7
    assert new.registry.conflicts(NOW + town.t) == ()


def test_the_stamp_that_was_saved_orders_the_next_life_above_the_last() -> None:
    a = make_party("a")
    a.registry.restamp(now=NOW + 500, mono=10.0)
    memory = a.registry.memory(now=NOW, mono=10.0)
    assert memory.stamp == NOW + 500
    late = make_party("a", skew_s=-3600, memory=memory)
    assert late.registry.own.announced_at > NOW + 500
    assert late.registry.incarnation == memory.incarnation + 1
    assert make_party("a", memory=replace(memory, stamp=NOW + 9e9)).registry.own.announced_at == NOW
