"""Sequences in slabs compute what each does alone, and slabs hold little more than they do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kakeya.generation.request import Sampling
from kakeya.mlx.batch import shared_prefix
from kakeya.mlx.batch.batch import launch_together, why_by_turns
from kakeya.mlx.batch.places import WASTE, PlaceAssignment
from kakeya.mlx.batch.slabs import PlacedKV, build, capacity_of, leave
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.verifier import MlxVerifier
from tests.mlx.random_models import VOCAB, write_model

CAPACITIES = (12, 24, 36, 60, 120, 480)
"""Small ones, so that sequences grow out of theirs."""
ROWS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    root = tmp_path_factory.mktemp("models")
    return {name: load(str(write_model(root / name, name)), name) for name in ("llama", "gemma3")}


def places(states: Sequence[MlxVerifier]) -> list[int]:
    return [state.seat.place for state in states if state.seat]


def is_placed(state: MlxVerifier) -> bool:
    return any(type(cache) is PlacedKV for cache in state.cache)


class Pair:
    """A sequence twice: in caches of its own, and wherever the machine brings it."""

    def __init__(self, model: LoadedModel, prompt: Sequence[int], seed: int) -> None:
        self.alone, self.shared = MlxVerifier(model), MlxVerifier(model)
        self.pending: int | None = prompt[-1]
        for state in (self.alone, self.shared):
            state.select_with(Sampling(temperature=float(seed % 2), seed=seed))
            state.prefill(prompt)

    def next(self) -> int | None:
        return None if self.shared.in_flight() else self.pending

    def settle(self, keep: int = 0) -> None:
        while self.shared.in_flight() > keep:
            self.pending = self.alone.collect()
            assert self.shared.collect() == self.pending

    def check(self) -> None:
        assert self.shared.length == self.alone.length == self.shared.layer_length()
        for mine, other in zip(self.alone.cache, self.shared.cache, strict=True):
            assert mine.offset == other.offset
            for one, two in zip(mine.state[:2], other.state[:2], strict=True):
                rows = min(one.shape[2], two.shape[2], mine.offset)
                assert mx.allclose(one[:, :, :rows], two[:, :, :rows], atol=1e-3).item()


texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
beginnings = st.integers(0, 20).map(lambda count: [at % VOCAB for at in range(count)])
prompts = st.builds(lambda one, two: [*one, *two][:40], beginnings, texts)
"""Some begin alike."""
seeds = st.integers(0, 5)
keeps = st.integers(0, 1)


class Sharing(RuleBasedStateMachine):
    """Whatever sequences do, together and alone: as each in caches of its own."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.model = model
        self.assignment = PlaceAssignment(CAPACITIES)
        self.assignment.shares_from = 1
        self.pairs: list[Pair] = []

    @initialize(given=st.lists(st.tuples(prompts, seeds), min_size=3, max_size=5))
    def arrive(self, given: list[tuple[list[int], int]]) -> None:
        for prompt, seed in given:
            self.begin(prompt, seed)

    @rule(prompt=prompts, seed=seeds)
    def begin(self, prompt: list[int], seed: int) -> None:
        if len(self.pairs) < ROWS:
            self.pairs.append(Pair(self.model, prompt, seed))

    @rule(away=st.sets(st.integers(0, ROWS), max_size=3), steps=st.integers(1, 9), keep=keeps)
    def share(self, away: set[int], steps: int, keep: int) -> None:
        joined = [pair for at, pair in enumerate(self.pairs) if at not in away]
        for _ in range(steps if len(joined) > 1 else 0):
            tokens = [pair.next() for pair in joined]
            launch_together(self.model, [p.shared for p in joined], tokens, self.assignment)
            for pair, token in zip(joined, tokens, strict=True):
                pair.alone.launch(token)
                pair.settle(keep)

    # Twice: what the others do counts only between shared forwards.
    share_again = share

    @precondition(lambda self: self.pairs)
    @rule(which=st.integers(0, ROWS - 1), rows=st.integers(1, 14), kept=st.integers(0, 14))
    def verify(self, which: int, rows: int, kept: int) -> None:
        pair = self.pairs[which % len(self.pairs)]
        pair.settle()
        assert pair.pending is not None
        if min(pair.shared.verifiable_rows(), pair.alone.verifiable_rows()) < rows:
            return
        block = [pair.pending, *range(2, rows + 1)]
        selected = pair.alone.verify(block)
        assert pair.shared.verify(block) == selected
        surplus = max(0, rows - 1 - kept)
        assert pair.alone.trim(surplus)
        assert pair.shared.trim(surplus)
        pair.pending = selected[rows - 1 - surplus]

    @precondition(lambda self: self.pairs)
    @rule(which=st.integers(0, ROWS - 1), keep=keeps)
    def step_alone(self, which: int, keep: int) -> None:
        pair = self.pairs[which % len(self.pairs)]
        token = pair.next()
        pair.shared.launch(token)
        pair.alone.launch(token)
        pair.settle(keep)

    @precondition(lambda self: self.pairs)
    @rule(
        which=st.integers(0, ROWS - 1), count=st.integers(0, 30), text=st.lists(st.integers(0, 9))
    )
    def go_on_from_an_earlier_place(self, which: int, count: int, text: list[int]) -> None:
        pair = self.pairs[which % len(self.pairs)]
        pair.settle()
        count = min(count, pair.alone.length - 1)
        if pair.alone.trim(count):
            assert pair.shared.trim(count)
        if text:
            for state in (pair.alone, pair.shared):
                state.prefill(text)
            assert not is_placed(pair.shared)

    @precondition(lambda self: self.pairs)
    @rule(which=st.integers(0, ROWS - 1))
    def end(self, which: int) -> None:
        self.pairs.pop(which % len(self.pairs)).settle()

    @rule(everything=st.booleans())
    def tidy(self, everything: bool) -> None:
        self.assignment.settle()
        if everything:
            self.assignment.dissolve()
            assert not any(is_placed(pair.shared) for pair in self.pairs)
            assert self.assignment.spare_bytes() == 0

    @invariant()
    def each_place_is_one_s(self) -> None:
        seats = [(id(s.slab), s.place) for s in (p.shared.seat for p in self.pairs) if s]
        assert len(seats) == len(set(seats))
        for pair in self.pairs:
            assert is_placed(pair.shared) == (pair.shared.seat is not None)

    def teardown(self) -> None:
        for pair in self.pairs:
            pair.settle()
            pair.check()


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_sequence_in_slabs_computes_what_it_does_alone(
    models: dict[str, LoadedModel], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "STEP_TOKENS", 2)
    monkeypatch.setattr(shared_prefix, "LEAST_TOKENS", 4)
    why_by_turns(models[name])
    examples = 12 if name == "llama" else 25
    chosen = settings(max_examples=examples, stateful_step_count=12, deadline=None)
    case = cast("type[Sharing]", partial(Sharing, models[name]))
    run_state_machine_as_test(case, settings=chosen)


def long(model: LoadedModel, tokens: int) -> MlxVerifier:
    """A sequence of made-up KV."""
    state = MlxVerifier(model)
    state.prefill([1])
    assert state.pretend(tokens)
    return state


def slabs_bytes(states: Sequence[MlxVerifier]) -> int:
    return sum({id(s.seat.slab): s.seat.slab.nbytes for s in states if s.seat}.values())


def test_who_joins_one_by_one_comes_to_lie_with_the_others(models: dict[str, LoadedModel]) -> None:
    assignment, states = PlaceAssignment(), [long(models["llama"], 300)]
    stretches = []
    for _ in range(7):
        states.append(long(models["llama"], 300))
        assignment.arrange(states)
        alone = sum(state.seat is None for state in states)
        stretches.append(alone + len({id(state.seat.slab) for state in states if state.seat}))
    assert stretches == [1, 1, 2, 1, 2, 2, 1]


def parts(states: Sequence[MlxVerifier]) -> int:
    return sum(state.seat is None for state in states) + len(
        {id(state.seat.slab) for state in states if state.seat}
    )


def forwards_apart(assignment: PlaceAssignment, states: Sequence[MlxVerifier]) -> int:
    for forward in range(200):
        assignment.arrange(states)
        if parts(states) == 1:
            return forward
    raise AssertionError(f"{parts(states)} parts have stayed apart")


def test_who_stands_apart_for_long_comes_to_lie_with_the_others(
    models: dict[str, LoadedModel],
) -> None:
    assignment, states = PlaceAssignment(), [long(models["llama"], 300) for _ in range(4)]
    assignment.arrange(states)
    states.append(long(models["llama"], 300))  # alone beside four
    assert forwards_apart(assignment, states) == 3
    states += [long(models["llama"], 300) for _ in range(2)]  # a slab of two beside one of five
    assert forwards_apart(assignment, states) == 3
    assert places(states) == list(range(7))
    states.append(long(models["llama"], 700))  # of another capacity
    for _ in range(50):
        assignment.arrange(states)
    assert parts(states) == 2


def test_the_more_there_is_to_copy_the_longer_they_stand_apart(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, taken = models["llama"], []
    each = long(model, 300).nbytes_per_token() // len(model.make_cache())
    monkeypatch.setattr("kakeya.mlx.batch.places._APART_BYTES", 100 * each)
    for tokens in (300, 700, 1200):
        assignment, states = PlaceAssignment(), [long(model, tokens) for _ in range(4)]
        assignment.arrange(states)
        states.append(long(model, tokens))
        taken.append(1 + forwards_apart(assignment, states))
    assert taken == [-(-5 * capacity_of(tokens + 1) // 100) for tokens in (300, 700, 1200)]


def test_who_ends_leaves_a_place_to_the_next(models: dict[str, LoadedModel]) -> None:
    assignment, states = PlaceAssignment(), [long(models["llama"], 300) for _ in range(8)]
    assignment.arrange(states)
    slab = states[0].seat and states[0].seat.slab
    states[2] = long(models["llama"], 400)
    assignment.arrange(states)
    assert {state.seat.slab for state in states if state.seat} == {slab}
    del states[3]
    for _ in range(4):  # for a while it may be the next one's
        assignment.arrange(states)
        assert places(states) == [0, 1, 2, 4, 5, 6, 7]
    assignment.arrange(states)
    # The last one took the place.
    assert places(states) == [0, 1, 2, 4, 5, 6, 3]


def test_one_that_comes_takes_the_place_before_others_are_moved(
    models: dict[str, LoadedModel],
) -> None:
    assignment, states = PlaceAssignment(), [long(models["llama"], 300) for _ in range(8)]
    assignment.arrange(states)
    for _ in range(3):  # turns of agents: one ends, and comes again soon
        del states[3]
        for _ in range(3):
            assignment.arrange(states)
        states.insert(3, long(models["llama"], 320))
        assignment.arrange(states)
        assert places(states) == list(range(8))


def test_an_append_to_a_slab_copies_nothing_of_it(models: dict[str, LoadedModel]) -> None:
    model = models["llama"]
    why_by_turns(model)
    assignment, states = PlaceAssignment(), [long(model, 9000) for _ in range(4)]
    launch_together(model, states, [1] * 4, assignment)
    launch_together(model, states, [None] * 4, assignment)
    for sharing in (states, states[:3], states[::2], states):
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for _ in range(3):
            launch_together(model, sharing, [None] * len(sharing), assignment)
            for state in sharing:
                state.collect()
        mx.synchronize()
        layer = slabs_bytes(states) // len(model.make_cache()) // 2
        assert mx.get_peak_memory() - before < layer // 2


def test_slabs_hold_little_more_than_caches_of_their_own(models: dict[str, LoadedModel]) -> None:
    model, assignment = models["llama"], PlaceAssignment()
    lengths = (300, 310, 700, 740, 1050, 1200, 1500, 1700, 2500, 2600)
    states = [long(model, tokens) for tokens in lengths]
    own = sum((tokens // 256 + 1) * 256 for tokens in lengths) * states[0].nbytes_per_token()
    assignment.arrange(states)
    assert all(map(is_placed, states))
    assert slabs_bytes(states) <= WASTE * own
    # Whoever ends leaves a place that is taken or given back.
    while len(states) > 1:
        states.pop(0)
        assignment.settle()
        taken = sum(state.length // 256 + 1 for state in states) * 256
        assert slabs_bytes(states) <= WASTE * taken * states[0].nbytes_per_token()
    assignment.settle()
    assert not is_placed(states[0])


def test_moving_together_takes_a_layer_at_a_time(models: dict[str, LoadedModel]) -> None:
    model, assignment = models["llama"], PlaceAssignment()
    states = [long(model, 9000 + at) for at in range(6)]
    mx.eval([cache.state[:2] for state in states for cache in state.cache])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assignment.arrange(states)
    layer = slabs_bytes(states) // len(model.make_cache())
    assert mx.get_peak_memory() - before <= 1.3 * layer + (capacity_of(9001) / 9000 - 1) * 2 * layer


@pytest.mark.parametrize("room", [4.0, 1.0], ids=["ample", "tight"])
def test_spare_buffers_go_before_a_slab_takes_their_room(
    models: dict[str, LoadedModel], room: float
) -> None:
    model, assignment = models["llama"], PlaceAssignment()
    states = [long(model, 9000 + at) for at in range(6)]
    mx.eval([cache.state[:2] for state in states for cache in state.cache])
    size = sum(state.nbytes for state in states)
    mx.clear_cache()
    usual = mx.set_cache_limit(1 << 40)
    spare = mx.ones((4 * size // 4,))
    mx.eval(spare)
    del spare
    held = mx.get_active_memory()
    assignment.limit_bytes = int((held + 2 * size * room) * 16 / 15)
    assignment.arrange(states)
    kept = mx.get_cache_memory()
    mx.set_cache_limit(usual)
    mx.clear_cache()
    assert all(map(is_placed, states))
    assert (kept >= 4 * size) == (room == 4.0)
    assert mx.get_active_memory() + kept <= assignment.limit_bytes


def test_who_is_away_for_long_gets_a_cache_of_its_own(models: dict[str, LoadedModel]) -> None:
    assignment, states = PlaceAssignment(), [long(models["llama"], 300) for _ in range(4)]
    assignment.arrange(states)
    for _ in range(20):
        assignment.arrange(states[:3])
    assert [is_placed(state) for state in states] == [True, True, True, False]


def test_a_bound_that_leaves_no_room_leaves_sequences_apart(
    models: dict[str, LoadedModel],
) -> None:
    assignment, states = PlaceAssignment(), [long(models["llama"], 3000) for _ in range(4)]
    assignment.limit_bytes = mx.get_active_memory() + 1000
    assert assignment.arrange(states) == [0, 1, 2, 3]
    assert not any(map(is_placed, states))
    assignment.limit_bytes = None
    assignment.arrange(states)
    assert all(map(is_placed, states))


def test_a_cache_that_leaves_keeps_its_kv_and_nothing_else(models: dict[str, LoadedModel]) -> None:
    assignment, states = PlaceAssignment(), [long(models["llama"], 300) for _ in range(4)]
    assignment.arrange(states)
    leave(states[0])
    assert states[0].nbytes == 512 * states[0].nbytes_per_token()
    assert states[0].layer_length() == 300


def test_a_copy_that_fails_leaves_sequences_that_can_go_on(models: dict[str, LoadedModel]) -> None:
    model, assignment = models["llama"], PlaceAssignment()
    why_by_turns(model)
    pairs = [Pair(model, [3 + at, 5, 7], 0) for at in range(3)]
    with pytest.raises(IndexError):
        build([pair.shared for pair in pairs], (0, 9), 256)
    assert not any(pair.shared.seat for pair in pairs)
    for _ in range(3):
        for pair in pairs:
            token = pair.next()
            pair.shared.launch(token)
            pair.alone.launch(token)
            pair.settle()
    for _ in range(3):
        tokens = [pair.next() for pair in pairs]
        launch_together(model, [pair.shared for pair in pairs], tokens, assignment)
        for pair, token in zip(pairs, tokens, strict=True):
            pair.alone.launch(token)
            pair.settle()
            pair.check()
    assert all(pair.shared.seat for pair in pairs)
