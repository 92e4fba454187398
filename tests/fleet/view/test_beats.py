"""Beats: their proofs, their columns, and ages that nobody can make younger."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, KakeyaError
from kakeya.fleet.gossip.messages import decode_beats, encode_beats
from kakeya.fleet.view.beats import MAX_BEATS, Beats, Chain, leads_to, no_beats
from kakeya.v1 import fleet_pb2 as pb
from tests.fleet.talk import ToyTrust, card_of, exchange, make_party
from tests.laws import law


def test_a_chain_proves_every_beat_from_every_earlier_one_and_from_no_later_one() -> None:
    chain = Chain(7, random.Random(1).randbytes)
    anchor = int.from_bytes(chain.anchor, "little")
    assert chain.proof(0) == anchor
    for earlier, later in [(0, 1), (0, MAX_BEATS), (3, 9), (511, 512)]:
        known = chain.proof(earlier)
        assert leads_to(7, chain.proof(later), later - earlier, known)
        assert not leads_to(7, chain.proof(later), later - earlier - 1, known)
        assert not leads_to(8, chain.proof(later), later - earlier, known)
        assert not leads_to(7, known, later - earlier, chain.proof(later))


def make_beats(*entries: tuple[int, int, float, int]) -> Beats:
    keys, numbers, ages, proofs = zip(*entries, strict=True) if entries else ((), (), (), ())
    return Beats(
        np.array(keys, np.uint64),
        np.array(numbers, np.uint32),
        np.array(ages, np.float64),
        np.array(proofs, np.uint64),
    )


@given(
    keys=st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=30),
    numbers=st.lists(st.integers(0, 512), min_size=30, max_size=30),
    ages=st.lists(st.floats(0, 4e8), min_size=30, max_size=30),
    has_proofs=st.booleans(),
)
@law(1200)
def test_columns_survive_the_wire_and_no_age_shrinks(
    keys: list[int], numbers: list[int], ages: list[float], has_proofs: bool
) -> None:
    count = len(keys)
    sent = Beats(
        np.array(keys, np.uint64),
        np.array(numbers[:count], np.uint32),
        np.array(ages[:count], np.float64),
        np.array(keys[::-1] if has_proofs else [], np.uint64),
    )
    came = decode_beats(encode_beats(sent))
    assert came.keys.tolist() == keys
    assert came.numbers.tolist() == numbers[:count]
    assert came.proofs.tolist() == (keys[::-1] if has_proofs else [])
    for before, after in zip(ages, came.ages_s.tolist(), strict=False):
        assert before - 1e-6 <= after <= before + 0.1001 or after >= 2**32 / 10 - 1


@pytest.mark.parametrize(
    "message",
    [
        pb.Heartbeats(keys=b"1234567"),
        pb.Heartbeats(keys=b"12345678", beats=[1, 2]),
        pb.Heartbeats(keys=b"12345678"),
        pb.Heartbeats(keys=b"12345678", beats=[1], age_ds=[1, 2]),
        pb.Heartbeats(keys=b"12345678", beats=[1], age_ds=[1], proofs=b"1"),
        pb.Heartbeats(keys=b"12345678" * 2, beats=[1, 1], age_ds=[1, 1], proofs=b"12345678"),
        pb.Heartbeats(keys=b"12345678" * 2, beats=[1, 2], age_ds=[1, 1]),
        pb.Heartbeats(keys=bytes(8 * 65_537), beats=[1] * 65_537),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(message: pb.Heartbeats) -> None:
    with pytest.raises(KakeyaError):
        decode_beats(message.SerializeToString())


def test_bytes_that_are_no_columns_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        decode_beats(b"\x0a\xff")
    assert len(decode_beats(b"")) == len(no_beats()) == 0


# --- the owner


def test_the_owner_beats_once_a_second_and_makes_a_new_body_when_its_chain_is_used_up() -> None:
    party = make_party("a", trust=ToyTrust("a"))
    own = party.registry.own_card
    body = own.card
    party.registry.beat(now=0, mono=0.5)
    assert own.number == 0
    for second in range(1, MAX_BEATS + 1):
        party.registry.beat(**party.times(float(second)))
    assert (own.card, own.number) == (body, MAX_BEATS)
    party.registry.beat(**party.times(MAX_BEATS + 1.0))
    assert own.number == 0
    assert own.card.is_newer_than(body)
    assert own.card.anchor != body.anchor


def test_a_node_that_is_doubted_beats_at_once() -> None:
    party = make_party("a")
    party.registry.own_card.beat_anew(**party.times(0.1))
    assert party.registry.own_card.number == 1


def test_bodies_stay_as_they_are_while_everybody_beats() -> None:
    a, b = make_party("a"), make_party("b")
    exchange(a, b, 0.0)
    changed = [report.changed for report in a.reports + b.reports]
    assert sorted(changed) == [(), ("a",), ("b",)]
    a.reports.clear(), b.reports.clear()
    for t in range(10, 3600, 10):
        sent = exchange(a, b, float(t))
        assert sent < 150
        assert card_of(a, "b", t) is not None
    assert not any(report.changed for report in a.reports + b.reports)
    assert sum(report.beaten for report in a.reports) > 300


def test_while_a_plain_node_lives_bodies_are_made_anew_for_it() -> None:
    from tests.fleet.nodes import NOW, make_wire

    a = make_party("a")
    a.registry.merge([make_wire("old", is_plain=True)], now=NOW, mono=0.0)
    stamps = set()
    for t in range(0, 110, 10):
        a.sync.request(**a.times(float(t)))
        stamps.add(a.registry.own.announced_at)
    assert len(stamps) == 11
    a.registry.begin_round(**a.times(130.0))
    before = a.registry.own
    for t in range(130, 200, 10):
        a.sync.request(**a.times(float(t)))
    assert a.registry.own is before
