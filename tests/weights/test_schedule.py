"""The laws of fetching pieces, played in virtual time with sources of all kinds."""

from __future__ import annotations

import heapq
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kakeya.weights.schedule import MOST_AT_ONCE, PieceSchedule, RateBound
from tests.laws import law

KINDS = ("good", "slow", "wrong", "flaky", "hangs", "partial")


class Play:
    """Fetch all pieces from sources, each with two requests at a time; what happened."""

    def __init__(self, pieces: int, kinds: list[str], have: set[int], seed: int) -> None:
        self.draw = random.Random(seed)
        self.kinds = {f"{kind}-{n}": kind for n, kind in enumerate(kinds)}
        self.have = set(have)
        self.schedule = PieceSchedule(pieces, have, first=seed % max(1, pieces))
        self.asked: Counter[str] = Counter()
        self.at_once: Counter[int] = Counter()
        self.came_twice = 0
        self.held = {
            name: {piece for piece in range(pieces) if self.draw.random() < 0.5}
            for name, kind in self.kinds.items()
            if kind == "partial"
        }
        for name in self.kinds:
            self.schedule.join(name, self.held.get(name))

    def run(self, limit_s: float = 50_000.0) -> float:
        now, order = 0.0, 0
        events = [(0.0, n, name, -1) for n, name in enumerate(list(self.kinds) * 2)]
        while events and not self.schedule.is_done:
            now, _, name, piece = heapq.heappop(events)
            assert now < limit_s, "it comes to no end"
            if piece >= 0:
                self.end(name, piece, now)
            if self.schedule.why_left(name):
                continue
            chosen = self.schedule.take(name, now)
            order += 1
            if chosen is None:
                heapq.heappush(events, (now + 0.25, order + 100, name, -1))
                continue
            self.ask(name, chosen)
            heapq.heappush(events, (now + self.took(name), order + 100, name, chosen))
        return now

    def ask(self, name: str, piece: int) -> None:
        assert piece not in self.have, "a piece that is here is not asked for"
        assert name not in self.held or piece in self.held[name], "nor one that is not there"
        self.asked[name] += 1
        self.at_once[piece] += 1
        assert self.at_once[piece] <= MOST_AT_ONCE

    def took(self, name: str) -> float:
        return {"slow": 40.0, "hangs": 10.0}.get(self.kinds[name], 0.1) * (0.5 + self.draw.random())

    def end(self, name: str, piece: int, now: float) -> None:
        kind = self.kinds[name]
        self.at_once[piece] -= 1
        if kind == "wrong":
            self.schedule.failed(name, piece, now, wrong="a wrong byte")
        elif kind == "hangs" or (kind == "flaky" and self.draw.random() < 0.5):
            self.schedule.failed(name, piece, now)
        else:
            self.came_twice += piece in self.have
            self.have.add(piece)
            self.schedule.arrived(name, piece, now)


@given(
    st.integers(0, 150),
    st.lists(st.sampled_from(KINDS), max_size=4),
    st.sets(st.integers(0, 149)),
    st.integers(0, 10_000),
)
@law(900)
def test_every_piece_comes_where_one_source_is_honest(
    pieces: int, kinds: list[str], have: set[int], seed: int
) -> None:
    play = Play(pieces, ["good", *kinds], {piece for piece in have if piece < pieces}, seed)
    play.run()
    assert play.have == set(range(pieces))
    for name, kind in play.kinds.items():
        if kind == "wrong":
            assert play.asked[name] <= 2, "it is left at its first wrong byte"


def test_a_slow_source_gets_few_pieces_and_does_not_hold_up_the_end() -> None:
    play = Play(200, ["good", "slow"], set(), 3)
    seconds = play.run()
    assert play.asked["slow-1"] <= 4
    assert seconds < 20.0 < 200 * 40.0
    assert play.came_twice == 0


def test_sources_of_one_speed_share_the_pieces() -> None:
    play = Play(400, ["good", "good"], set(), 5)
    play.run()
    assert min(play.asked.values()) > 150
    assert play.asked.total() < 410


def test_a_source_that_is_seen_again_is_asked_at_once() -> None:
    schedule = PieceSchedule(1)
    schedule.join("a", None)
    assert schedule.take("a", 0.0) == 0
    schedule.failed("a", 0, 0.0)
    assert schedule.take("a", 0.1) is None
    schedule.back("a")
    assert schedule.take("a", 0.1) == 0


def test_pieces_that_a_disk_lost_are_fetched_again() -> None:
    schedule = PieceSchedule(2, {0, 1})
    assert schedule.is_done
    schedule.again({1})
    schedule.join("a", None)
    assert schedule.take("a", 0.0) == 1


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 5)), max_size=30))
def test_a_bound_is_kept_over_any_time(turns: list[tuple[int, float]]) -> None:
    bound, now, begun = RateBound(10.0), 0.0, []
    for size, pause in turns:
        now += pause
        begun.append((now + bound.turn(size, now), size))
    for at, (first, _) in enumerate(begun):
        for last in range(at, len(begun)):
            sent = sum(size for _, size in begun[at:last])
            assert sent <= 10.0 * (begun[last][0] - first) + 1e-6
