"""Two processes under one node id, as after a disk was copied (RELIABILITY row 13)."""

from __future__ import annotations

import itertools

import pytest

from kakeya.fleet.cards.cards import CardFault
from kakeya.fleet.view.tombstones import RegistryState
from tests.fleet.nodes import NOW, make_wire
from tests.fleet.talk import INTERVAL_S, Party, Town, ToyTrust, card_of, exchange, make_party
from tests.laws import seeds


def _conflicts(party: Party, t: float) -> set[tuple[str, str, bool]]:
    found = party.registry.conflicts(party.times(t)["now"])
    return {(conflict.node_id, conflict.address, conflict.is_own) for conflict in found}


def _town(seed: int, *, incarnation: int, with_trust: bool = False) -> tuple[Town, Party, Party]:
    """Three bystanders and a node; later a copy of the node's disk starts elsewhere."""

    def trust(name: str) -> ToyTrust | None:
        return ToyTrust(name) if with_trust else None

    first = make_party("twin", address="10.0.0.1:1", incarnation=4, trust=trust("twin"))
    others = [make_party(f"n{i}", trust=trust(f"n{i}")) for i in range(3)]
    town = Town([first, *others], seed)
    town.run(300)
    second = make_party(
        "twin",
        t=town.t,
        address="10.0.0.2:1",
        incarnation=incarnation,
        trust=trust("twin"),
        seed=seed,
    )
    second.name = "copy"
    town.parties["copy"] = second
    town._due.append((town.t, "copy"))
    town._due.sort()
    return town, first, second


@pytest.mark.parametrize("with_trust", [False, True])
@pytest.mark.parametrize("incarnation", [4, 5])
@pytest.mark.parametrize("seed", seeds(10, first=2))
def test_both_processes_learn_of_each_other_and_no_view_alternates(
    seed: int, incarnation: int, with_trust: bool
) -> None:
    """Incarnation 5 is a copy that counted its start, 4 one that did not."""
    town, first, second = _town(seed, incarnation=incarnation, with_trust=with_trust)
    bystanders = [party for party in town.up() if party not in (first, second)]
    seen: dict[str, list[str]] = {party.name: [] for party in bystanders}
    found_at: dict[str, float] = {}
    started = town.t

    def look() -> None:
        for party in bystanders:
            card = card_of(party, "twin", town.t)
            assert card is not None
            seen[party.name].append(card.grpc_address)
        for party, address in ((first, "10.0.0.2:1"), (second, "10.0.0.1:1")):
            if ("twin", address, True) in _conflicts(party, town.t):
                found_at.setdefault(party.name, town.t)

    town.run(100 * INTERVAL_S, look)
    for addresses in seen.values():
        changes = sum(before != after for before, after in itertools.pairwise(addresses))
        assert changes <= 1
    assert found_at.keys() == {"twin", "copy"}
    assert max(found_at.values()) - started <= 3 * INTERVAL_S * 1.1
    for party in bystanders:
        assert {("twin", a, False) for a in ("10.0.0.1:1", "10.0.0.2:1")} <= _conflicts(
            party, town.t
        )
    assert first.registry.incarnation == 4
    assert second.registry.incarnation <= 5  # it may take the other for an earlier life at first


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
