"""A real model within bounds: what it gives back, and who ends when it outgrows them."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.adapters.files.packed import Precision, pack
from kakeya.core.errors import MemoryRefused
from kakeya.core.process import resident_bytes
from kakeya.engine.adapters.slots import EngineAdapters
from kakeya.engine.limits import EngineLimits
from kakeya.engine.model import MemoryUse
from kakeya.engine.steps.scheduler import Scheduler
from kakeya.generation.request import DecodeJob
from kakeya.memory.estimate.estimate import GROWTH_BYTES, STEP_BYTES
from kakeya.mlx.loader import load, read_network
from kakeya.mlx.lora import linear_sizes
from kakeya.mlx.model import MlxModel
from tests.adapters.adapter_folders import write_adapter
from tests.engine.adapter_rig import Answer, Ending, take
from tests.engine.child_engine import ToyModel, ToyState
from tests.engine.rig import tools
from tests.engine.steps.test_scheduler import WAIT_S, submit
from tests.mlx.random_models import write_model

MIB = 1 << 20
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
BLOCK_BYTES = 256 * TOKEN_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context, so that KV is what takes the memory."""
    folder = write_model(tmp_path_factory.mktemp("model") / "llama", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> MlxModel:
    return without_chores(MlxModel(load(str(folder), "llama"), 0.0, False))


def without_chores(model: MlxModel) -> MlxModel:
    """The model, measuring nothing when it idles: that holds memory too."""
    model.chores = lambda: iter(())  # type: ignore[method-assign]
    return model


def run_thread(scheduler: Scheduler) -> threading.Thread:
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def scheduler(model: MlxModel) -> Iterator[Scheduler]:
    scheduler = Scheduler(model, tools(), max_running=4)
    thread = run_thread(scheduler)
    yield scheduler
    scheduler.stop()
    thread.join(WAIT_S)
    model.limit(1 << 40, 256 * MIB)
    model.shed(1 << 40)


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * at) % 96 for at in range(length)]


def test_a_footprint_is_of_now_and_not_of_the_peak(scheduler: Scheduler) -> None:
    limits = scheduler.limits
    block = mx.ones((64 * MIB // 4,))
    mx.eval(block)
    full = scheduler.call(limits.footprint).result(WAIT_S)
    del block
    left = scheduler.call(lambda: limits.shrink(64 * MIB)).result(WAIT_S)
    assert full.mlx_active_bytes - left.mlx_active_bytes >= 64 * MIB
    assert full.resident_bytes - left.resident_bytes > 60 * MIB
    assert left.mlx_cache_bytes == 0


def test_shrinking_takes_kv_that_idles_oldest_first_and_leaves_what_runs(
    scheduler: Scheduler,
) -> None:
    slots = scheduler.limits.room._slots
    for key in ("old", "new"):
        _, sink = submit(scheduler, token_ids=prompt(1000), max_tokens=4, kv_key=key)
        assert sink.ended.wait(WAIT_S)
    before = scheduler.call(scheduler.limits.footprint).result(WAIT_S)
    assert before.idle_kv_bytes >= 2 * 1000 * TOKEN_BYTES
    ticket, endless = submit(scheduler, token_ids=prompt(500), max_tokens=7000)
    assert endless.first.wait(WAIT_S)
    limits = scheduler.limits
    a_little_more = lambda: limits.shrink(limits.footprint().mlx_cache_bytes + 1)  # noqa: E731
    scheduler.call(a_little_more).result(WAIT_S)
    assert list(scheduler.call(slots.bytes_by_key).result(WAIT_S)) == ["new"]
    scheduler.call(lambda: scheduler.limits.shrink(1 << 40)).result(WAIT_S)
    assert scheduler.call(scheduler.limits.footprint).result(WAIT_S).idle_kv_bytes == 0
    _, alone = submit(scheduler, token_ids=prompt(500), max_tokens=40)
    assert alone.ended.wait(WAIT_S)
    assert endless.tokens()[:20] == alone.tokens()[:20]
    ticket.cancel()


def test_kv_of_drafts_for_others_idles_too(scheduler: Scheduler, model: MlxModel) -> None:
    for first in range(4):
        scheduler.call(lambda first=first: model.draft(prompt(600, first), 2, None, 0.0)).result(
            WAIT_S
        )
    idle = scheduler.call(scheduler.limits.footprint).result(WAIT_S).idle_kv_bytes
    assert idle >= 4 * 600 * TOKEN_BYTES
    scheduler.call(lambda: model.shed(idle // 2)).result(WAIT_S)
    assert scheduler.call(model.idle_bytes).result(WAIT_S) == idle // 2
    left = scheduler.call(lambda: scheduler.limits.shrink(1 << 40)).result(WAIT_S)
    assert left.idle_kv_bytes == 0


def test_a_generation_beyond_the_memory_limit_ends_with_an_error_and_the_engine_goes_on(
    scheduler: Scheduler, model: MlxModel
) -> None:
    """On the CPU mlx allocates beyond its limit without a word: what holds is our own look."""
    limits = scheduler.limits
    now = scheduler.call(lambda: limits.shrink(1 << 40)).result(WAIT_S)
    bound = now.resident_bytes + MIB
    said = scheduler.call(lambda: limits.set(bound, 0, 0)).result(WAIT_S)
    assert said.limit_bytes == bound
    _, greedy = submit(scheduler, token_ids=prompt(5000), max_tokens=100, kv_key="much")
    assert greedy.ended.wait(WAIT_S)
    assert isinstance(greedy.error, MemoryRefused)
    assert "ask for fewer tokens" in greedy.error.message
    assert greedy.error.retry_after_s is None
    assert scheduler.call(model.memory).result(WAIT_S).active_bytes <= now.mlx_active_bytes + MIB
    _, modest = submit(scheduler, token_ids=prompt(500), max_tokens=20)
    assert modest.ended.wait(WAIT_S)
    assert len(modest.tokens()) == 20


def test_of_several_the_youngest_ends_and_is_told_to_come_back(scheduler: Scheduler) -> None:
    scheduler.call(lambda: scheduler.limits.set(0, 0, 9 * BLOCK_BYTES)).result(WAIT_S)
    _, first = submit(scheduler, token_ids=prompt(250), max_tokens=1300)
    assert first.first.wait(WAIT_S)
    _, second = submit(scheduler, token_ids=prompt(300), max_tokens=1300)
    assert second.first.wait(WAIT_S)
    for sink in (first, second):
        assert sink.ended.wait(60)
    assert first.error is None
    assert len(first.tokens()) == 1300
    assert isinstance(second.error, MemoryRefused)
    assert second.error.retry_after_s == 1.0
    assert 0 < len(second.tokens()) < 1300


class Weighed(ToyModel):
    """Takes a byte for each token of a sequence that anything still refers to."""

    def __init__(self) -> None:
        super().__init__("", Path())
        self.facts = replace(self.facts, batch_rows=8)
        self._states: list[weakref.ref[ToyState]] = []

    def open(self) -> ToyState:
        state = super().open()
        self._states.append(weakref.ref(state))
        return state

    def memory(self) -> MemoryUse:
        held = [state() for state in self._states]
        size = sum(state.length for state in held if state is not None)
        return MemoryUse(active_bytes=size, peak_bytes=size)


@pytest.mark.parametrize(
    ("prompt_tokens", "more_tokens", "share"),
    [(20, 100, 4 * 100), (150, 5, 4 * 128)],
    ids=["in a shared forward", "in a prefill"],
)
def test_one_sequence_ends_for_what_it_took_and_not_the_next_ones_too(
    prompt_tokens: int, more_tokens: int, share: int
) -> None:
    model, mine = Weighed(), tools()
    limits = EngineLimits(model, mine.slots, resident=lambda: None, trim=lambda: False)
    limits.set(share, 0, 0)
    ending = Ending(Scheduler(model, mine, max_running=4, limits=limits), 4)
    answers = [Answer() for _ in range(4)]
    for answer in answers:
        job = DecodeJob(token_ids=prompt(prompt_tokens), max_tokens=more_tokens)
        ending.submit(job, answer)
    ending.scheduler.run()
    assert [len(answer.tokens) for answer in answers[:3]] == [more_tokens] * 3
    assert isinstance(answers[3].error, MemoryRefused)
    assert answers[3].error.retry_after_s == 1.0


def test_what_does_not_fit_waits_in_line_and_is_computed_later(scheduler: Scheduler) -> None:
    scheduler.call(lambda: scheduler.limits.set(0, 0, 4 * BLOCK_BYTES)).result(WAIT_S)
    running, first = submit(scheduler, token_ids=prompt(300), max_tokens=700)
    assert first.first.wait(WAIT_S)
    _, second = submit(scheduler, token_ids=prompt(200), max_tokens=20)
    load = scheduler.call(scheduler.load).result(WAIT_S)
    assert (load.running, load.waiting) == (1, 1) or first.ended.is_set()
    assert not second.first.is_set() or first.ended.is_set()
    running.cancel()
    assert second.ended.wait(WAIT_S)
    assert len(second.tokens()) == 20


def test_what_can_never_fit_is_refused_before_anything_is_computed(scheduler: Scheduler) -> None:
    scheduler.call(lambda: scheduler.limits.set(0, 0, 4 * BLOCK_BYTES)).result(WAIT_S)
    _, sink = submit(scheduler, token_ids=prompt(1000), max_tokens=100)
    assert sink.ended.wait(WAIT_S)
    assert isinstance(sink.error, MemoryRefused)
    assert not sink.frames


def test_a_bound_below_the_model_itself_changes_nothing(scheduler: Scheduler) -> None:
    with pytest.raises(MemoryRefused, match="less than the model itself occupies"):
        scheduler.call(lambda: scheduler.limits.set(MIB, 0, 0)).result(WAIT_S)
    _, sink = submit(scheduler)
    assert sink.ended.wait(WAIT_S)
    assert sink.error is None


def test_adapters_are_told_what_is_left(model: MlxModel) -> None:
    limits = EngineLimits(model, tools().slots)
    assert limits.room_bytes() is None
    limits.set((resident_bytes() or 0) + 10 * MIB, 0, 0)
    left = limits.room_bytes()
    assert left is not None
    assert 0 < left < 300 * MIB
    model.limit(1 << 40, 256 * MIB)


def test_spare_buffers_are_bounded_by_what_arrays_leave(model: MlxModel) -> None:
    """Not dropped at each step, and back to their usual bound when there is room again."""
    limits = EngineLimits(model, tools().slots)
    limits.shrink(1 << 40)
    limits.set((resident_bytes() or 0) + 100 * MIB, 0, 0)
    block = mx.ones((60 * MIB // 4,))
    mx.eval(block)
    spare = mx.ones((60 * MIB // 4,))
    mx.eval(spare)
    del spare
    assert limits.holds()
    memory = model.memory()
    assert memory.cache_bytes <= (limits.room_bytes() or 0) + model.idle_bytes()
    del block
    assert limits.holds()
    again = mx.ones((60 * MIB // 4,))
    mx.eval(again)
    del again
    assert limits.holds()
    assert model.memory().cache_bytes >= 60 * MIB
    limits.shrink(1 << 40)
    model.limit(1 << 40, 256 * MIB)


def test_what_else_grows_comes_out_of_the_share_when_memory_is_asked_back(model: MlxModel) -> None:
    """Else the engine would go back to what it was asked for, and be ended for it."""
    other = [50 * MIB]

    def resident() -> int:
        memory = model.memory()
        return memory.active_bytes + memory.cache_bytes + other[0]

    limits = EngineLimits(model, tools().slots, resident=resident)
    limits.shrink(1 << 40)
    limits.set(resident() + 80 * MIB, 0, 4 * MIB)
    room = limits.room_bytes()
    assert room is not None
    for grown, left in ((30, room - 30 * MIB), (10, room - 10 * MIB), (0, room)):
        other[0] = (50 + grown) * MIB
        limits.shrink(1)
        assert limits.room_bytes() == left
        block = mx.ones((60 * MIB // 4,))
        mx.eval(block)
        assert limits.holds() == (grown < 30)
        del block
    other[0] = 1000 * MIB
    limits.shrink(1)
    left = limits.room_bytes()
    assert left is not None
    assert 4 * MIB < left < room - 30 * MIB  # what was promised can be filled
    model.limit(1 << 40, 256 * MIB)


def test_spare_buffers_make_place_for_whatever_else_is_resident(model: MlxModel) -> None:
    """Before anybody asks for it: at a look of the engine's own, now and then."""
    other, looks = [50 * MIB], [0]

    def resident() -> int:
        looks[0] += 1
        memory = model.memory()
        return memory.active_bytes + memory.cache_bytes + other[0]

    limits = EngineLimits(model, tools().slots, resident=resident)
    limits.shrink(1 << 40)
    limits.set(resident() + 80 * MIB, 0, 4 * MIB)
    bound = limits.footprint().limit_bytes
    for grown in (0, 40, 70):
        other[0] = (50 + grown) * MIB
        for _ in range(20):
            spare = mx.ones((60 * MIB // 4,))
            mx.eval(spare)
            del spare
            looks[0] = 0
            assert limits.holds()
        assert looks[0] == 0, "not at each step"
        assert resident() <= bound
        assert grown or model.memory().cache_bytes >= 60 * MIB
    limits.shrink(1 << 40)
    model.limit(1 << 40, 256 * MIB)


class Spared(ToyModel):
    """Weights, and spare buffers up to the bound of them."""

    def __init__(self, weights_bytes: int) -> None:
        super().__init__("", Path())
        self._weights_bytes = weights_bytes
        self._share_bytes = self._cache_bytes = 0

    def limit(self, memory_bytes: int | None, cache_bytes: int | None) -> None:
        self._share_bytes = memory_bytes or self._share_bytes

    def tidy(self) -> None:
        self._cache_bytes = 0

    def fill(self) -> None:
        self._cache_bytes = self._share_bytes - self._weights_bytes

    def memory(self) -> MemoryUse:
        return MemoryUse(
            active_bytes=self._weights_bytes,
            peak_bytes=self._weights_bytes,
            cache_bytes=self._cache_bytes,
        )


@given(
    grown=st.lists(st.integers(0, GROWTH_BYTES), min_size=1, max_size=5),
    weights_bytes=st.integers(1, 1000 * MIB),
    kv_bytes=st.integers(1, 1000 * MIB),
)
def test_an_engine_that_grew_as_its_lease_foresees_goes_back_into_it_and_stays(
    grown: list[int], weights_bytes: int, kv_bytes: int
) -> None:
    other, looks = [90 * MIB], [0]
    model, mine = Spared(weights_bytes), tools(kv_bytes=kv_bytes)

    def resident() -> int:
        looks[0] += 1
        return other[0] + model.memory().active_bytes + model.memory().cache_bytes

    limits = EngineLimits(model, mine.slots, resident=resident, trim=lambda: False)
    lease = resident() + STEP_BYTES + GROWTH_BYTES + kv_bytes
    limits.set(lease, 0, 0)
    for growth in sorted(grown):
        other[0] = 90 * MIB + growth
        model.fill()
        looks[0] = 0
        limits.shrink(max(1, resident() - lease))
        assert looks[0] == 2, "ours, and one of its own"
        model.fill()
        # What changes by less than a mebibyte is let be.
        assert resident() < lease + MIB


def slotted(folder: Path) -> MlxModel:
    """The model with a long context and slots, none of them allocated yet."""
    loaded = load(str(folder), "llama", adapter_slots=8, adapter_rank=16)
    return without_chores(MlxModel(loaded, 0.0, False))


def packed_for_all_layers(base: Path, folder: Path) -> bytes:
    """An adapter that names every linear layer."""
    arrays = {}
    for path, (ins, outs) in linear_sizes(read_network(base)[0]).items():
        if ".layers." in path:
            arrays[f"{path}.lora_a"] = np.full((ins, 2), 0.01, np.float32)
            arrays[f"{path}.lora_b"] = np.full((2, outs), 0.01, np.float32)
    return pack(write_adapter(folder / "adapter", arrays, rank=2), Precision.EXACT)


def with_adapters(model: MlxModel, scheduler: Scheduler) -> EngineAdapters:
    """Wired as an engine does it."""
    assert model.adapters is not None
    limits = scheduler.limits
    return EngineAdapters(model.adapters, limits.slot_room_bytes, limits.fit_kv)


def test_slots_of_adapters_lower_the_kv_bound_so_that_a_promised_context_can_be_filled(
    folder: Path, tmp_path: Path
) -> None:
    model = slotted(folder)
    scheduler = Scheduler(model, tools(), max_running=4)
    thread = run_thread(scheduler)
    limits, packed = scheduler.limits, packed_for_all_layers(folder, tmp_path)
    adapters = with_adapters(model, scheduler)
    try:
        now = scheduler.call(lambda: limits.shrink(1 << 40)).result(WAIT_S)
        kv = 24 * BLOCK_BYTES
        bound = now.resident_bytes + kv
        scheduler.call(lambda: limits.set(bound, 0, kv)).result(WAIT_S)
        assert limits.room.longest_tokens == 24 * 256
        beside, within = (limits.slot_room_bytes(keeps_kv) for keeps_kv in (True, False))
        assert beside is not None
        assert within is not None
        assert beside < BLOCK_BYTES < 12 * BLOCK_BYTES < within, "the least KV are 8 blocks"
        for name in ("a", "b"):
            scheduler.call(lambda name=name: take(adapters, name, packed)).result(WAIT_S)
        assert model.adapters is not None
        slots = model.adapters.nbytes
        assert slots > 2 * BLOCK_BYTES
        left = limits.room.longest_tokens
        assert left <= (kv - slots) // BLOCK_BYTES * 256 + 256
        # What the owner then lends for the slots is KV again.
        scheduler.call(lambda: limits.set(bound + slots, 0, 0)).result(WAIT_S)
        assert limits.room.longest_tokens >= left + (slots // BLOCK_BYTES - 1) * 256
    finally:
        scheduler.stop()
        thread.join(WAIT_S)
        model.limit(1 << 40, 256 * MIB)


def test_slots_are_refused_while_what_runs_or_the_least_kv_needs_their_room(
    folder: Path, tmp_path: Path
) -> None:
    model = slotted(folder)
    scheduler = Scheduler(model, tools(), max_running=4)
    limits, packed = scheduler.limits, packed_for_all_layers(folder, tmp_path)
    adapters = with_adapters(model, scheduler)
    now = limits.shrink(1 << 40)
    kv = 8 * BLOCK_BYTES
    try:
        limits.set(now.resident_bytes + kv, 0, kv)
        with pytest.raises(MemoryRefused) as refused:
            take(adapters, "a", packed)
        assert refused.value.retry_after_s is not None
        assert limits.room.longest_tokens == 8 * 256
        assert model.adapters is not None
        assert model.adapters.nbytes == 0
    finally:
        model.limit(1 << 40, 256 * MIB)
