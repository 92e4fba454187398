"""A member that floods with its own cards, lies about beats, and accuses all the time."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import DEFAULT_INTERVAL_S, CardFault
from kakeya.fleet.gossip.messages import Digest, decode_answer, encode_digest
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.liveness.probing import Prober
from kakeya.fleet.view.beats import MAX_BEATS, Beats
from kakeya.fleet.view.card_table import MAX_STEPS
from kakeya.fleet.view.own_card import DEFENCE_S
from kakeya.fleet.view.suspicion import Sign
from kakeya.fleet.view.tombstones import MAX_REPLACED, Unwanted
from kakeya.wire.channels import Channels
from tests.fakes import FakeClock
from tests.fleet.nodes import NOW, at, make_card, make_registry, make_wire, proposer
from tests.fleet.talk import Party, ToyTrust, exchange, make_party


def _party(name: str, **options: object) -> Party:
    return make_party(name, trust=ToyTrust(name), **options)  # type: ignore[arg-type]


def _told(party: Party, number: int, age_s: float, proof: int) -> Beats:
    """What somebody says of the beats of a party's card."""
    return Beats(
        np.array([party.registry.own.key], np.uint64),
        np.array([number], np.uint32),
        np.array([age_s]),
        np.array([proof], np.uint64),
    )


def _wanted(victim: Party, told: Beats, t: float) -> list[int]:
    """The keys of which it asks for the cards when it is told this."""
    answered = victim.sync.answer(encode_digest(Digest(held=told)), **victim.times(t))
    return decode_answer(answered.response).wanted.tolist()


# --- what is kept of cards that are over


def _thick(number: int) -> bytes:
    models = [proposer(f"{number}-{i}-{'x' * 80}") for i in range(64)]
    return make_wire("mallory", at=NOW + number / 1000, models=models) + ToyTrust.WORD


def test_a_flood_of_replaced_cards_costs_no_memory() -> None:
    """Kept whole they were 64 MiB in an hour."""
    victim = _party("victim")
    victim.registry.merge([_thick(0)], **victim.times(0.0))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(1, 1000):
        report = victim.registry.merge([_thick(number)], **victim.times(number / 1000))
        assert report.changed == ("mallory",)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < MIB / 4


def test_a_flood_of_replaced_cards_pushes_out_nobody_elses() -> None:
    """Else a node whose card came twice would be asked for its old one again."""
    unwanted = Unwanted(64)
    honest = make_card("honest")
    unwanted.replace(honest, 3, 0.0)
    for number in range(1000):
        unwanted.replace(make_card("mallory", at=NOW + number), 0, float(number))
    assert not unwanted.wants(honest.key, MAX_BEATS, 1.0)
    replaced = unwanted.replaced(honest.key)
    assert replaced is not None
    assert (replaced.node_id, replaced.number) == ("honest", 3)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=120))
def test_replaced_cards_are_bounded_for_each_node_and_for_all(made: list[tuple[int, int]]) -> None:
    unwanted = Unwanted(24)
    for node, body in made:
        unwanted.replace(make_card(f"n{node}", at=NOW + body), 0, 0.0)
    each = Counter(note.node_id for note in unwanted._replaced.values())
    assert sum(each.values()) <= 24
    assert all(count <= MAX_REPLACED for count in each.values())
    assert {node: len(keys) for node, keys in unwanted._keys.items()} == each
    if made:
        node, body = made[-1]
        assert not unwanted.wants(make_card(f"n{node}", at=NOW + body).key, MAX_BEATS, 0.0)


# --- lies about beats


@pytest.mark.parametrize("number", [0, 7, MAX_BEATS, 2**32 - 1])
def test_a_lie_about_a_nodes_age_does_not_keep_its_card_away(number: int) -> None:
    """The card was not asked for again for five minutes, or until it beat as often as was said."""
    victim, honest = _party("victim"), _party("honest")
    for t in range(1, 8):
        honest.registry.beat(**honest.times(float(t)))
    own = honest.registry.own_card
    lie = _told(honest, number, 121.0, own.proof)
    report = victim.registry.merge([own.card.wire], beats=lie, **victim.times(8.0))
    assert report.dropped == {CardFault.EXPIRED: 1}
    truth = _told(honest, own.number, 1.0, own.proof)
    assert _wanted(victim, truth, 8.0) == [own.card.key]


@pytest.mark.parametrize("number", [MAX_BEATS, 2**32 - 1])
def test_a_lie_about_a_beat_does_not_keep_a_returned_node_away(number: int) -> None:
    victim, back = _party("victim"), _party("back")
    exchange(victim, back, 0.0)
    victim.registry.begin_round(**victim.times(130.0))
    own = back.registry.own_card
    lie = _told(back, number, 0.0, own.proof)
    report = victim.registry.merge([own.card.wire], beats=lie, **victim.times(131.0))
    assert report.dropped == {CardFault.STALE: 1}
    back.registry.beat(**back.times(132.0))
    truth = _told(back, own.number, 0.0, own.proof)
    assert _wanted(victim, truth, 132.0) == [own.card.key]


def test_what_is_proven_to_be_over_is_not_asked_for_again() -> None:
    """The control: who is told of the dead by honest relays does not ask for them each time."""
    victim, dead = _party("victim"), _party("dead")
    exchange(victim, dead, 0.0)
    victim.registry.begin_round(**victim.times(130.0))
    own = dead.registry.own_card
    said = _told(dead, own.number, 119.0, own.proof)
    victim.registry.merge([own.card.wire], beats=said, **victim.times(131.0))
    assert _wanted(victim, said, 132.0) == []


def test_a_message_full_of_the_dead_costs_few_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    victim = _party("victim")
    crowd = [_party(f"n{i:03}") for i in range(100)]
    victim.registry.merge([p.registry.own.wire for p in crowd], **victim.times(0.0))
    victim.registry.begin_round(**victim.times(130.0))
    steps: list[int] = []
    proves = victim.registry.peers.held.proves

    def counted(card: object, told: object) -> bool:
        steps.append(told.number)  # type: ignore[attr-defined]
        return proves(card, told)  # type: ignore[arg-type]

    monkeypatch.setattr(victim.registry.peers.held, "proves", counted)
    keys = np.array([p.registry.own.key for p in crowd], np.uint64)
    lies = Beats(keys, np.full(100, MAX_BEATS, np.uint32), np.zeros(100), np.ones(100, np.uint64))
    wires = [p.registry.own.wire for p in crowd]
    report = victim.registry.merge(wires, beats=lies, **victim.times(131.0))
    assert report.dropped == {CardFault.STALE: 100}
    assert 0 < sum(steps) <= MAX_STEPS


# --- accusations


def _accused(accusers: int, seconds: int) -> tuple[list[float], int]:
    """When a node that is accused each second pokes, and how often it beats meanwhile."""
    clock = FakeClock(NOW, mono=0.0)
    registry = make_registry("victim", trust=ToyTrust("victim"))
    pokes: list[float] = []
    prober = Prober(
        registry,
        channels=Channels(),
        clock=clock,
        rng=random.Random(1),
        poke=lambda: pokes.append(clock.mono()),
    )
    sync = Sync(registry, rng=random.Random(1), suspicion=prober)
    for tick in range(4 * seconds):
        clock.advance(0.25)
        own = registry.own_card
        sign = Sign("victim", registry.incarnation, own.card.key, own.number)
        name = f"mallory-{tick % accusers}"
        sync._hear_accusations((sign,), name, **at(clock.wall()))
    return pokes, registry.own_card.number


@pytest.mark.parametrize(("accusers", "each"), [(1, 1), (40, 3)])
def test_who_accuses_all_the_time_begins_few_rounds(accusers: int, each: int) -> None:
    """It was one each two seconds, which is five times a node's traffic."""
    seconds = 200
    pokes, _ = _accused(accusers, seconds)
    assert 1 <= len(pokes) <= each * (seconds / DEFAULT_INTERVAL_S + 1)


def test_who_accuses_all_the_time_uses_up_no_chain() -> None:
    """Each new body crosses to the whole fleet."""
    _, beats = _accused(1, 200)
    assert beats <= 200 / DEFENCE_S


def test_who_is_accused_once_defends_itself_at_once() -> None:
    assert len(_accused(1, 1)[0]) == 1
