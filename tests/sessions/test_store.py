"""Who may have a session, for how long, and one operation at a time."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kakeya.core.errors import CapacityExhausted, Conflict, InvariantBroken, NotFound, Refused
from kakeya.generation.facts import ModelFacts
from kakeya.sessions.store import SessionLimits, SessionStore
from tests.fakes import FakeClock
from tests.laws import laws_of
from tests.sessions.toy import HashServedModel

FACTS = ModelFacts(
    model_id="toy", model_path="", vocab_size=97, context_tokens=64, eos_token_ids=(0,)
)
MODEL = HashServedModel()


def new_store(clock, **limits):
    return SessionStore(clock=clock, rng=random.Random(1), limits=SessionLimits(**limits))


def create(store):
    return store.create(MODEL, FACTS, stop_token_ids=frozenset(), label="").session_id


def test_unknown_closed_and_expired_ids_are_told_the_same_sentence():
    clock = FakeClock()
    store = new_store(clock)
    closed, expired = create(store), create(store)
    store.close(closed)
    clock.advance(1800.0)
    sentences = set()
    for session_id in (closed, expired, "ses-never"):
        with pytest.raises(NotFound) as failure:
            store.get(session_id)
        sentences.add(failure.value.message.replace(session_id, "ID"))
        with pytest.raises(NotFound):
            store.close(session_id)
    assert sentences == {"no session 'ID': it was never created here, was closed or expired"}


def test_idle_time_begins_when_an_operation_ends_and_reaches_the_ttl_inclusively():
    clock = FakeClock()
    store = new_store(clock, idle_ttl_s=100.0)
    session_id = create(store)
    with store.operation(session_id, "Generate"):
        clock.advance(1000.0)
        assert store.expired(clock.mono()) == ()
        assert store.sweep() == ()
        assert store.get(session_id).idle_s(clock.mono()) == 0.0
    clock.advance(99.9)
    assert store.expired(clock.mono()) == ()
    clock.advance(0.1)
    assert [s.session_id for s in store.sweep()] == [session_id]
    assert (store.counts.active, store.counts.expired) == (0, 1)


def test_a_full_store_refuses_and_evicts_nobody():
    clock = FakeClock()
    store = new_store(clock, capacity=2)
    first, second = create(store), create(store)
    with pytest.raises(CapacityExhausted, match="all 2 sessions") as failure:
        create(store)
    assert failure.value.retry_after_s == 1800.0
    assert [s.session_id for s in store.sessions()] == [first, second]
    store.close(first)
    create(store)


def test_a_second_operation_is_a_conflict_that_names_the_first():
    store = new_store(FakeClock())
    session_id = create(store)
    with store.operation(session_id, "Generate"):
        with pytest.raises(Conflict, match="busy with Generate: AppendTokens can run once"):
            with store.operation(session_id, "AppendTokens"):
                pass
        with pytest.raises(Conflict, match="busy with Generate: cancel that, then close"):
            store.close(session_id)
    with store.operation(session_id, "AppendTokens"):
        pass


def test_a_broken_law_fails_the_session_and_frees_its_history():
    store = new_store(FakeClock())
    session_id = create(store)

    def break_a_law():
        with store.operation(session_id, "Generate") as session:
            session.append([1, 2, 3])
            raise InvariantBroken("cache_length", "3 != 4")

    with pytest.raises(InvariantBroken, match="cache_length: 3 != 4"):
        break_a_law()
    with pytest.raises(InvariantBroken, match="begin a new session"):
        with store.operation(session_id, "AppendTokens"):
            pass
    failed = store.get(session_id)
    assert (failed.cache_length_violations, failed.position_violations) == (1, 0)
    assert failed.history_length == 0
    assert store.counts.failed == 1
    store.close(session_id)


def test_a_random_source_that_repeats_itself_is_refused():
    class Stuck(random.Random):
        def choice(self, letters):
            return letters[0]

    store = SessionStore(clock=FakeClock(), rng=Stuck(), limits=SessionLimits())
    create(store)
    with pytest.raises(Refused, match="repeats itself"):
        create(store)


class StoreMachine(RuleBasedStateMachine):
    """Any interleaving of creations, operations, closes and time."""

    idle = Bundle("idle")
    busy = Bundle("busy")

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.store = new_store(self.clock, capacity=4, idle_ttl_s=100.0)
        self.touched = {}

    def lives(self, session_id):
        return self.clock.mono() - self.touched[session_id] < 100.0

    @rule(target=idle)
    def create(self):
        held = len(self.store.sessions())
        try:
            session_id = create(self.store)
        except CapacityExhausted:
            assert held == 4
            return "refused"
        self.touched[session_id] = self.clock.mono()
        return session_id

    @rule(target=busy, session_id=consumes(idle))
    def begin(self, session_id):
        if session_id == "refused" or not self.lives(session_id):
            with pytest.raises(NotFound):
                self.store.get(session_id)
            return None
        operation = self.store.operation(session_id, "Generate")
        operation.__enter__()
        self.touched[session_id] = float("inf")
        return session_id, operation

    @rule(target=idle, held=consumes(busy))
    def end(self, held):
        if held is None:
            return "refused"
        session_id, operation = held
        operation.__exit__(None, None, None)
        self.touched[session_id] = self.clock.mono()
        return session_id

    @rule(seconds=st.floats(0.0, 150.0))
    def pass_time(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def sweep(self):
        gone = self.store.sweep()
        assert all(not self.lives(session.session_id) for session in gone)
        assert not self.store.expired(self.clock.mono())

    @rule(session_id=consumes(idle))
    def close(self, session_id):
        if session_id == "refused" or not self.lives(session_id):
            return
        self.store.close(session_id)
        self.touched.pop(session_id)

    @invariant()
    def nobody_in_use_or_fresh_is_taken_away(self):
        held = {session.session_id for session in self.store.sessions()}
        assert held >= {session_id for session_id in self.touched if self.lives(session_id)}
        counts = self.store.counts
        assert counts.created == counts.active + counts.closed + counts.expired
        assert counts.active <= 4


TestStoreMachine = laws_of(StoreMachine, cases=60, part=3, steps=30)
