"""The digest protocol without I/O: what crosses, what is asked for, what is not asked for again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kakeya.core.errors import InvalidArgument, KakeyaError, Refused
from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import CardFault, Offer
from kakeya.fleet.cards.convert import MAX_BATCH_BYTES, join_cards, split_cards
from kakeya.fleet.gossip.messages import MAX_WANTED, decode_answer, decode_digest, decode_parcel
from kakeya.fleet.gossip.sync import MAX_CARDS_BYTES, Sync
from kakeya.fleet.view.slices import finish
from kakeya.fleet.view.suspicion import Sign
from kakeya.fleet.view.tombstones import REFUSED_S
from kakeya.v1 import fleet_pb2 as pb
from tests.fleet.nodes import NOW, make_wire, verifier
from tests.fleet.talk import Party, ToyTrust, card_of, exchange, exchange_in_full, make_party


def _know(party: Party, *names: str, t: float = 0.0, **fields: object) -> None:
    wires = [make_wire(name, at=NOW + t, **fields) for name in names]  # type: ignore[arg-type]
    assert party.registry.merge(wires, **party.times(t)).dropped == {}


def test_one_exchange_gives_both_sides_the_union() -> None:
    a, b = make_party("a"), make_party("b")
    _know(a, "x", "y")
    _know(b, "y", "z")
    exchange(a, b, 1.0)
    assert a.sees(1.0) == b.sees(1.0) == {"a", "b", "x", "y", "z"}


def test_what_both_hold_does_not_cross_again() -> None:
    a, b = make_party("a"), make_party("b")
    names = [f"n{i}" for i in range(50)]
    _know(a, *names)
    first = exchange(a, b, 1.0)
    again = exchange(a, b, 2.0)
    assert first > 50 * 70
    assert again < 50 * 14 + 100
    assert all(not report.changed for report in (a.reports[-1], b.reports[-1]))


def test_a_changed_card_crosses_once_whoever_begins() -> None:
    for is_caller in (True, False):
        a, b = make_party("a"), make_party("b")
        exchange(a, b, 0.0)
        offer = Offer(grpc_address="a:50051", models=(verifier("new"),))
        a.registry.announce(offer, **a.times(1.0))
        exchange(*((a, b) if is_caller else (b, a)), 2.0)
        card = card_of(b, "a", 2.0)
        assert card is not None
        assert [model.model_id for model in card.models] == ["new"]
        counts = exchange(a, b, 3.0)
        assert counts < 150


def test_ages_travel_hop_by_hop_and_grow_by_the_time_a_card_lay() -> None:
    chain = [make_party(f"n{i}", skew_s=random.Random(i).uniform(-3600, 3600)) for i in range(5)]
    for i in range(4):
        exchange(chain[i], chain[i + 1], 10.0 * (i + 1))
    age_s = chain[4].registry.age_s("n0", mono=50.0)
    assert age_s == pytest.approx(40.0, abs=1.0)  # n0 beat at 10 and was told on at 20, 30, 40


def test_a_replaced_card_is_not_asked_for_again() -> None:
    a, b, c = make_party("a"), make_party("b"), make_party("c")
    exchange(a, b, 0.0)
    exchange(a, c, 0.0)
    a.registry.restamp(**a.times(1.0))
    exchange(a, b, 2.0)  # c still holds the old one
    answer = b.sync.answer(c.sync.request(**c.times(3.0)), **b.times(3.0))
    wanted = decode_answer(answer.response).wanted.tolist()
    assert wanted == []


def test_a_refused_card_is_asked_for_again_after_a_while_only() -> None:
    a = make_party("a")
    b = make_party("b", trust=ToyTrust("b"))
    for t, is_wanted in [(0.0, True), (10.0, False), (REFUSED_S + 20.0, True)]:
        answer = b.sync.answer(a.sync.request(**a.times(t)), **b.times(t))
        assert (a.registry.own.key in decode_answer(answer.response).wanted.tolist()) is is_wanted
        accepted = a.sync.accept(answer.response, **a.times(t))
        if accepted.push:
            report = b.sync.take(accepted.push, **b.times(t))
            assert report.dropped == {CardFault.UNSIGNED: 1}


def test_at_most_512_bodies_are_asked_for_at_once_and_the_rest_soon() -> None:
    a, b = make_party("a"), make_party("b")
    _know(a, *(f"n{i}" for i in range(1200)))
    seen = []
    for t in range(1, 4):
        answer = b.sync.answer(a.sync.request(**a.times(t)), **b.times(t))
        assert len(decode_answer(answer.response).wanted) <= MAX_WANTED
        push = a.sync.accept(answer.response, **a.times(t)).push
        assert push is not None
        b.sync.take(push, **b.times(t))
        seen.append(len(b.sees(t)))
    assert seen == [513, 1025, 1202]


def test_a_registry_at_its_cap_still_exchanges_in_messages_below_the_limit() -> None:
    """Row 20: 4096 cards of 1 kB are 4 MiB; each message stays below 2."""
    a, b = make_party("a"), make_party("b")
    _know(a, *(f"n{i}" for i in range(4095)), platform="x" * 200, models=[verifier("m" * 250)] * 3)
    assert len(a.registry) == 4096
    for t in range(1, 40):
        request = b.sync.request(**b.times(t))
        answer = a.sync.answer(request, **a.times(t)).response
        assert len(answer) <= MAX_BATCH_BYTES
        push = b.sync.accept(answer, **b.times(t)).push
        assert push is None or len(push) <= MAX_BATCH_BYTES
        if len(b.sees(t)) == 4096:
            break
    assert len(b.sees(t)) == 4096  # itself and 4095 others, for a makes one more than its cap
    full = a.sync.batch(**a.times(t))
    assert MAX_CARDS_BYTES * 0.9 < len(full) <= MAX_BATCH_BYTES
    taken = finish(b.sync.taking_batch(full, **b.times(t)))
    assert set(taken.report.dropped) <= {CardFault.REGISTRY_FULL}


@pytest.mark.parametrize("read", [decode_digest, decode_answer, decode_parcel, split_cards])
def test_five_mebibytes_are_refused(read: object) -> None:
    """Row 20."""
    with pytest.raises(Refused, match=r"5\.0 MiB"):
        read(bytes(5 * MIB))  # type: ignore[operator]


def test_floods_of_small_parts_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(Refused):
        decode_digest(b"\x12\x00" * 900_000)
    with pytest.raises(Refused):
        decode_answer(b"\x12\x00" * 900_000)
    with pytest.raises(Refused):
        decode_parcel(b"\x12\x00" * 900_000)
    with pytest.raises(InvalidArgument):
        decode_answer(pb.SyncResponse(wanted=bytes(8 * 513)).SerializeToString())


def test_a_card_that_an_answer_held_back_comes_with_the_next() -> None:
    """An old card is held back while the caller names one that is unknown: see `likely_new`."""
    a, b = make_party("a"), make_party("b")
    _know(a, "news", t=100.0)
    _know(b, "old", t=0.0)
    exchange(a, b, 100.0)
    assert "old" not in a.sees(100.0)
    exchange(a, b, 101.0)
    assert "old" in a.sees(101.0)


# --- full exchanges


def test_a_full_exchange_carries_ages_too() -> None:
    a, b, c = make_party("a"), make_party("b", skew_s=-3600.0), make_party("c", skew_s=119.0)
    exchange(a, b, 0.0)
    exchange_in_full(b, c, 60.0)
    assert c.registry.age_s("a", mono=60.0) == pytest.approx(60.0, abs=0.3)
    assert c.sees(60.0) == {"a", "b", "c"}
    assert set(c.sync.skews.by_peer(60.0)) == {"b"}


def test_cards_that_came_without_beats_are_as_old_as_their_stamps_say() -> None:
    a = make_party("a")
    finish(a.sync.taking_batch(join_cards([make_wire("x", at=NOW - 100)]), **a.times(0.0)))
    assert a.registry.age_s("x", mono=0.0) == pytest.approx(100.0)
    assert card_of(a, "x", 19.0) is not None
    assert card_of(a, "x", 21.0) is None


# --- what else travels


class _Book:
    def __init__(self, *signs: Sign) -> None:
        self.signs, self.heard = signs, []

    def outgoing(self) -> tuple[Sign, ...]:
        return self.signs

    def hear(self, accusations: Sequence[Sign], accuser: str = "") -> None:
        self.heard.extend(accusations)


def test_accusations_travel_both_ways_and_the_accused_beats_at_once() -> None:
    a, b = make_party("a"), make_party("b")
    exchange(a, b, 0.0)
    accusation = b.registry.sign_of("b")
    assert accusation is not None
    one, other = _Book(accusation), _Book(Sign("x", 1, 7, 3))
    a.sync = Sync(a.registry, rng=random.Random(1), suspicion=one)
    b.sync = Sync(b.registry, rng=random.Random(1), suspicion=other)
    number = b.registry.own_card.number
    exchange(a, b, 0.2)
    assert other.heard == [accusation]
    assert one.heard == [Sign("x", 1, 7, 3)]
    assert b.registry.own_card.number == number + 1
    assert a.registry.peers.held.number(card_of(a, "b", 0.2)) == number + 1


class _List:
    def __init__(self, version: int) -> None:
        self.version, self.refuses = version, False

    @property
    def revocations(self) -> tuple[int, bytes]:
        return self.version, b"list" * self.version

    def apply_revocations(self, blob: bytes) -> bool:
        version = len(blob) // 4
        if self.refuses or version <= self.version:
            return False
        self.version = version
        return True


@pytest.mark.parametrize(("mine", "theirs"), [(0, 3), (3, 0), (2, 2)])
def test_the_newer_revocation_list_reaches_the_other_side(mine: int, theirs: int) -> None:
    a, b = make_party("a"), make_party("b")
    lists = _List(mine), _List(theirs)
    a.sync = Sync(a.registry, rng=random.Random(1), revocations=lists[0])
    b.sync = Sync(b.registry, rng=random.Random(1), revocations=lists[1])
    exchange(a, b, 0.0)
    assert [one.version for one in lists] == [max(mine, theirs)] * 2
    quiet = exchange(a, b, 10.0)
    assert quiet < 200


# --- leaving


def test_a_farewell_is_gone_within_ten_seconds_and_nobody_brings_it_back() -> None:
    """Row 28, the fleet's part: the last card, then silence; the tombstone holds."""
    a, b, c = make_party("a"), make_party("b"), make_party("c")
    for one, other in ((a, b), (a, c), (b, c)):
        exchange(one, other, 0.0)
    b.sync.take(a.sync.farewell(**a.times(5.0)), **b.times(5.0))
    card = card_of(b, "a", 5.0)
    assert card is not None
    assert (card.models, card.ttl_s) == ((), 10.0)
    exchange(b, c, 6.0)
    for party in (b, c):
        party.registry.begin_round(**party.times(15.5))
        assert "a" not in party.sees(15.5)
    late = make_party("late")
    exchange(late, a, 16.0)  # it still answers while it drains, and beats no more
    for t in range(16, 40, 4):
        exchange(late, b, float(t))
        exchange(c, late, float(t))
        assert "a" not in b.sees(t) | c.sees(t)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x08\x01\x0b"])
@pytest.mark.parametrize(
    "method", ["answering", "accepting", "taking", "answering_batch", "taking_batch"]
)
def test_garbage_is_a_typed_error(method: str, data: bytes) -> None:
    party = make_party("a")
    with pytest.raises(KakeyaError):
        finish(getattr(party.sync, method)(data, **party.times(0.0)))
    assert party.sees(0.0) == {"a"}


def test_an_empty_digest_is_answered_with_everything() -> None:
    a = make_party("a")
    _know(a, "x")
    answer = decode_answer(a.sync.answer(b"", **a.times(1.0)).response)
    assert len(answer.cards) == len(answer.newer) == 2
    assert np.array_equal(answer.wanted, [])
