"""Slots of conversations: least loaded, kept while open, and how many there should be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kakeya.core.errors import Conflict, InvalidArgument
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import derive_slot_id
from kakeya.prefix.warm.slots import (
    ConversationRegistry,
    auto_parallel,
    least_loaded,
    recommended_parallel,
    slot_key,
)

MODEL = "tiny"


def test_two_conversations_get_two_slots_and_ten_keep_theirs():
    registry = ConversationRegistry()
    slots = {n: registry.open(MODEL, f"c{n}", 0.0, parallel=10).slot for n in range(10)}
    assert sorted(slots.values()) == list(range(10))
    for turn in range(5):
        for n, slot in slots.items():
            assert registry.open(MODEL, f"c{n}", float(turn), parallel=10).slot == slot


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=16), st.text())
def test_the_least_loaded_slot_is_taken_and_the_hash_decides_only_among_ties(loads, key):
    slot = least_loaded(loads, key)
    ties = [n for n, load in enumerate(loads) if load == min(loads)]
    assert slot in ties
    assert slot == ties[derive_slot_id(key, len(ties))] if key else slot == ties[0]


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_a_busy_slot_is_never_taken_because_no_slot_is_empty(key):
    assert least_loaded([9, 1, 1, 1], key) != 0


def test_ties_are_spread_by_the_hash():
    counts = Counter(least_loaded([1, 1, 1, 1], f"conv:{n}") for n in range(800))
    assert min(counts.values()) > 140


def test_twenty_conversations_on_four_slots_ask_for_twenty_five():
    registry = ConversationRegistry()
    for n in range(20):
        registry.open(MODEL, f"c{n}", 0.0, parallel=4)
    status = registry.status()[MODEL]
    assert status.recommended == 25
    assert status.is_crowded
    assert status.loads == (5, 5, 5, 5)
    for n in range(20):
        registry.close(registry.open(MODEL, f"c{n}", 1.0, parallel=4))
    status = registry.status()[MODEL]
    assert (status.high_water, status.recommended) == (20, 25)
    assert status.loads == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("parallel", "high_water", "recommended"),
    [(4, 0, 4), (4, 1, 4), (4, 3, 5), (4, 8, 10), (4, 9, 12), (4, 20, 25), (40, 20, 40)],
)
def test_as_many_slots_are_recommended_as_were_needed_and_a_quarter(
    parallel, high_water, recommended
):
    assert recommended_parallel(parallel, high_water) == recommended


def test_open_is_idempotent_and_a_use():
    registry = ConversationRegistry()
    first = registry.open(MODEL, "c", 1.0, parallel=4)
    assert registry.open(MODEL, "c", 5.0, parallel=4) is first
    assert (first.opened_mono, first.used_mono, len(registry)) == (1.0, 5.0, 1)
    assert registry.get(MODEL, "c", 9.0) is first
    assert first.used_mono == 9.0
    assert registry.get(MODEL, "other", 9.0) is None


def test_a_conversation_on_two_models_is_two():
    registry = ConversationRegistry()
    one = registry.open("a", "c", 0.0, parallel=2)
    other = registry.open("b", "c", 0.0, parallel=2)
    assert one is not other
    registry.close(one)
    assert registry.get("b", "c", 1.0) is other
    assert registry.status()["a"].loads == (0, 0)
    assert sum(registry.status()["b"].loads) == 1


def test_close_is_idempotent_and_a_closed_one_is_refused():
    registry = ConversationRegistry()
    conversation = registry.open(MODEL, "c", 0.0, parallel=2)
    assert registry.close(conversation)
    assert not registry.close(conversation)
    with pytest.raises(Conflict, match="'c' was closed"):
        registry.use(conversation, 1.0)
    assert registry.open(MODEL, "c", 2.0, parallel=2) is not conversation
    assert sum(registry.status()[MODEL].loads) == 1


def test_idle_ones_are_closed_strictly_behind_their_time():
    registry = ConversationRegistry()
    hour = registry.open(MODEL, "hour", 0.0, parallel=2)
    short = registry.open(MODEL, "short", 0.0, parallel=2, retention=Retention.SHORT)
    day = registry.open(MODEL, "day", 0.0, parallel=2, retention=Retention.EXTENDED)
    assert registry.evict_idle(3600.0) == ()
    assert set(registry.evict_idle(3600.001)) == {hour, short}
    assert registry.evict_idle(86400.0) == ()
    assert registry.evict_idle(86400.1) == (day,)
    assert sum(registry.status()[MODEL].loads) == 0


def test_of_too_many_the_longest_idle_are_closed():
    registry = ConversationRegistry(most=3)
    opened = [registry.open(MODEL, f"c{n}", float(n), parallel=2) for n in range(5)]
    registry.use(opened[0], 9.0)
    assert registry.overflow() == (opened[1], opened[2])
    assert registry.overflow() == ()
    assert len(registry) == 3


def test_fewer_slots_move_the_conversations_that_had_the_others():
    registry = ConversationRegistry()
    for n in range(8):
        registry.open(MODEL, f"c{n}", 0.0, parallel=8)
    moved = {n: registry.open(MODEL, f"c{n}", 1.0, parallel=2).slot for n in range(8)}
    assert set(moved.values()) == {0, 1}
    assert registry.status()[MODEL].loads == (4, 4)
    with pytest.raises(InvalidArgument, match="at least one"):
        registry.open(MODEL, "c", 0.0, parallel=0)


def test_many_cycles_leak_nothing():
    registry = ConversationRegistry()
    for _ in range(50):
        opened = [registry.open(MODEL, f"c{n}", 0.0, parallel=4) for n in range(32)]
        assert registry.status()[MODEL].loads == (8, 8, 8, 8)
        assert all(registry.close(conversation) for conversation in opened)
    assert len(registry) == 0
    assert registry.status()[MODEL].high_water == 32


@pytest.mark.parametrize(
    ("usable", "kv", "context", "slots"),
    [
        (8 << 30, 100_000, 8192, 2),
        (64 << 30, 100_000, 16384, 16),
        (64 << 30, 200_000, 131_072, 10),
        (1 << 40, 10, 10, 16),
        (0, 1, 1, 2),
        (1, 0, 0, 2),
    ],
)
def test_a_quarter_of_memory_says_how_many_slots_there_are(usable, kv, context, slots):
    assert auto_parallel(usable, kv, context) == slots


def test_a_slot_names_kv_and_any_slot_names_none():
    assert slot_key(3) == "slot:3"
    assert slot_key(-1) == ""


class Registry(RuleBasedStateMachine):
    """Against a list of what is open: loads add up, slots are even, high water never falls."""

    def __init__(self):
        super().__init__()
        self.registry = ConversationRegistry()
        self.open = {}
        self.now = 0.0
        self.most = 0

    @rule(name=st.integers(0, 30), seconds=st.floats(0, 4000))
    def opens(self, name, seconds):
        self.now += seconds
        before = self.open.get(name)
        loads = self.registry.status()[MODEL].loads if self.most else (0,) * 4
        found = self.registry.open(MODEL, str(name), self.now, parallel=4)
        assert before is None or found is before
        assert before is not None or loads[found.slot] == min(loads)
        self.open[name] = found
        self.most = max(self.most, len(self.open))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def closes(self, data):
        name = data.draw(st.sampled_from(sorted(self.open)))
        assert self.registry.close(self.open.pop(name))

    @rule(seconds=st.floats(0, 4000))
    def sweeps(self, seconds):
        self.now += seconds
        gone = self.registry.evict_idle(self.now)
        late = {n for n, c in self.open.items() if self.now - c.used_mono > c.ttl_s}
        assert {int(c.conversation_id) for c in gone} == late
        for name in late:
            assert self.open.pop(name).is_closed

    @invariant()
    def adds_up(self):
        assert len(self.registry) == len(self.open)
        for status in self.registry.status().values():
            assert sum(status.loads) == len(self.open)
            assert status.high_water == self.most
            assert Counter(c.slot for c in self.open.values()) == {
                n: load for n, load in enumerate(status.loads) if load
            }


TestRegistry = Registry.TestCase
TestRegistry.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
