"""Blocks of KV: what is read back is what was written, and nothing that comes after differs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kakeya.core.errors import InvalidArgument
from kakeya.engine.model import KvView
from kakeya.mlx.batch.batch import hand_over
from kakeya.mlx.kv import layers as kv_layers
from kakeya.mlx.kv.blocks import KvBlocks, block_tokens_of, plan_blocks
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.numerics import attention
from kakeya.mlx.numerics.grid import is_row_exact
from kakeya.mlx.verifier import MlxVerifier
from tests.arithmetic import own_arithmetic
from tests.laws import law
from tests.mlx.random_models import VOCAB, write_model

B = 32
PIECE = 16
"""Of prefill; two to a block."""
MAKERS: dict[str, Callable[[], Any]] = {
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
    "sinks": lambda: RotatingKVCache(max_size=20, keep=4),
    "short_window": lambda: RotatingKVCache(max_size=7),
    "list": lambda: KVCache(),
}
SLOW = ("falcon_h1", "llama-bf16")
"""What is slow on the CPU has no part in the property test."""
NAMES = ("llama", "llama-bf16", "qwen3", "gemma3", "mamba", "falcon_h1", *MAKERS)


class Remade:
    """A network whose caches are of another class than its own."""

    def __init__(self, network: Any, make: Callable[[], Any]) -> None:
        self._network = network
        self._make = make

    def make_cache(self) -> list[Any]:
        return [self._make() for _ in self._network.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self._network(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    root = tmp_path_factory.mktemp("models")
    made: dict[str, LoadedModel] = {}
    for name in ("llama", "qwen3", "gemma3", "mamba", "falcon_h1"):
        made[name] = load(str(write_model(root / name, name)), name)
    wide = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    base = load(str(write_model(root / "wide", "llama", changes=wide)), "wide")
    for name, make in MAKERS.items():
        made[name] = replace(base, network=Remade(base.network, make))
    made["llama-bf16"] = load(str(root / "llama"), "llama-bf16")
    made["llama-bf16"].network.set_dtype(mx.bfloat16)
    return made


def text(tokens: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(tokens)]


def plan(model: LoadedModel) -> KvBlocks:
    """Its blocks, made smaller."""
    blocks = plan_blocks(model)
    blocks.block_tokens = B
    return blocks


def view(blocks: KvBlocks, tokens: int) -> KvView:
    size = tokens * blocks.row_bytes + blocks.state_bytes
    # From a byte that is no multiple of anything: pages are aligned, files need not be.
    data = memoryview(bytearray(size + 1))[1:]
    return KvView(data, tokens, has_state=blocks.state_bytes > 0)


def prefill(state: MlxVerifier, tokens: list[int], until: int) -> None:
    while state.length < until:
        end = min(until, (state.length // PIECE + 1) * PIECE)
        state.prefill(tokens[state.length : end])


def exported(model: LoadedModel, blocks: KvBlocks, tokens: list[int]) -> list[KvView]:
    """All of a text, piece by piece as it is computed; a tail last."""
    state = MlxVerifier(model, blocks)
    views = [view(blocks, min(B, len(tokens) - at)) for at in range(0, len(tokens), B)]
    while state.length < len(tokens):
        first = state.length
        prefill(state, tokens, min(len(tokens), (first // PIECE + 1) * PIECE))
        into = views[first // B]
        is_end = state.length == min(len(tokens), (first // B + 1) * B)
        with_state = into.has_state and is_end
        assert state.export_block(first, state.length - first, into, with_state=with_state)
    return views


def bits(state: MlxVerifier, token: int) -> bytes:
    """The bits of the logits behind one more token."""
    logits = state.step(mx.array([token], dtype=mx.int32))
    return np.array(logits.astype(mx.float32)).tobytes()


@pytest.mark.parametrize(
    "is_split", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "split"]
)
@pytest.mark.parametrize("name", NAMES)
def test_behind_blocks_everything_has_the_bits_of_a_cold_prefill(
    models: dict[str, LoadedModel], name: str, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where attention changes at a block."""
    monkeypatch.setattr(attention, "is_split_far", lambda: is_split)
    monkeypatch.setattr(attention, "FAR_TOKENS", 2 * B)
    model, tokens = models[name], text(150)
    hand_over(model.network)
    blocks = plan(model)
    views = exported(model, blocks, tokens)
    for taken in (B, 3 * B, 150):
        cold, warm = MlxVerifier(model, blocks), MlxVerifier(model, blocks)
        warm.import_blocks(views[: -(-taken // B)], taken)
        assert warm.length == taken == warm.layer_length()
        # Single steps, pieces, and a longer text, as the next request may go on.
        for end in (taken, taken + 3, taken + 40):
            more = text(250)
            text_of = [*tokens[:taken], *more]
            prefill(cold, text_of, max(end, cold.length))
            prefill(warm, text_of, max(end, warm.length))
            assert [bits(cold, 5), bits(cold, 9)] == [bits(warm, 5), bits(warm, 9)]


@own_arithmetic
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("mamba", "falcon_h1")])
def test_a_part_of_the_last_block_may_be_taken_where_no_state_lies_behind_it(
    models: dict[str, LoadedModel], name: str
) -> None:
    """Up to any token of full attention; a window knows how it was filled."""
    model, tokens = models[name], text(100)
    blocks = plan(model)
    views = exported(model, blocks, tokens)
    within = (1, B - 1, B + 1, 99) if blocks.is_full_attention else ()
    for taken in (PIECE, B + PIECE, 3 * B, *within):
        cold, warm = MlxVerifier(model, blocks), MlxVerifier(model, blocks)
        warm.import_blocks(views[: -(-taken // B)], taken)
        prefill(cold, tokens, taken)
        assert bits(cold, 5) == bits(warm, 5)


@given(st.integers(1, 12), st.integers(0, 3), st.lists(st.integers(1, 9), max_size=6))
def test_behind_a_single_row_a_window_lies_as_one_that_is_read_back(
    window: int, keep: int, pieces: list[int]
) -> None:
    """Attention sums in the order in which rows lie."""
    window += keep
    layer, given_rows = RotatingKVCache(max_size=window, keep=keep), mx.arange(80, dtype=mx.float32)
    at = 0
    for piece in (*pieces, 1):
        rows = given_rows[at : at + piece].reshape(1, 1, piece, 1)
        layer.update_and_fetch(rows, -rows)
        at += piece
        if piece == 1:
            kv_layers.straighten(layer)
    ranges = kv_layers.wanted(layer, at)
    expected = [row for first, last in ranges for row in range(first, last)]
    assert layer.keys.flatten().tolist() == expected
    assert layer.values.flatten().tolist() == [-row for row in expected]
    assert (layer.offset, layer._idx) == (at, kv_layers.places(layer, at))


@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_of_no_account_where_that_is_said(
    models: dict[str, LoadedModel], name: str
) -> None:
    model, tokens = models[name], text(70)
    if not is_row_exact(model, plan(model)):
        return
    found = set()
    for piece in (64, 32, 17, 1):
        state = MlxVerifier(model)
        for at in range(0, len(tokens), piece):
            state.prefill(tokens[at : at + piece])
        found.add(bits(state, 5))
    assert len(found) == 1


@law(12, part=2)
@given(data=st.data())
def test_any_number_of_blocks_of_any_text_is_as_good_as_computing_it(
    models: dict[str, LoadedModel], data: st.DataObject
) -> None:
    model = models[data.draw(st.sampled_from([n for n in NAMES if n not in SLOW]))]
    blocks = plan(model)
    tokens = data.draw(st.lists(st.integers(2, VOCAB - 1), min_size=B, max_size=5 * B))
    views = exported(model, blocks, tokens)
    number = data.draw(st.integers(1, len(tokens) // B))
    cold, warm = MlxVerifier(model, blocks), MlxVerifier(model, blocks)
    warm.import_blocks(views[:number], number * B)
    prefill(cold, tokens, len(tokens))
    prefill(warm, tokens, len(tokens))
    assert bits(cold, 5) == bits(warm, 5)
    # What is exported from there on is what was exported before.
    again, first = view(blocks, views[-1].tokens), len(views) * B - B
    if warm.export_block(first, views[-1].tokens, again, with_state=False):
        rows = views[-1].tokens * blocks.row_bytes
        assert again.data[:rows] == views[-1].data[:rows]


STEPS = st.lists(st.integers(1, 40), max_size=5)
"""Rows that are appended at once: one alone goes round a window."""


def append(state: MlxVerifier, rows: Sequence[int]) -> None:
    for count in rows:
        tokens = text(count, seed=state.length)
        if count == 1:
            state.step(mx.array(tokens))
        else:
            state.prefill(tokens)


@law(25, part=5)
@given(data=st.data(), before=STEPS, singles=st.integers(0, 30), trimmed=st.integers(0, 3))
def test_what_is_stowed_at_any_point_goes_on_bit_for_bit(
    models: dict[str, LoadedModel],
    data: st.DataObject,
    before: list[int],
    singles: int,
    trimmed: int,
) -> None:
    model = models[data.draw(st.sampled_from([n for n in NAMES if n not in SLOW]))]
    after = data.draw(st.one_of(STEPS, st.just([1] * 30)))
    blocks = plan(model)
    stayed, went = MlxVerifier(model, blocks), MlxVerifier(model, blocks)
    for state in (stayed, went):
        append(state, [*before, 1, *[1] * singles])
        state.trim(min(trimmed, state.length - 1))
    views = [view(blocks, min(B, went.length - at)) for at in range(0, went.length, B)]
    assert went.stow(views)
    assert not any(map(kv_layers.arrays, kv_layers.layers_of(went.cache)))
    went.restore(views)
    for each in views:
        each.data[:] = bytes(len(each.data))
    for state in (stayed, went):
        append(state, after)
    assert bits(stayed, 5) == bits(went, 5)


def test_what_does_not_fit_is_not_stowed(models: dict[str, LoadedModel]) -> None:
    model = models["gemma3"]
    blocks = plan(model)
    state = MlxVerifier(model, blocks)
    append(state, [B, 9])
    held = state.nbytes
    with pytest.raises(InvalidArgument, match="8 tokens, 9 are meant"):
        state.stow([view(blocks, B), view(blocks, 8)])
    assert state.nbytes == held


def test_what_is_exported_and_taken_is_detached(models: dict[str, LoadedModel]) -> None:
    model, tokens = models["llama"], text(2 * B)
    blocks = plan(model)
    views = exported(model, blocks, tokens)
    first = bytes(views[0].data)
    state = MlxVerifier(model, blocks)
    state.import_blocks(views, 2 * B)
    expected = bits(state, 5)
    for each in views:
        each.data[:] = bytes(len(each.data))
    state.trim(1)
    assert bits(state, 5) == expected
    into = view(blocks, B)
    assert state.export_block(0, B, into, with_state=False)
    state.trim(B)
    state.prefill([7] * B)
    assert bytes(into.data) == first


def test_taking_blocks_copies_no_buffer_at_the_next_append(models: dict[str, LoadedModel]) -> None:
    model = models["llama"]
    blocks = plan(model)
    state = MlxVerifier(model, blocks)
    state.import_blocks(exported(model, blocks, text(2 * B)), 2 * B)
    before = state.nbytes
    state.step(mx.array([5], dtype=mx.int32))
    assert state.nbytes == before
    assert before == sum(part.nbytes for layer in state.cache for part in layer.state[:2])


def test_a_window_that_has_lost_a_row_exports_nothing(models: dict[str, LoadedModel]) -> None:
    model = models["short_window"]
    blocks = plan(model)
    state = MlxVerifier(model, blocks)
    prefill(state, text(3 * B), 3 * B)
    assert not state.export_block(0, B, view(blocks, B), with_state=False)
    assert state.export_block(3 * B - PIECE, PIECE, view(blocks, B), with_state=False)
    bits(state, 5)
    assert not state.export_block(3 * B - PIECE, PIECE, view(blocks, B), with_state=False)


def test_blocks_that_do_not_hold_what_is_meant_change_nothing(
    models: dict[str, LoadedModel],
) -> None:
    for name in ("llama", "falcon_h1"):
        model = models[name]
        blocks = plan(model)
        views = exported(model, blocks, text(2 * B))
        state = MlxVerifier(model, blocks)
        last = views[1]
        short = KvView(last.data[:-1], B, last.has_state)
        for given_blocks, tokens, said in (
            ([views[0]], 2 * B, "are not in 1 blocks"),
            ([], B, "are not in 0 blocks"),
            ([*views, views[0]], 2 * B, "are not in 3 blocks"),
            ([views[0], short], 2 * B, "bytes, it must have"),
            ([replace_tokens(views[0], B - 1), last], 2 * B, "31 tokens, 32 are meant"),
        ):
            with pytest.raises(InvalidArgument, match=said):
                state.import_blocks(given_blocks, tokens)
            assert state.length == state.layer_length() == 0
        state.import_blocks(views, 2 * B)


def replace_tokens(block: KvView, tokens: int) -> KvView:
    return KvView(block.data, tokens, block.has_state)


def test_state_that_does_not_lie_there_is_not_taken(models: dict[str, LoadedModel]) -> None:
    blocks = plan(models["falcon_h1"])
    views = exported(models["falcon_h1"], blocks, text(B))
    without = KvView(views[0].data, B, has_state=False)
    with pytest.raises(InvalidArgument, match="no place for state"):
        MlxVerifier(models["falcon_h1"], blocks).import_blocks([without], B)


class Counting(KVCache):
    """Nobody knows what else it remembers."""


class Forgetful:
    """A network whose answers depend on what it keeps outside of its caches."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self._calls = 0

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self._network.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self._calls += 1
        return self._network(tokens, cache=cache) * self._calls


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Counting, "layer 0 has a Counting"),
        (lambda: CacheList(KVCache(), ChunkedKVCache(16)), "layer 1 has a ChunkedKVCache"),
        (lambda: ChunkedKVCache(16), "layer 0 has a ChunkedKVCache"),
    ],
)
def test_caches_that_are_not_known_have_no_blocks(
    models: dict[str, LoadedModel], make: Callable[[], Any], said: str
) -> None:
    base = models["llama"]
    with pytest.raises(InvalidArgument, match=said):
        plan_blocks(replace(base, network=Remade(base.network, make)))


def test_a_model_that_remembers_elsewhere_has_no_blocks(models: dict[str, LoadedModel]) -> None:
    base = models["llama"]
    with pytest.raises(InvalidArgument, match="logits behind imported KV differ"):
        plan_blocks(replace(base, network=Forgetful(base.network)))


def test_caches_of_which_some_hold_nothing_have_no_blocks(models: dict[str, LoadedModel]) -> None:
    base = models["llama"]

    class Idle(Remade):
        def make_cache(self) -> list[Any]:
            return [*super().make_cache(), KVCache()]

    with pytest.raises(InvalidArgument, match="layer 2 holds nothing"):
        plan_blocks(replace(base, network=Idle(base.network, KVCache)))


@pytest.mark.parametrize(
    ("context", "tokens"), [(100, 0), (128, 16), (512, 64), (2048, 256), (1 << 20, 256)]
)
def test_a_block_is_a_fraction_of_the_context(context: int, tokens: int) -> None:
    assert block_tokens_of(context) == tokens


def test_a_layout_says_what_the_bytes_mean(models: dict[str, LoadedModel]) -> None:
    layouts = {name: plan_blocks(models[name]).layout for name in NAMES}
    assert layouts["llama"] == layouts["qwen3"]
    # The same shapes, but other classes, windows or dtypes.
    different = ("llama", "llama-bf16", "gemma3", "mamba", "falcon_h1", *MAKERS)
    assert len({layouts[name] for name in different}) == len(different)
    parsed = json.loads(layouts["sinks"])
    assert parsed["layers"][0] == {
        "class": "RotatingKVCache",
        "window": 20,
        "keep": 4,
        "arrays": [["float32", 1, 32], ["float32", 1, 32]],
    }
