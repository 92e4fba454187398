"""Which sequences may run within the KV bound, and whose KV goes for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.queue.room import AHEAD_TOKENS, KvRoom, usual_kv_bytes
from kakeya.engine.steps.sequence import SequenceRun
from kakeya.generation.request import DecodeJob
from tests.engine.child_engine import ToyModel, ToyState
from tests.engine.rig import load_rig

BLOCK = KV_BLOCK_TOKENS  # bytes, at one byte a token
FACTS = replace(ToyModel("", None).facts, context_tokens=40 * KV_BLOCK_TOKENS)  # type: ignore[arg-type]


def job(prompt: int, more: int) -> DecodeJob:
    return DecodeJob(token_ids=[1] * prompt, max_tokens=more)


def kept(size: int) -> ToyState:
    return ToyState("", None, tokens=[1] * size)  # type: ignore[arg-type]


def make(blocks: int) -> tuple[KvRoom, KvSlots]:
    slots = KvSlots(blocks * BLOCK)
    return KvRoom(slots, FACTS), slots


def admits(room: KvRoom, wanted: DecodeJob) -> bool:
    """Whether there is room now. Raises MemoryRefused when there never will be."""
    room.check_fits(wanted)
    return room.lacks(None, wanted) <= 0


def test_a_request_that_can_never_fit_is_refused_with_the_size_that_would() -> None:
    room, _ = make(4)
    assert admits(room, job(1000, 24))
    with pytest.raises(MemoryRefused, match="prompt and answer together may have 1024 tokens"):
        admits(room, job(1000, 25))
    assert room.longest_tokens == 1024


def test_a_request_without_room_waits_for_running_ones() -> None:
    room, _ = make(4)
    room.enter("a", job(600, 100))
    assert not admits(room, job(200, 100))
    assert admits(room, job(200, 56))
    room.leave("a")
    assert admits(room, job(200, 100))


def test_an_answer_that_may_become_long_sets_aside_what_most_take() -> None:
    room, _ = make(40)
    room.enter("a", job(256, 9000))
    assert room.lent_bytes == 256 + AHEAD_TOKENS
    assert room.grown("a", 256 + AHEAD_TOKENS - 1)
    assert room.lent_bytes == 256 + AHEAD_TOKENS
    assert room.grown("a", 256 + AHEAD_TOKENS)
    assert room.lent_bytes == 256 + AHEAD_TOKENS + BLOCK


def test_a_parked_sequence_counts_with_the_kv_that_it_holds() -> None:
    room, slots = make(8)
    room.enter("a", job(300, 2000))
    assert room.held_bytes("a") == 4 * BLOCK
    room.park("a", 300)
    assert (room.lent_bytes, room.parked_bytes) == (0, 2 * BLOCK)
    assert room.lacks("b", job(1300, 600)) == 2 * BLOCK
    assert room.lacks("a", job(300, 2000), 300) <= 0
    slots.keep("idle", [1] * 7 * BLOCK, kept(7 * BLOCK))
    room.enter("b", job(1000, 500))
    assert not slots.bytes_by_key()
    room.leave("a")
    assert room.parked_bytes == 0


def test_a_parked_sequence_gets_room_for_its_length_when_it_goes_on() -> None:
    room, _ = make(12)
    room.enter("a", job(300, 2000))
    assert room.grown("a", 1500)
    room.park("a", 1500)
    assert room.parked_bytes == 6 * BLOCK
    room.enter("a", job(300, 2000), 1500)
    assert room.lent_bytes == 1500 // BLOCK * BLOCK + BLOCK + AHEAD_TOKENS
    assert room.parked_bytes == 0


def test_kept_kv_goes_for_running_kv_oldest_first() -> None:
    room, slots = make(4)
    for key in ("old", "new"):
        slots.keep(key, [1] * BLOCK, kept(BLOCK))
    room.enter("a", job(256, 512))
    assert list(slots.bytes_by_key()) == ["new"]
    room.grown("a", 3 * BLOCK)
    assert not slots.bytes_by_key()


def test_kv_of_a_sequence_that_just_ended_is_kept() -> None:
    room, slots = make(4)
    room.enter("a", job(700, 300))
    slots.keep("a", [1] * 1000, kept(1000))
    room.leave("a")
    assert slots.held_bytes == 1000


def test_a_smaller_bound_drops_idle_kv_at_once() -> None:
    room, slots = make(8)
    for key in ("old", "new"):
        slots.keep(key, [1] * BLOCK, kept(BLOCK))
    room.enter("a", job(200, 56))
    slots.set_budget(2 * BLOCK)
    assert list(slots.bytes_by_key()) == ["new"]


def test_a_bound_in_which_no_sequence_fits_is_refused() -> None:
    room, _ = make(8)
    with pytest.raises(InvalidArgument, match="the first 256 tokens take 256"):
        room.check_bound(BLOCK - 1)
    room.check_bound(BLOCK)


def test_recurrent_state_is_counted_for_each_sequence_however_long_it_is() -> None:
    slots = KvSlots(2000)
    room = KvRoom(slots, replace(FACTS, kv_bytes_per_token=0, sequence_state_bytes=900))
    with pytest.raises(InvalidArgument, match="the first 256 tokens take 900"):
        room.check_bound(899)
    assert room.longest_tokens == FACTS.context_tokens
    room.enter("a", job(5000, 5000))
    assert room.headroom_tokens("a", 5000) == FACTS.context_tokens - 5001
    assert admits(room, job(5, 5))
    room.enter("b", job(5, 5))
    assert not admits(room, job(5, 5))
    room.park("a", 0)
    assert room.parked_bytes == 0, "it has computed nothing yet"


def test_a_window_is_counted_as_far_as_it_is_filled() -> None:
    facts = replace(FACTS, kv_windows=((500, 3),), prefill_chunk_tokens=32)
    room = KvRoom(KvSlots(20 * BLOCK), facts)
    assert room.kv_bytes(1) == BLOCK + 3 * BLOCK
    assert room.kv_bytes(2 * BLOCK) == 2 * BLOCK + 3 * 2 * BLOCK
    assert room.kv_bytes(9 * BLOCK) == 9 * BLOCK + 3 * (500 + 32)
    room.enter("a", job(10, 9000))
    assert room.lent_bytes == room.kv_bytes(10 + AHEAD_TOKENS)
    assert room.headroom_tokens("a", 10) == 3 * BLOCK - 11
    fixed = 3 * (500 + 32)
    assert room.longest_tokens == (20 * BLOCK - fixed) // BLOCK * BLOCK
    assert KvRoom(KvSlots(usual_kv_bytes(facts)), facts).longest_tokens == facts.context_tokens


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon_h1", "mamba"])
def test_what_is_set_aside_holds_what_a_sequence_takes_at_each_length(tmp_path, name) -> None:
    rig = load_rig(tmp_path / name, name)
    facts = rig.model.facts
    for length in (1, 30, 300):
        prompt = [(7 * at) % 96 for at in range(length)]
        run = SequenceRun(rig.model, rig.tools, DecodeJob(token_ids=prompt, max_tokens=90))
        for _ in run.frames():
            assert run.state.nbytes <= facts.kv_bytes(run.length)
        assert run.state.nbytes > facts.kv_bytes(run.length) / 3


def test_the_usual_bound_holds_a_whole_context() -> None:
    big = replace(FACTS, kv_bytes_per_token=1 << 20)
    room = KvRoom(KvSlots(usual_kv_bytes(big)), big)
    assert room.longest_tokens == big.context_tokens
    assert admits(room, job(10, big.context_tokens))
    assert usual_kv_bytes(FACTS) == 2 << 30


@dataclass(eq=False)
class Sequence:
    """One request as the scheduler sees it: its length now, and where it ends."""

    job: DecodeJob
    length: int = 0
    entered: int = 0

    @property
    def end(self) -> int:
        return len(self.job.token_ids) + self.job.max_tokens


@settings(deadline=None)
@given(
    blocks=st.integers(1, 12),
    wanted=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 3000)), max_size=8),
    steps=st.lists(st.integers(1, KV_BLOCK_TOKENS), min_size=1, max_size=8),
    kept_blocks=st.lists(st.integers(1, 3), max_size=4),
)
def test_all_that_can_fit_comes_to_its_end_within_the_bound(blocks, wanted, steps, kept_blocks):
    """Whatever the order: the bound holds after each step, and the oldest is never ended."""
    room, slots = make(blocks)
    for key, size in enumerate(kept_blocks):
        slots.keep(str(key), [1] * size * BLOCK, kept(size * BLOCK))
    waiting, running, done = deque(), deque(), []
    for prompt, more in wanted:
        sequence = Sequence(job(prompt, more))
        try:
            admits(room, sequence.job)
        except MemoryRefused:
            assert room.kv_bytes(sequence.end) > slots.budget_bytes
        else:
            waiting.append(sequence)
    asked, entries = len(waiting), 0
    for turn in range(100_000):
        while waiting and admits(room, waiting[0].job):
            entries += 1
            waiting[0].entered = entries
            room.enter(waiting[0], waiting[0].job)
            running.append(waiting.popleft())
        if not running:
            break
        sequence = running.popleft()
        sequence.length = min(sequence.end, sequence.length + steps[turn % len(steps)])
        if sequence.length == sequence.end:
            room.leave(sequence)
            done.append(sequence)
        else:
            oldest = min([*running, sequence], key=lambda one: one.entered)
            running.append(sequence)
            if not room.grown(sequence, sequence.length):
                youngest = max(running, key=lambda one: one.entered)
                assert youngest is not oldest or len(running) == 1
                running.remove(youngest)
                room.leave(youngest)
                youngest.length = 0
                waiting.append(youngest)
        assert room.lent_bytes <= slots.budget_bytes
        assert room.lent_bytes + slots.held_bytes <= slots.budget_bytes
    assert len(done) == asked
    assert room.lent_bytes == 0
