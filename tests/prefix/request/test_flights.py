"""Nothing is computed twice, nobody waits for ever, and nobody urgent waits for what can wait."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.decoding.draft.acceptance import agreeing
from kakeya.prefix.names.blocks import BlockChain, BlockId
from kakeya.prefix.names.pieces import Piece, pieces_of
from kakeya.prefix.request.flights import (
    UNASKED_S,
    Flights,
    Lead,
    Patience,
    PrefixFlight,
    WaitUntil,
)

CHAIN = BlockChain(bytes(32), 4)
PATIENCE = Patience(fair_s=10.0, brisk_s=1.0, least_shared=2)
NORMAL, SPECULATIVE = 2, 5


def cut(*tokens: int) -> tuple[Piece, ...]:
    return pieces_of(CHAIN, [*tokens, 0])


def test_pieces_are_whole_blocks_and_a_tail_and_leave_the_last_token() -> None:
    pieces = pieces_of(CHAIN, list(range(11)))
    assert [piece.tokens for piece in pieces] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [piece.parent for piece in pieces] == [None, pieces[0].id, pieces[1].id]
    assert [piece.is_tail for piece in pieces] == [False, False, True]
    assert [piece.index for piece in pieces] == [0, 1, 2]
    assert pieces_of(CHAIN, [7]) == pieces_of(CHAIN, []) == ()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.sampled_from((1, 2, 4, 8)))
def test_pieces_together_are_the_history(tokens: list[int], size: int) -> None:
    pieces = pieces_of(BlockChain(bytes(32), size), tokens)
    assert [token for piece in pieces for token in piece.tokens] == tokens[:-1]
    assert all(len(piece.tokens) == size for piece in pieces if not piece.is_tail)


class Here:
    """The pieces that are in pages, and what others share with one that is not."""

    def __init__(self) -> None:
        self.pieces: dict[BlockId, Piece] = {}

    def missing(self, pieces: Sequence[Piece]) -> tuple[list[Piece], int]:
        missing = [piece for piece in pieces if piece.id not in self.pieces]
        if not missing:
            return [], 0
        first = missing[0]
        siblings = [one for one in self.pieces.values() if one.parent == first.parent]
        shared = max((agreeing(one.tokens, first.tokens) for one in siblings), default=0)
        return (missing[1:], 0) if shared == len(first.tokens) else (missing, shared)


def join(flights: Flights, urgency: int = NORMAL, *, can_yield: bool = False) -> PrefixFlight:
    return flights.join("model", bytes(32), urgency=urgency, can_yield=can_yield, now=0.0)


def stand(
    flights: Flights, flight: PrefixFlight, pieces: Sequence[Piece], now: float = 0.0, here: int = 0
) -> Lead | WaitUntil:
    return flights.stand(flight, pieces, here, PATIENCE, now)


def test_of_several_with_one_prompt_the_first_leads_and_the_others_wait() -> None:
    flights, pieces = Flights(), cut(*range(10))
    leader, *others = (join(flights) for _ in range(4))
    assert stand(flights, leader, pieces) == Lead(pieces)
    for other in others:
        standing = stand(flights, other, pieces)
        assert isinstance(standing, WaitUntil)
        assert standing.leader is leader


def test_what_another_one_brings_of_our_text_is_waited_for_and_the_rest_is_ours() -> None:
    flights = Flights()
    one, two = join(flights), join(flights)
    first, second = cut(*range(8), 50, 51, 52, 53, 54), cut(*range(8), 50, 51, 60)
    stand(flights, one, first)
    assert isinstance(stand(flights, two, second), WaitUntil)
    flights.landed(first[0].id, 0.0)
    flights.landed(first[1].id, 0.0)
    # Half of the next block is common, and on its way.
    assert isinstance(stand(flights, two, second[2:]), WaitUntil)
    flights.landed(first[2].id, 0.0)
    assert stand(flights, two, second[2:], here=2) == Lead(second[2:])


def test_texts_that_begin_with_a_few_equal_tokens_do_not_wait_for_each_other() -> None:
    flights = Flights()
    stand(flights, join(flights), cut(1, 2, 3, 4))
    other = cut(1, 20, 30, 40)
    assert stand(flights, join(flights), other) == Lead(other)


def test_texts_of_other_models_share_nothing_though_they_begin_alike() -> None:
    flights = Flights()
    stand(flights, join(flights), cut(1, 2, 3, 4))
    chain = BlockChain(b"x" * 32, 4)
    other = flights.join("model", chain.seed, urgency=NORMAL, can_yield=False, now=0.0)
    pieces = pieces_of(chain, [1, 2, 3, 5, 0])
    assert stand(flights, other, pieces) == Lead(pieces)


@pytest.mark.parametrize("end", ["leaves", "gives up"])
def test_when_a_leader_goes_the_next_one_leads(end: str) -> None:
    flights, pieces = Flights(), cut(*range(8))
    leader, other = join(flights), join(flights)
    stand(flights, leader, pieces)
    assert isinstance(stand(flights, other, pieces), WaitUntil)
    if end == "leaves":
        flights.leave(leader)
        flights.leave(leader)
    else:
        flights.give_up(leader, tuple(leader.claims))
    assert stand(flights, other, pieces) == Lead(pieces)


def test_a_leader_that_shows_nothing_is_followed_by_another_one() -> None:
    flights, pieces = Flights(), cut(*range(8))
    leader, other, third = join(flights), join(flights), join(flights)
    stand(flights, leader, pieces)
    flights.asked(leader, 0.0)
    assert stand(flights, other, pieces, now=0.0) == WaitUntil(leader, 10.0)
    flights.heard(leader, 9.0)
    assert stand(flights, other, pieces, now=10.0) == WaitUntil(leader, 19.0)
    assert stand(flights, other, pieces, now=19.0) == Lead(pieces)
    standing = stand(flights, third, pieces, now=19.0)
    assert isinstance(standing, WaitUntil)
    assert standing.leader is other
    # He comes back, and is first after all.
    flights.landed(pieces[0].id, 20.0)
    assert pieces[0].id not in other.claims
    assert flights.takeovers == 1


def test_a_leader_on_his_way_to_his_engine_is_given_time_for_it() -> None:
    flights, pieces = Flights(), cut(*range(8))
    leader, other = join(flights), join(flights)
    stand(flights, leader, pieces)
    assert stand(flights, other, pieces) == WaitUntil(leader, UNASKED_S)


def test_a_leader_in_the_line_of_a_busy_engine_is_not_stalled() -> None:
    flights, pieces = Flights(), cut(*range(8))
    leader, other, busy = join(flights), join(flights), join(flights)
    stand(flights, leader, pieces)
    flights.asked(leader, 0.0)
    flights.heard(busy, 9.0)
    assert stand(flights, other, pieces, now=10.0) == WaitUntil(leader, 19.0)
    flights.heard(busy, 39.0)
    # But if nobody reads his answers, he is.
    assert stand(flights, other, pieces, now=40.0) == Lead(pieces)


def test_a_request_takes_over_from_what_is_computed_for_nobody() -> None:
    flights, pieces = Flights(), cut(*range(12))
    warming = join(flights, SPECULATIVE, can_yield=True)
    stand(flights, warming, pieces)
    flights.landed(pieces[0].id, 0.0)
    request = join(flights)
    assert stand(flights, request, pieces[1:]) == Lead(pieces[1:], (warming,))
    assert warming.is_superseded
    assert not warming.claims
    # It comes back to wait like others.
    standing = stand(flights, warming, pieces[1:])
    assert isinstance(standing, WaitUntil)
    assert standing.leader is request
    assert not warming.is_superseded


def test_warming_waits_for_requests_and_for_other_warming() -> None:
    flights, pieces = Flights(), cut(*range(8))
    request = join(flights)
    stand(flights, request, pieces)
    for _ in range(2):
        standing = stand(flights, join(flights, SPECULATIVE, can_yield=True), pieces)
        assert isinstance(standing, WaitUntil)
        assert standing.leader is request


def test_a_less_urgent_answer_is_waited_for_as_long_as_it_is_brisk() -> None:
    flights, pieces = Flights(), cut(*range(12))
    batch, request = join(flights, 4), join(flights)
    stand(flights, batch, pieces)
    flights.asked(batch, 0.0)
    assert stand(flights, request, pieces) == WaitUntil(batch, 1.0)
    flights.heard(request, 0.9)  # the engine works, but not for him
    assert stand(flights, request, pieces, now=1.0) == Lead(pieces)
    assert not batch.is_superseded


def test_who_waits_gives_up_what_it_claimed() -> None:
    flights, pieces = Flights(), cut(*range(12))
    one, two = join(flights), join(flights)
    stand(flights, one, pieces)
    flights.asked(one, 0.0)
    stand(flights, two, pieces[:2], now=100.0)  # it stalled
    assert set(one.claims) == {pieces[2].id}
    assert isinstance(stand(flights, one, pieces, now=100.0), WaitUntil)
    assert not one.claims


@dataclass(eq=False)
class Request:
    pieces: tuple[Piece, ...]
    flight: PrefixFlight
    is_asked: bool = False
    todo: list[Piece] = field(default_factory=list)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 8), st.booleans())
def test_nothing_is_computed_twice_and_everybody_ends(seed: int, count: int, dies: bool) -> None:
    """Requests with common beginnings, leaders that die: each piece that was needed is computed
    once and once more for each death at most; shared beginnings of blocks too."""
    rng, flights, here = random.Random(seed), Flights(), Here()
    stems = [[rng.randrange(3) for _ in range(rng.randrange(12))] for _ in range(2)]
    texts = [
        rng.choice(stems) + [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        for _ in range(count)
    ]
    waiting = [
        Request(
            pieces_of(CHAIN, [*text, 0]),
            join(flights, rng.choice((NORMAL, SPECULATIVE)), can_yield=rng.random() < 0.3),
        )
        for text in texts
    ]
    computed: Counter[BlockId] = Counter()
    deaths = 0
    for _ in range(2000):
        if not waiting:
            break
        request = rng.choice(waiting)
        flight = request.flight
        if not request.is_asked or flight.is_superseded:
            missing, shared = here.missing(request.pieces)
            standing = flights.stand(flight, missing, shared, PATIENCE, 0.0)
            check(flights, waiting)
            if isinstance(standing, WaitUntil):
                assert not flight.claims
                assert standing.leader is not flight
                assert standing.leader.claims
                request.is_asked = False
                continue
            request.is_asked, request.todo = True, list(standing.claimed)
        elif request.todo and dies and rng.random() < 0.1:
            deaths += 1
            flights.leave(flight)
            request.flight, request.is_asked = join(flights), False
        elif request.todo:
            piece = request.todo.pop(0)
            computed[piece.id] += 1
            here.pieces[piece.id] = piece
            flights.landed(piece.id, 0.0)
        else:
            flights.leave(flight)
            waiting.remove(request)
        check(flights, waiting)
    assert not waiting
    assert not len(flights)
    assert all(times == 1 for times in computed.values()), (computed, deaths)


def check(flights: Flights, requests: Sequence[Request]) -> None:
    """Each claim has one owner, who is on his way."""
    owners: Counter[BlockId] = Counter()
    for request in requests:
        for block_id in request.flight.claims:
            owners[block_id] += 1
            assert flights.leader(block_id) is request.flight
    assert all(times == 1 for times in owners.values())
