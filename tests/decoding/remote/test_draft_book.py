from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from kakeya.core.errors import PeerError, PeerProtocol
from kakeya.decoding.draft.decoder import Decoding
from kakeya.decoding.draft.proposer import Draft, SamplingNoise
from kakeya.decoding.remote.draft_book import LEAST_ASKED, MOST_ASKED, MOST_PADDED, RemoteDraftBook
from tests.decoding.toys import VOCAB, HashModel
from tests.fakes import FakeClock


@dataclass
class Call:
    prefix: list[int]
    size: int
    began_mono: float
    clock: FakeClock
    due_mono: float
    outcome: Draft | Exception
    arrived_mono: float | None = None
    abandoned: bool = False

    def wait(self, seconds: float) -> bool:
        self.clock.advance(min(seconds, max(0.0, self.due_mono - self.clock.mono())))
        self.look()
        return self.arrived_mono is not None

    def look(self) -> None:
        if self.clock.mono() >= self.due_mono:
            self.arrived_mono = self.due_mono


class FakePeer:
    """Answers after `delay_s` of a fake clock."""

    def __init__(
        self,
        answer: Callable[[list[int], int], Sequence[int] | Draft | Exception],
        delay_s: float = 0.001,
        extended: bool = True,
    ) -> None:
        self.name = "peer"
        self.extended = extended
        self.clock = FakeClock()
        self.calls: list[Call] = []
        self.delay_s = delay_s
        self.closed = False
        self._answer = answer

    def begin(
        self, prefix: Sequence[int], size: int, *, noise: SamplingNoise | None
    ) -> Call | None:
        if self.closed:
            return None
        answer = self._answer(list(prefix), size)
        outcome = (
            answer
            if isinstance(answer, Exception | Draft)
            else Draft(source="peer", tokens=tuple(answer), confidence=(0.9,) * len(answer))
        )
        now = self.clock.mono()
        call = Call(list(prefix), size, now, self.clock, now + self.delay_s, outcome)
        self.calls.append(call)
        return call

    def finish(self, pending: Call) -> Draft:
        if isinstance(pending.outcome, Exception):
            raise pending.outcome
        return pending.outcome

    def abandon(self, pending: Call) -> None:
        pending.abandoned = True

    def prepare(self, prefix: Sequence[int], *, noise: SamplingNoise | None) -> None:
        self.prepared = list(prefix)

    def leave(self) -> None:
        self.left = True

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for call in self.calls:
            call.look()


def counting(prefix: list[int], size: int) -> list[int]:
    return [prefix[-1] + 1 + at for at in range(size)]


def test_the_first_poll_waits_within_its_budget_and_gets_the_draft():
    book = RemoteDraftBook(FakePeer(counting))
    draft = book.poll([1, 2], 4, wait_s=0.01)
    assert draft.tokens == (3, 4, 5, 6)
    assert draft.confidence == (0.9,) * 4
    assert draft.source == "peer"


def test_without_a_budget_the_answer_serves_a_later_step():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    assert book.poll([1, 2], 4, wait_s=0).tokens == ()
    peer.pass_time(0.002)
    assert book.poll([1, 2, 3], 4, wait_s=0).tokens == (4, 5, 6, 7)
    assert len(peer.calls) == 1


def test_never_waits_longer_than_it_may():
    peer = FakePeer(counting, delay_s=5.0)
    book = RemoteDraftBook(peer)
    history = [1]
    for _ in range(10):
        before = peer.clock.mono()
        assert book.poll(history, 4, wait_s=0.01).tokens == ()
        assert peer.clock.mono() - before <= 0.0101
        history.append(history[-1] + 1)


def test_does_not_wait_for_what_will_not_come_in_time():
    peer = FakePeer(counting, delay_s=0.05)
    book = RemoteDraftBook(peer)
    book.poll([1], 4, wait_s=0.1)
    before = peer.clock.mono()
    assert book.poll([77], 4, wait_s=0.01).tokens == ()
    assert peer.clock.mono() == before


def test_while_the_history_follows_no_new_call_is_made():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    history = [1, 2]
    first = book.poll(history, 4, wait_s=1)
    history += [*first.tokens, first.tokens[-1] + 1]
    assert book.poll(history, 4, wait_s=0).tokens == (8, 9, 10, 11)
    assert len(peer.calls) == 1


@pytest.mark.parametrize("is_right", [True, False])
def test_an_answer_that_comes_after_its_step_is_judged_though_nobody_asks_again(is_right) -> None:
    """A peer that is asked once and answers late is still seen to be good, or bad."""
    peer = FakePeer(counting, delay_s=0.05)
    book = RemoteDraftBook(peer)
    history = [1, 2]
    assert book.poll(history, 4, wait_s=0).tokens == ()
    late = []
    for _ in range(40):
        peer.pass_time(0.01)
        history.append(history[-1] + 1 if is_right else 50)
        book.follow(history)
        late += book.take_late()
    ((base, draft),) = late
    assert (base, draft.tokens[:3]) == (2, (3, 4, 5))
    assert len(peer.calls) == 1, "what is not in use is not asked for"


def test_a_contradicted_draft_is_dropped_and_asked_for_anew():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    book.poll([1, 2], 4, wait_s=1)
    assert book.poll([1, 2, 3, 50], 2, wait_s=1).tokens == (51, 52)
    assert peer.calls[-1].prefix == [1, 2, 3, 50]


def test_asks_ahead_as_if_the_block_stood():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    history = [1]
    block = book.poll(history, 12, wait_s=1).tokens
    book.ahead(history, block)
    assert peer.calls[-1].prefix == [1, *block]
    peer.pass_time(0.01)
    history += [*block, block[-1] + 1]
    assert book.poll(history, 4, wait_s=0).tokens == tuple(range(15, 19))


def test_a_wrong_assumption_is_stale_and_given_up():
    peer = FakePeer(counting, delay_s=0.01)
    book = RemoteDraftBook(peer)
    block = book.poll([1], 12, wait_s=1).tokens
    book.ahead([1], block)
    assert book.poll([1, 2, 3, 99], 4, wait_s=0).tokens == ()
    assert peer.calls[1].abandoned
    assert book.counts.stale == 1


def test_a_stale_answer_that_has_arrived_is_dropped_too():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    block = book.poll([1], 12, wait_s=1).tokens
    book.ahead([1], block)
    peer.pass_time(1)
    assert book.poll([1, 2, 99], 4, wait_s=0).tokens == ()
    assert book.counts.stale == 1


def test_a_draft_that_came_too_late_can_still_be_scored():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    book.poll([1, 2], 4, wait_s=0)
    peer.pass_time(1)
    book.poll([1, 2, 3, 99], 4, wait_s=0)
    assert book.counts.late == 1
    ((base, draft),) = book.take_late()
    assert base == 2
    assert draft.tokens[:2] == (3, 4)
    assert book.take_late() == []


def test_a_contradiction_is_answered_with_a_request_at_once():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    book.follow([1, 2])
    assert not peer.calls
    book.poll([1, 2], 4, wait_s=1)
    book.follow([1, 2, 3])
    assert len(peer.calls) == 1
    book.follow([1, 2, 3, 99])
    assert peer.calls[-1].prefix == [1, 2, 3, 99]
    peer.pass_time(0.01)
    assert book.poll([1, 2, 3, 99], 2, wait_s=0).tokens == (100, 101)


def test_another_history_gets_nothing_that_was_meant_for_this_one():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    book.poll([1, 2, 3, 4], 2, wait_s=1)
    assert book.poll([9, 9, 9, 4], 2, wait_s=0).tokens == ()
    assert book.poll([1, 2], 2, wait_s=0).tokens == ()


def test_asks_for_more_while_drafts_hold_and_for_less_after_one_failed():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    history = [1]
    for _ in range(30):
        block = book.poll(history, 8, wait_s=1).tokens
        book.ahead(history, block)
        history += [*block, history[-1] + len(block) + 1]
    assert peer.calls[0].size == LEAST_ASKED
    assert peer.calls[-1].size == MOST_ASKED
    history.append(500)
    book.poll(history, 8, wait_s=1)
    history.append(700)
    book.poll(history, 8, wait_s=1)
    assert peer.calls[-1].size == LEAST_ASKED


def test_of_a_peer_that_pads_only_short_blocks_are_asked():
    peer = FakePeer(counting, extended=False)
    book = RemoteDraftBook(peer)
    history = [1]
    for _ in range(20):
        block = book.poll(history, 4, wait_s=1).tokens
        book.ahead(history, block)
        history += block
    assert {call.size for call in peer.calls} == {MOST_PADDED}


def test_a_peer_that_abstains_is_asked_less_and_less():
    peer = FakePeer(lambda prefix, size: [])
    book = RemoteDraftBook(peer)
    history = [1]
    for _ in range(300):
        assert book.poll(history, 4, wait_s=0.01).tokens == ()
        history.append(1)
    assert book.counts.abstained == len(peer.calls) <= 16


@pytest.mark.parametrize(
    ("failure", "counted"),
    [(PeerError("gone"), "failed"), (PeerProtocol("garbage"), "malformed")],
)
def test_a_failing_peer_is_counted_and_never_raises(failure, counted):
    book = RemoteDraftBook(FakePeer(lambda prefix, size: failure))
    assert book.poll([1], 4, wait_s=1).tokens == ()
    assert getattr(book.counts, counted) == 1


def test_a_peer_behind_an_open_breaker_is_not_waited_for():
    peer = FakePeer(counting)
    peer.closed = True
    book = RemoteDraftBook(peer)
    before = peer.clock.mono()
    assert book.poll([1], 4, wait_s=1).tokens == ()
    book.ahead([1], (2, 3))
    assert peer.clock.mono() == before


def test_closing_gives_up_what_is_under_way():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    book.poll([1], 4, wait_s=0)
    book.close()
    assert peer.calls[0].abandoned


@pytest.mark.parametrize("delay_s", [0.0, 0.0015, 0.01, 0.1])
@pytest.mark.parametrize("quality", [1.0, 0.8, 0.3])
def test_whenever_answers_come_the_tokens_are_those_of_plain_decoding(delay_s, quality):
    model = HashModel()
    rng = random.Random(4)

    def answer(prefix: list[int], size: int) -> list[int] | Exception:
        if rng.random() < 0.1:
            return PeerError("now and then")
        return [
            token if rng.random() < quality else rng.randrange(VOCAB)
            for token in model.plain(prefix, size)
        ]

    peer = FakePeer(answer, delay_s)
    book = RemoteDraftBook(peer)
    state = Decoding([1, 2, 3], max_tokens=150, stop_token_ids=frozenset(), context_tokens=999)
    while state.finish is None:
        size = min(6, state.room())
        draft = book.poll(state.history, size, wait_s=0.002).tokens if size else ()
        assert len(draft) <= size
        if draft:
            book.ahead(state.history, draft)
        peer.pass_time(0.001)
        state.commit(draft, model.verify(state.history, draft))
    assert state.history[3:] == model.plain([1, 2, 3], 150)
    assert len(book._late) <= 8
    if quality == 1.0 and delay_s < 0.002:
        assert model.forwards < 50


def test_the_round_trip_is_hidden_where_drafts_hold():
    """Answers arrive while the verifier works: after the first, no step waits."""
    peer = FakePeer(counting, delay_s=0.004)
    book = RemoteDraftBook(peer)
    history = [1]
    waits = []
    for _ in range(40):
        before = peer.clock.mono()
        block = book.poll(history, 8, wait_s=0.02).tokens
        waits.append(peer.clock.mono() - before)
        book.ahead(history, block)
        peer.pass_time(0.005)
        history += [*block, history[-1] + len(block) + 1]
    assert sum(wait > 0 for wait in waits) == 1
    assert len(history) == 1 + 40 * 9


def test_what_is_prepared_is_asked_before_the_first_poll():
    peer = FakePeer(counting)
    book = RemoteDraftBook(peer)
    book.prepare([1, 2])
    peer.pass_time(0.002)
    assert book.poll([1, 2], 4, wait_s=0).tokens == (3, 4, 5, 6)
    assert peer.prepared == [1, 2]
    assert len(peer.calls) == 1
    book.close()
    assert peer.left


def test_a_looked_up_draft_is_better_supported_the_more_of_it_came_true():
    peer = FakePeer(lambda prefix, size: Draft(source="p", tokens=(7,) * size, match_length=3))
    book = RemoteDraftBook(peer)
    history = [1]
    assert book.poll(history, 4, wait_s=1).match_length == 3
    history += [7] * 5
    assert book.poll(history, 4, wait_s=1).match_length == 8
    assert len(peer.calls) == 1


def test_of_a_look_up_the_most_is_asked_at_once():
    """It costs the peer as much for one token as for many; a draft model pays for each."""
    for match_length, asked in ((3, [LEAST_ASKED, MOST_ASKED]), (0, [LEAST_ASKED, LEAST_ASKED])):
        peer = FakePeer(
            lambda prefix, size, known=match_length: Draft(
                source="p", tokens=(7,) * size, match_length=known
            )
        )
        book = RemoteDraftBook(peer)
        book.poll([1], 4, wait_s=1)
        book.poll([1, 9], 4, wait_s=1)
        assert [call.size for call in peer.calls] == asked
