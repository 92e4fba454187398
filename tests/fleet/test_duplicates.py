"""Two processes under one node id, as after a disk was copied (RELIABILITY row 13)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.cards.cards import CardFault
from kakeya.fleet.view.tombstones import RegistryState
from tests.fleet.nodes import NOW, make_wire
from tests.fleet.talk import INTERVAL_S, Party, Town, ToyTrust, card_of, exchange, make_party
from tests.laws import law, seeds


def _conflicts(party: Party, t: float) -> set[tuple[str, str, bool]]:
    found = party.registry.conflicts(party.times(t)["now"])
    return {(conflict.node_id, conflict.address, conflict.is_own) for conflict in found}


FIRST, SECOND = "10.0.0.1:1", "10.0.0.2:1"
NAMES = ("n0", "n1", "n2")


class Twins:
    """Three bystanders and a node that lives long; copies of its data directory start elsewhere.

    Each twin gives way as `DuplicateIdWatch` does: once its rival answers.
    """

    def __init__(self, seed: int, *, with_trust: bool = False, loss: float = 0.0) -> None:
        self.with_trust, self.seed = with_trust, seed
        self.first = self._party("twin", address=FIRST, incarnation=4)
        self.bystanders = [self._party(name) for name in NAMES]
        self.town = Town([self.first, *self.bystanders], seed, loss=loss)
        self.copies: list[Party] = []
        self.town.run(60)

    def _party(self, name: str, **options: Any) -> Party:
        return make_party(name, trust=ToyTrust(name) if self.with_trust else None, **options)

    def start(self, incarnation: int, skew_s: float = 0.0) -> Party:
        """Start a copy; its clock may be wrong."""
        copy = self._party(
            "twin",
            t=self.town.t,
            address=f"10.0.0.{2 + len(self.copies)}:1",
            incarnation=incarnation,
            seed=self.seed + len(self.copies),
            skew_s=skew_s,
        )
        self.copies.append(copy)
        self.town.add(copy, name=f"copy {len(self.copies)}")
        return copy

    def stop(self, party: Party, told: Collection[str] = NAMES) -> None:
        """End a process with a farewell, which only some bystanders hear."""
        push = party.sync.farewell(**party.times(self.town.t))
        for peer in self.bystanders:
            if peer.name in told:
                peer.sync.take(push, **peer.times(self.town.t), peer="twin")
        party.is_up = False

    def run(self, rounds: float, look: Callable[[], None] = lambda: None) -> None:
        """Let rounds pass."""

        def watch() -> None:
            look()
            for party in (self.first, *self.copies):
                if party.is_up and self._meets_an_earlier(party):
                    party.registry.give_way(**party.times(self.town.t))

        self.town.run(rounds * INTERVAL_S, watch)

    def _meets_an_earlier(self, party: Party) -> bool:
        found = party.registry.conflicts(party.times(self.town.t)["now"])
        rivals = {conflict.address for conflict in found if conflict.is_own and conflict.is_first}
        return any(
            rival.registry.own.grpc_address in rivals
            for rival in (self.first, *self.copies)
            if rival is not party and rival.is_up and not rival.registry.own.is_leaving
        )

    def held(self) -> list[str]:
        """Where each bystander sees the twin; "" = nowhere, or only its farewell."""
        cards = [card_of(party, "twin", self.town.t) for party in self.bystanders]
        return [card.grpc_address if card and not card.is_leaving else "" for card in cards]


@pytest.mark.parametrize("with_trust", [False, True])
@pytest.mark.parametrize("incarnation", [4, 5])
@pytest.mark.parametrize("seed", seeds(10, first=1))
def test_the_second_gives_way_within_rounds_and_both_learn_of_each_other(
    seed: int, incarnation: int, with_trust: bool
) -> None:
    """Incarnation 5 is a copy that counted its start, 4 one that did not."""
    twins = Twins(seed, with_trust=with_trust)
    copy = twins.start(incarnation)
    started, seen, times = twins.town.t, [twins.held()], [twins.town.t]
    gave_way_at: list[float] = []

    def look() -> None:
        seen.append(twins.held())
        times.append(twins.town.t)
        if copy.registry.own.is_leaving:
            gave_way_at.append(twins.town.t)

    twins.run(40, look)  # beyond a TTL after it gave way
    for addresses in zip(*seen, strict=True):
        # The copy's farewell may come before the original's next card.
        spans = zip(addresses, itertools.pairwise(times), strict=False)
        assert sum(end - begin for held, (begin, end) in spans if not held) <= INTERVAL_S
        held = [address for address in addresses if address]
        changes = [now for before, now in itertools.pairwise(held) if before != now]
        # A copy may take the other for an earlier life at first, and order itself above again.
        assert changes in ([], [SECOND, FIRST], [SECOND, FIRST] * 2)
    assert gave_way_at[0] - started <= 3 * INTERVAL_S * 1.1
    assert not twins.first.registry.own.is_leaving
    assert ("twin", SECOND, True) in _conflicts(twins.first, twins.town.t)
    assert ("twin", FIRST, True) in _conflicts(copy, twins.town.t)


@pytest.mark.parametrize("seed", seeds(10, first=1))
def test_two_that_could_not_meet_for_long_agree_on_the_one_that_started_first(seed: int) -> None:
    twins = Twins(seed)
    twins.town.run(0)
    copy = twins.start(50)
    copy.registry.own_card.started_mono -= 1000.0  # it lived so long beside the others
    twins.run(30)
    assert twins.held() == [FIRST] * 3
    assert copy.registry.own.is_leaving
    assert not twins.first.registry.own.is_leaving


@pytest.mark.parametrize("seed", seeds(10, first=1))
def test_of_two_that_start_together_one_serves(seed: int) -> None:
    twins = Twins(seed)
    twins.stop(twins.first)
    twins.run(5)
    one, two = twins.start(5), twins.start(6)
    twins.run(30)
    assert [one.registry.own.is_leaving, two.registry.own.is_leaving].count(True) == 1


@given(data=st.data())
@law(240, part=20)
def test_whatever_copies_do_the_original_is_seen_and_serves(data: st.DataObject) -> None:
    """Any starts, stops and kills of copies, any messages lost, any wrong clocks of copies."""
    twins = Twins(
        data.draw(st.integers(0, 2**16), "seed"),
        with_trust=data.draw(st.booleans(), "trust"),
        loss=data.draw(st.sampled_from([0.0, 0.3]), "loss"),
    )
    for _ in range(data.draw(st.integers(1, 3), "copies")):
        copy = twins.start(
            data.draw(st.sampled_from([3, 4, 5, 90]), "incarnation"),
            data.draw(st.sampled_from([0.0, -7200.0, 50.0, 7200.0]), "skew"),
        )
        twins.run(data.draw(st.sampled_from([0, 0.3, 1, 2, 5, 20]), "rounds"))
        match data.draw(st.sampled_from(["stop", "kill", "leave it"]), "end"):
            case "stop":
                twins.stop(copy, data.draw(st.sets(st.sampled_from(NAMES)), "told"))
            case "kill":
                copy.is_up = False
            case _:
                pass
        twins.run(data.draw(st.sampled_from([0, 1, 5, 20]), "rounds after it"))
    twins.run(15)
    assert twins.held() == [FIRST] * 3
    assert not twins.first.registry.own.is_leaving
    assert all(copy.registry.own.is_leaving for copy in twins.copies if copy.is_up)


@pytest.mark.parametrize("is_told", [True, False])
def test_the_end_of_a_copy_does_not_bury_an_original_that_heard_nothing_of_it(
    *, is_told: bool
) -> None:
    """The original orders below the copy for ever, and is seen again once the copy is gone."""
    party = make_party("me")
    one = make_party("twin", address=FIRST, incarnation=4)
    two = make_party("twin", t=20.0, address=SECOND, incarnation=5, seed=3)
    exchange(one, party, 10.0)
    exchange(two, party, 21.0)
    ask = one.sync.request(**one.times(22.0))  # the answer to it is lost
    party.sync.answer(ask, **party.times(22.0), peer="twin")
    end = 30.0 if is_told else 145.0
    if is_told:
        party.sync.take(two.sync.farewell(**two.times(23.0)), **party.times(23.0), peer="twin")
    party.registry.begin_round(**party.times(end))
    one.registry.beat(**one.times(end))
    one.sync._registry.own_card.jump_above = lambda *_, **__: False  # type: ignore[method-assign]
    exchange(one, party, end)
    exchange(one, party, end + 2)
    card = card_of(party, "twin", end + 2)
    assert card is not None
    assert (card.grpc_address, card.incarnation) == (FIRST, 4)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_restart_is_seen_at_once_and_is_no_conflict(*, is_told: bool) -> None:
    twins = Twins(1)
    memory = twins.first.registry.memory(**twins.first.times(twins.town.t))
    if is_told:
        twins.stop(twins.first)
    twins.first.is_up = False
    again = twins.start(memory.incarnation + 1)
    twins.run(2)
    assert twins.held() == [SECOND] * 3
    assert not again.registry.own.is_leaving
    twins.run(30)
    parties = [again, *twins.bystanders]
    assert [_conflicts(party, twins.town.t) for party in parties] == [set()] * 4


def test_one_directory_then_another_then_the_first_again() -> None:
    """Each first start counts from the clock, so the second one orders above the first's next."""
    twins = Twins(2)
    for incarnation in (1000, 5):
        twins.stop(twins.copies[-1] if twins.copies else twins.first)
        twins.run(3)
        twins.start(incarnation)
        twins.run(2)
        assert set(twins.held()) == {twins.copies[-1].registry.own.grpc_address}


def test_a_restart_at_another_address_is_no_conflict() -> None:
    a, b = make_party("a", address="10.0.0.1:1"), make_party("b")
    exchange(a, b, 0.0)
    exchange(a, b, 10.0)
    again = make_party("a", t=11.0, address="10.0.0.2:1", incarnation=2, seed=3)
    for t in range(12, 200, 10):
        exchange(again, b, float(t))
    assert _conflicts(b, 200.0) == _conflicts(again, 200.0) == set()
    card = card_of(b, "a", 200.0)
    assert card is not None
    assert card.grpc_address == "10.0.0.2:1"


def test_a_conflict_is_told_once_and_shown_while_it_lasts() -> None:
    party = make_party("me")
    told = []
    for t in range(0, 100, 10):
        wire = make_wire("me", at=NOW + t + 1, address="x:1", life=9, platform=str(t))
        told.append(party.registry.merge([wire], **party.times(t + 1.0)).conflicts)
    assert told == [("x:1",), *[()] * 9]
    assert _conflicts(party, 100.0) == {("me", "x:1", True)}
    assert _conflicts(party, 800.0) == set()


def test_the_smaller_life_is_kept_everywhere_and_the_other_is_dropped_as_a_conflict() -> None:
    one = make_wire("a", life=1, address="h:1")
    two = make_wire("a", life=2, address="h:2", at=NOW + 5)
    for order in ([one, two], [two, one]):
        party = make_party("me")
        reports = [party.registry.merge([wire], **party.times(6.0)) for wire in order]
        card = card_of(party, "a", 6.0)
        assert card is not None
        assert card.life == 1
        dropped = sum(report.dropped.get(CardFault.CONFLICT, 0) for report in reports)
        assert dropped == (order == [one, two])
        assert len(_conflicts(party, 6.0)) == 2


def test_an_earlier_life_that_somebody_still_holds_is_no_impostor() -> None:
    old = make_party("a", address="10.0.0.1:1")
    b = make_party("b")
    exchange(old, b, 0.0)
    memory = old.registry.memory(now=NOW, mono=0.0)
    assert isinstance(memory, RegistryState)
    new = make_party("a", t=1.0, address="10.0.0.9:1", memory=memory, seed=5)
    exchange(new, b, 1.1)
    assert _conflicts(new, 1.1) == set()
