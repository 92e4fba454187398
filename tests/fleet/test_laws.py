"""Merges commute, associate and repeat without effect, beats, ties, skew and doubles included.

RELIABILITY row 16. The cases here and in `test_registry.py` are ten thousand; `scripts/soak` tries
them all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kakeya.fleet.cards.convert import from_wire
from kakeya.fleet.view.beats import Beats, no_beats
from kakeya.fleet.view.registry import CapabilityRegistry
from tests.fleet.nodes import NOW, make_registry, make_wire
from tests.fleet.talk import Party, exchange, exchange_in_full, make_party
from tests.laws import law

WIRES = [
    make_wire(name, at=NOW + at, incarnation=incarnation, platform=platform, life=life, address=to)
    for name in ("a", "b", "c")
    for at in (-3000.0, 0.0, 5.0, 59.0)
    for incarnation, life in ((1, 0), (2, 11), (2, 12))
    for platform, to in (("x", "h:1"), ("y", "h:2"))
]
"""Ties of incarnation, life and stamp, that only the bytes decide; some stamps are skewed."""


@dataclass(frozen=True)
class Told:
    """One card with the beat beside it: number and age; (0, None) = it came without."""

    wire: bytes
    number: int
    age_s: float | None


tellings = st.builds(
    Told,
    st.sampled_from(WIRES),
    st.integers(0, 4),
    st.sampled_from([0.0, 1.0, 30.0, 119.0]),
)


def _batch(told: list[Told]) -> tuple[list[bytes], Beats]:
    best: dict[int, Told] = {}
    for one in told:  # a message names a card once
        best.setdefault(from_wire(one.wire).key, one)
    if not best:
        return [], no_beats()
    beats = Beats(
        np.array(list(best), np.uint64),
        np.array([one.number for one in best.values()], np.uint32),
        np.array([one.age_s for one in best.values()]),
        np.empty(0, np.uint64),
    )
    return [one.wire for one in best.values()], beats


def _take(registry: CapabilityRegistry, told: list[Told]) -> None:
    wires, beats = _batch(told)
    registry.merge(wires, now=NOW, mono=1000.0, beats=beats)


def _view(registry: CapabilityRegistry) -> dict[str, tuple[bytes, int]]:
    held = registry.peers.held
    cards = registry.snapshot(mono=1000.0)[1:]
    return {card.node_id: (card.wire, held.number(card)) for card in cards}


def _registry(name: str = "me") -> CapabilityRegistry:
    return make_registry(name, now=NOW, mono=1000.0)


@given(told=st.lists(tellings, max_size=14), seed=st.integers(0, 2**16))
@law(3600, part=20)
def test_any_order_split_and_repetition_gives_one_view(told: list[Told], seed: int) -> None:
    rng = random.Random(seed)
    straight, mixed = _registry(), _registry()
    for one in told:
        _take(straight, [one])
    shuffled = told + rng.choices(told, k=len(told)) if told else []
    rng.shuffle(shuffled)
    while shuffled:
        step = rng.randint(1, 6)
        # What a batch names twice it would not tell: the rest of it comes in the next.
        part, shuffled = shuffled[:step], shuffled[step:]
        while part:
            keys = [one.wire for one in part]
            first = [one for i, one in enumerate(part) if one.wire not in keys[:i]]
            _take(mixed, first)
            part = [one for i, one in enumerate(part) if one.wire in keys[:i]]
    assert _view(mixed) == _view(straight)


@given(told=st.lists(tellings, max_size=14))
@law(1400, part=12)
def test_what_was_taken_once_changes_nothing_the_second_time(told: list[Told]) -> None:
    registry = _registry()
    for one in told:
        _take(registry, [one])
    before, ages = _view(registry), registry.ages(mono=1000.0).tolist()
    for one in told:
        wires, beats = _batch([one])
        report = registry.merge(wires, now=NOW, mono=1000.0, beats=beats)
        assert (report.changed, report.beaten) == ((), 0)
    assert _view(registry) == before
    assert registry.ages(mono=1000.0).tolist() == ages


@given(told=st.lists(tellings, max_size=10), later=st.lists(tellings, max_size=10))
@law(700)
def test_a_view_only_ever_goes_forward(told: list[Told], later: list[Told]) -> None:
    registry = _registry()
    for one in told:
        _take(registry, [one])
    before = {c.node_id: (c, registry.peers.held.number(c)) for c in registry.peers.held}
    for one in later:
        _take(registry, [one])
    for card in registry.peers.held:
        if card.node_id in before:
            old, number = before[card.node_id]
            now = registry.peers.held.number(card)
            assert card.is_newer_than(old) or (card == old and now >= number)


@st.composite
def parties(draw: st.DrawFn) -> list[Party]:
    town = []
    for i in range(3):
        party = make_party(f"p{i}", skew_s=draw(st.sampled_from([0.0, -119.0, 3600.0, -3600.0])))
        for one in draw(st.lists(tellings, max_size=6)):
            wires, beats = _batch([one])
            party.registry.merge(wires, beats=beats, **party.times(0.0))
        town.append(party)
    return town


@given(town=parties(), order=st.permutations([(0, 1), (1, 2), (2, 0)]), in_full=st.booleans())
@law(500)
def test_whoever_talks_with_whom_first_all_end_with_one_view(
    town: list[Party], order: list[tuple[int, int]], in_full: bool
) -> None:
    talk = exchange_in_full if in_full else exchange
    for t in (0.1, 0.2, 0.3):
        for caller, callee in order:
            talk(town[caller], town[callee], t)
    views = []
    for party in town:
        cards = party.registry.snapshot(mono=0.3)
        views.append({card.wire for card in cards})
    assert views[0] == views[1] == views[2]


@given(
    stamps=st.lists(st.sampled_from(WIRES), min_size=3, max_size=3),
)
@law(500)
def test_the_order_of_cards_is_total(stamps: list[bytes]) -> None:
    one, two, three = (from_wire(wire) for wire in stamps)
    assert one.is_newer_than(two) + two.is_newer_than(one) == (one != two)
    if one.is_newer_than(two) and two.is_newer_than(three):
        assert one.is_newer_than(three)
