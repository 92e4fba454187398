"""The book of doubts: what makes one, what ends it, and what the fleet is told."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kakeya.fleet.view.suspicion import (
    MAX_ACCUSATIONS,
    Doubt,
    Sign,
    Suspicions,
    is_refuted,
    judge,
    sign_of,
)
from tests.fleet.nodes import make_card

X = "x:50051"
CARD = make_card("x")


def accused_book(at: float = 10.0, beat: int = 0) -> Suspicions:
    book = Suspicions()
    book.fail(X, CARD, at)
    assert book.settle(CARD, sign_of(CARD, beat), Doubt.FLEET_WIDE, at)
    return book


# --- verdicts


@pytest.mark.parametrize(
    ("answers", "doubt"),
    [
        ([], Doubt.FLEET_WIDE),
        ([False, False, False], Doubt.FLEET_WIDE),
        ([False], Doubt.FLEET_WIDE),
        ([False, None, False], Doubt.FLEET_WIDE),
        ([None, False, None], Doubt.UNJUDGED),
        ([False, None], Doubt.UNJUDGED),
        ([None, None, None], Doubt.UNJUDGED),
        ([False, True, None], Doubt.ASYMMETRIC),
    ],
)
def test_a_verdict_needs_somebody_who_answered(answers: list[bool | None], doubt: Doubt) -> None:
    assert judge(answers) is doubt


def test_only_a_fleet_wide_verdict_is_told() -> None:
    book = Suspicions()
    for doubt in (Doubt.UNJUDGED, Doubt.ASYMMETRIC):
        book.fail(X, CARD, 10.0)
        assert not book.settle(CARD, sign_of(CARD), doubt, 10.0)
        assert book.doubt_of(X) is doubt
        assert book.accusations() == ()
    assert book.settle(CARD, sign_of(CARD, 3), Doubt.FLEET_WIDE, 11.0)
    assert not book.settle(CARD, sign_of(CARD, 3), Doubt.FLEET_WIDE, 12.0)
    assert book.accusations() == (sign_of(CARD, 3),)


def test_one_forgiven_miss_stays_forgiven_when_others_reach_the_node() -> None:
    book = Suspicions()
    book.miss(X, CARD, 10.0)
    book.settle(CARD, sign_of(CARD), Doubt.ASYMMETRIC, 11.0)
    assert not book.has(X)


def test_an_answer_ends_every_doubt() -> None:
    book = accused_book()
    book.clear(X)
    assert not book.has(X)
    assert book.accusations() == ()


# --- signs of life


def test_a_later_beat_takes_the_accusation_back_and_has_the_edge_looked_at() -> None:
    book = accused_book(at=10.0)
    told: list[str] = []
    book.subscribe(told.append)
    book.hear(CARD, beat=7, lived_at=10.5)
    assert book.accusations() == ()
    assert book.doubt_of(X) is Doubt.UNJUDGED
    assert told == [X]


def test_a_beat_from_before_the_failure_changes_only_what_the_accusation_names() -> None:
    book = accused_book(at=10.0, beat=6)
    book.hear(CARD, beat=7, lived_at=9.5)
    assert book.doubt_of(X) is Doubt.FLEET_WIDE
    assert book.accusations() == (sign_of(CARD, 7),)


def test_an_unjudged_doubt_ends_with_a_later_beat_unless_it_is_being_judged() -> None:
    book = Suspicions()
    book.fail(X, CARD, 10.0)
    book.hold(X)
    book.hear(CARD, beat=1, lived_at=11.0)
    assert book.has(X)
    book.release(X)
    book.hear(CARD, beat=2, lived_at=12.0)
    assert not book.has(X)


def test_beats_never_end_a_doubt_about_the_edge_alone() -> None:
    """Row 6: the node that cannot be dialled beats on, and the edge must not flap."""
    book = Suspicions()
    book.fail(X, CARD, 10.0)
    book.settle(CARD, sign_of(CARD), Doubt.ASYMMETRIC, 10.0)
    for beat in range(100):
        book.hear(CARD, beat=beat, lived_at=11.0 + beat)
        assert book.doubt_of(X) is Doubt.ASYMMETRIC


@pytest.mark.parametrize("doubt", list(Doubt))
def test_a_restart_ends_every_doubt_whatever_the_clocks_say(doubt: Doubt) -> None:
    book = Suspicions()
    book.fail(X, CARD, 10.0)
    book.settle(CARD, sign_of(CARD), doubt, 10.0)
    book.hear(make_card("x", incarnation=2), lived_at=1.0)
    assert not book.has(X)
    assert book.accusations() == ()


def test_a_node_that_moved_is_not_judged_by_its_old_address() -> None:
    book = accused_book()
    book.hear(make_card("x", address="y:1"), lived_at=9.0)
    assert not book.has(X)
    assert book.accusations() == ()


def test_another_node_at_the_address_does_not_inherit_the_verdict() -> None:
    book = accused_book()
    book.fail(X, make_card("z", address=X), 20.0)
    assert book.doubt_of(X) is Doubt.UNJUDGED
    assert book.accusations() == ()


@pytest.mark.parametrize("doubt", list(Doubt))
def test_who_claims_the_address_of_a_dead_node_does_not_bring_it_back(doubt: Doubt) -> None:
    book = Suspicions()
    book.fail(X, CARD, 10.0)
    book.settle(CARD, sign_of(CARD), doubt, 10.0)
    book.hear(make_card("hostile", address=X, incarnation=9), beat=5, lived_at=20.0)
    assert book.doubt_of(X) is doubt
    assert len(book.accusations()) == (doubt is Doubt.FLEET_WIDE)


def test_after_a_sleep_everybody_is_doubted_until_it_is_heard_of() -> None:
    """Row 12."""
    book = Suspicions()
    cards = [make_card(name) for name in "abc"]
    told: list[str] = []
    book.subscribe(told.append)
    book.suspect_all(cards, 1800.0)
    assert told == []  # a look at everybody at once would be a storm
    assert [book.has(card.grpc_address) for card in cards] == [True] * 3
    assert book.accusations() == ()
    book.hear(cards[0], beat=1, lived_at=1799.0)
    book.hear(cards[1], beat=1, lived_at=1801.0)
    book.clear(cards[2].grpc_address)
    assert [book.has(card.grpc_address) for card in cards] == [True, False, False]


@dataclass(frozen=True)
class _Beat:
    number: int
    lived_at: float
    heard_at: float


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[float], list[_Beat]]:
    """Times of own failed probes; beats, each heard at some time after it was beaten."""
    failed = draw(st.lists(st.integers(0, 100), max_size=5, unique=True))
    lived = sorted(draw(st.lists(st.integers(0, 100), max_size=8, unique=True)))
    beats = [
        _Beat(number, at + 0.5, at + 0.5 + draw(st.integers(0, 60)))
        for number, at in enumerate(lived, start=1)
    ]
    return [float(at) for at in failed], beats


@given(histories())
def test_the_verdict_depends_on_what_happened_and_not_on_the_order_of_hearing(
    history: tuple[list[float], list[_Beat]],
) -> None:
    failed, beats = history
    book = Suspicions()
    held = 0
    events: list[tuple[float, _Beat | None]] = [(at, None) for at in failed]
    events += [(beat.heard_at, beat) for beat in beats]
    for at, beat in sorted(events, key=lambda entry: entry[0]):
        if beat is None:
            book.fail(X, CARD, at)
            book.settle(CARD, sign_of(CARD, held), Doubt.FLEET_WIDE, at)
        elif beat.number > held:  # the registry passes on nothing else
            held = beat.number
            book.hear(CARD, beat=beat.number, lived_at=beat.lived_at)
    is_silent = bool(failed) and max(failed) > max((beat.lived_at for beat in beats), default=-1.0)
    assert book.accusations() == ((sign_of(CARD, held),) if is_silent else ())


# --- accusations


def test_what_is_held_refutes_an_accusation_of_an_earlier_sign() -> None:
    said = Sign("x", 2, 7, 5)
    assert not is_refuted(said, said)
    assert is_refuted(said, said._replace(beat=6))
    assert not is_refuted(said, said._replace(beat=4))
    assert is_refuted(said, said._replace(incarnation=3, key=8, beat=0))
    assert not is_refuted(said, said._replace(incarnation=1, key=6, beat=9))
    assert not is_refuted(said, said._replace(key=6, beat=9))  # cards without an order


def test_the_newest_accusations_are_told_and_not_more_than_fit() -> None:
    book = Suspicions()
    for at in range(MAX_ACCUSATIONS + 10):
        card = make_card(f"n{at}")
        book.settle(card, sign_of(card), Doubt.FLEET_WIDE, float(at))
    told = [sign.node_id for sign in book.accusations()]
    assert told == [f"n{at}" for at in reversed(range(10, MAX_ACCUSATIONS + 10))]


NODES = st.sampled_from([make_card(name) for name in "abc"])
TIMES = st.integers(0, 50).map(float)


class BookMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, doubts and accusations agree, and none is made up."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Suspicions()
        self.failed: set[str] = set()
        self.convicted: set[str] = set()

    @rule(card=NODES, at=TIMES)
    def fail(self, card, at):  # type: ignore[no-untyped-def]
        self.book.fail(card.grpc_address, card, at)
        self.failed.add(card.grpc_address)

    @rule(card=NODES, at=TIMES)
    def miss(self, card, at):  # type: ignore[no-untyped-def]
        self.book.miss(card.grpc_address, card, at)
        self.failed.add(card.grpc_address)

    @rule(card=NODES)
    def answer(self, card):  # type: ignore[no-untyped-def]
        self.book.clear(card.grpc_address)
        assert not self.book.has(card.grpc_address)
        self.failed.discard(card.grpc_address)
        self.convicted.discard(card.node_id)

    @rule(card=NODES, doubt=st.sampled_from(Doubt), at=TIMES, beat=st.integers(0, 9))
    def settle(self, card, doubt, at, beat):  # type: ignore[no-untyped-def]
        self.book.settle(card, sign_of(card, beat), doubt, at)
        if doubt is Doubt.FLEET_WIDE:
            self.failed.add(card.grpc_address)
            self.convicted.add(card.node_id)

    @rule(card=NODES, at=TIMES, beat=st.integers(0, 9))
    def hear(self, card, at, beat):  # type: ignore[no-untyped-def]
        self.book.hear(card, beat=beat, lived_at=at)

    @rule(card=NODES, is_held=st.booleans())
    def hold(self, card, is_held):  # type: ignore[no-untyped-def]
        (self.book.hold if is_held else self.book.release)(card.grpc_address)

    @rule(cards=st.sets(NODES))
    def keep(self, cards):  # type: ignore[no-untyped-def]
        self.book.keep_only({card.grpc_address for card in cards})
        assert set(self.book.doubted()) <= {card.grpc_address for card in cards}

    @invariant()
    def agrees(self) -> None:
        told = {sign.node_id for sign in self.book.accusations()}
        doubts = {address: self.book.doubt_of(address) for address in self.book.doubted()}
        wide = {a.partition(":")[0] for a, doubt in doubts.items() if doubt is Doubt.FLEET_WIDE}
        assert told == wide
        assert told <= self.convicted
        assert set(doubts) <= self.failed


TestBook = BookMachine.TestCase
