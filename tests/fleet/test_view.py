"""How a view is looked up: by address, by key, and by drawing some of all, against slow ways."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.gossip.targets import in_random_order
from kakeya.fleet.view.card_table import CardIndex
from kakeya.fleet.view.digest import cards_of, news, unknown
from kakeya.fleet.view.registry import CapabilityRegistry
from tests.fleet.nodes import NOW, make_registry, make_wire
from tests.fleet.talk import make_party
from tests.laws import law

ADDRESSES = [f"10.0.0.{number}:1" for number in range(1, 4)]
Told = tuple[int, int, int, float]
told = st.lists(
    st.tuples(
        st.integers(0, 5),  # whose card
        st.integers(0, len(ADDRESSES) - 1),
        st.integers(1, 3),  # of which start
        st.floats(0.0, 400.0),  # when it comes
    ),
    max_size=40,
)


def _tell(registry: CapabilityRegistry, steps: list[Told]) -> float:
    t = 0.0
    for who, where, incarnation, at in sorted(steps, key=lambda step: step[3]):
        t = at
        wire = make_wire(f"n{who}", at=NOW + t, address=ADDRESSES[where], incarnation=incarnation)
        registry.expire(now=NOW + t, mono=t)
        registry.merge([wire], now=NOW + t, mono=t)
    return t


@given(steps=told, is_shared=st.booleans())
@law(1200)
def test_nodes_are_found_by_every_address_that_one_of_them_claims_now(
    steps: list[Told], is_shared: bool
) -> None:
    index = CardIndex(is_shared=is_shared)
    one = CapabilityRegistry("me", make_registry("x").offer, now=NOW, mono=0.0, index=index)
    _tell(one, steps)
    if is_shared:
        other = CapabilityRegistry("you", make_registry("x").offer, now=NOW, mono=0.0, index=index)
        _tell(other, steps[::2])
    for address in (*ADDRESSES, "10.9.9.9:1"):
        claimants = [card for card in one.peers.held if card.grpc_address == address]
        found = one.peers.find(address)
        assert found in claimants if claimants else found is None
    for card in one.peers.held:
        assert one.peers.find(card.node_id) is card


@given(steps=told, later_s=st.floats(0.0, 200.0))
@law(1200)
def test_live_peers_are_those_of_the_snapshot(steps: list[Told], later_s: float) -> None:
    registry = make_registry("me")
    mono = _tell(registry, steps) + later_s
    live = registry.live_peers(mono=mono)
    assert sorted(live, key=lambda card: card.node_id) == list(registry.snapshot(mono=mono)[1:])
    assert list(live[:2]) == list(live)[:2]


@given(count=st.integers(0, 30), seed=st.integers(0, 99))
def test_drawing_all_of_a_list_is_a_shuffle_of_it(count: int, seed: int) -> None:
    items = [str(number) for number in range(count)]
    drawn = list(in_random_order(items, random.Random(seed)))
    assert sorted(drawn) == sorted(items)
    assert drawn == list(in_random_order(items, random.Random(seed)))


def test_every_item_is_drawn_first_as_often() -> None:
    rng, counts = random.Random(5), dict.fromkeys("abcd", 0)
    for _ in range(4000):
        counts[next(in_random_order("abcd", rng))] += 1
    assert all(850 < count < 1150 for count in counts.values())


@given(mine=st.sets(st.integers(0, 12)), theirs=st.sets(st.integers(0, 12)))
@law(1200)
def test_news_are_what_the_other_side_does_not_name(mine: set[int], theirs: set[int]) -> None:
    a, b = make_party("a"), make_party("b")
    wires = {number: make_wire(f"n{number}", at=NOW) for number in range(13)}
    a.registry.merge([wires[n] for n in sorted(mine)], **a.times(0.0))
    b.registry.merge([wires[n] for n in sorted(theirs)], **b.times(0.0))
    held = a.registry.peers.held
    said = b.registry.peers.held.beats(1.0)
    places = held.places(said.keys)
    beats, unnamed = news(a.registry, said, places, mono=1.0)
    assert {card.node_id for card in unnamed} == {"a", *(f"n{n}" for n in mine - theirs)}
    assert int(beats.keys[0]) == a.registry.own.key
    named = cards_of(a.registry, beats.keys)
    assert {card.node_id for card in named} == {"a", *(f"n{n}" for n in mine - theirs)}
    wanted = cards_of(b.registry, unknown(a.registry, said, places, mono=1.0))
    assert {card.node_id for card in wanted} == {f"n{n}" for n in theirs - mine}
