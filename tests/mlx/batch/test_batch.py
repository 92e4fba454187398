"""Rows that share a forward: each has the bits that it has alone, whoever joins and leaves."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache
from tokenizers import Tokenizer

from kakeya.adapters.files.packed import PackedAdapter, PackedTensor, Precision
from kakeya.core.errors import InvalidArgument
from kakeya.decoding.processors.grammar import Grammars
from kakeya.decoding.processors.processors import LogitProcessors
from kakeya.generation.request import Sampling
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.mlx.batch import batch
from kakeya.mlx.batch import cache as row_caches
from kakeya.mlx.batch.batch import launch_together, why_by_turns
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.lora import AdapterSlots
from kakeya.mlx.model import MlxModel
from kakeya.mlx.verifier import MlxVerifier
from tests.arithmetic import own_arithmetic
from tests.laws import law
from tests.mlx.random_models import VOCAB, write_model

SLOTS = 3
BATCHED = ("llama", "qwen3", "gemma3", "llama-4bit")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name in (*BATCHED, "mamba"):
        architecture, _, bits = name.partition("-")
        folder = write_model(root / name, architecture, quantize_bits=4 if bits else None)
        made[name] = load(str(folder), name, adapter_slots=SLOTS, adapter_rank=4)
        why_by_turns(made[name])
    for name in BATCHED:
        for slot in range(1, SLOTS + 1):
            slots_of(made[name]).load(slot, random_adapter(slot))
    return made


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """With heads of a width that can be quantized."""
    folder = write_model(
        tmp_path_factory.mktemp("models"), "llama", changes={"head_dim": 32, "hidden_size": 128}
    )
    model = cast("LoadedModel", QuantizedKv(load(str(folder), "quantized")))
    assert why_by_turns(model) == ""
    return model


def slots_of(model: LoadedModel) -> AdapterSlots:
    assert model.adapters is not None
    model.adapters.grow(model.adapters.count)
    return model.adapters


def random_adapter(seed: int) -> PackedAdapter:
    rng = np.random.default_rng(seed)
    sizes = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.down_proj": (128, 64)}
    return PackedAdapter(
        rank=1 + seed,
        scale=2.0,
        precision=Precision.EXACT,
        base="",
        tensors=tuple(
            PackedTensor(
                path=f"model.layers.{layer}.{name}",
                a=rng.normal(0, 0.2, (taken, 1 + seed)).astype(np.float32),
                b=rng.normal(0, 0.2, (1 + seed, given_)).astype(np.float32),
                a_scales=None,
                b_scales=None,
            )
            for layer in range(2)
            for name, (taken, given_) in sizes.items()
        ),
    )


def test_models_of_ordinary_attention_batch_and_recurrent_ones_do_not(
    models: dict[str, LoadedModel],
) -> None:
    reasons = {name: why_by_turns(model) for name, model in models.items()}
    assert "it has layers with ArraysCache" in reasons.pop("mamba")
    assert reasons == dict.fromkeys(BATCHED, "")


def test_an_engine_says_why_its_sequences_take_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path, "mamba")
    facts = MlxModel(load(str(folder), "mamba"), 0.0, False).facts
    assert facts.batch_rows == 1
    said = next(r for r in caplog.records if r.message == "sequences take turns")
    assert "ArraysCache" in str(vars(said))


class Pair:
    """One sequence twice: decoded alone, and in whatever batches a test puts it."""

    def __init__(self, model: LoadedModel, prompt: list[int], slot: int, seed: int) -> None:
        self.alone, self.shared = MlxVerifier(model), MlxVerifier(model)
        sampling = Sampling(temperature=1.0 if seed % 2 else 0.0, seed=seed)
        for state in (self.alone, self.shared):
            state.select_with(sampling)
            state.adapt(slot)
            state.prefill(prompt)
        self.pending: int | None = prompt[-1]

    def token(self) -> int | None:
        return self.pending if self.shared.in_flight() == 0 else None

    def settle(self, keep: int) -> None:
        """Read all but `keep` of the steps in flight; both must have selected the same."""
        while self.shared.in_flight() > keep:
            self.pending = self.alone.collect()
            assert self.shared.collect() == self.pending
        assert self.shared.length == self.alone.length == self.shared.layer_length()

    def same_kv(self) -> bool:
        """Whether both hold the same KV, bit for bit."""
        mine, other = (
            tree_flatten([layer.state[:2] for layer in verifier.cache])
            for verifier in (self.alone, self.shared)
        )
        return all(
            bool(mx.array_equal(one, two).item())
            for (_, one), (_, two) in zip(mine, other, strict=True)
        )


rows = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    st.integers(0, SLOTS),
    st.integers(0, 5),
)


@own_arithmetic
@pytest.mark.parametrize("name", BATCHED)
@law(12, part=3)
@given(
    made=st.lists(rows, min_size=2, max_size=5),
    rounds=st.lists(
        st.tuples(st.integers(1, 31), st.integers(0, 1), st.booleans()), min_size=3, max_size=10
    ),
)
def test_whoever_shares_the_forward_each_row_is_bit_for_bit_as_alone(
    models: dict[str, LoadedModel],
    name: str,
    made: list[tuple[list[int], int, int]],
    rounds: list[tuple[int, int, bool]],
) -> None:
    """Each round some rows share a forward, some rest, and one may verify a block by itself."""
    model = models[name]
    pairs = [Pair(model, *one) for one in made]
    for members, keep, has_block in rounds:
        go_on(model, pairs, members, keep)
        if has_block:
            verify_alone(pairs[0])
    for pair in pairs:
        pair.settle(0)
        assert pair.same_kv()


class QuantizedKv:
    """A model whose KV is kept in 8 bits."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def make_cache(self) -> list[QuantizedKVCache]:
        return [QuantizedKVCache(group_size=32, bits=8) for _ in self._model.make_cache()]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


@own_arithmetic
@law(12, part=3)
@given(
    made=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5)), min_size=2, max_size=5),
    rounds=st.lists(st.tuples(st.integers(1, 31), st.integers(0, 1)), min_size=3, max_size=10),
)
def test_rows_of_quantized_kv_share_a_forward_too(
    quantized: LoadedModel, made: list[tuple[int, int]], rounds: list[tuple[int, int]]
) -> None:
    pairs = [
        Pair(quantized, [(3 * seed + 7 * at) % VOCAB for at in range(length)], 0, seed)
        for length, seed in made
    ]
    for members, keep in rounds:
        go_on(quantized, pairs, members, keep)
    for pair in pairs:
        pair.settle(0)
        assert pair.same_kv()


def go_on(model: LoadedModel, pairs: list[Pair], members: int, keep: int) -> None:
    """One round: the pairs whose bits are set in `members` share a forward, the others rest."""
    joined = [pair for at, pair in enumerate(pairs) if members >> at & 1]
    tokens = [pair.token() for pair in joined]
    if joined:
        launch_together(model, [pair.shared for pair in joined], tokens)
    for pair, token in zip(joined, tokens, strict=True):
        pair.alone.launch(token)
        pair.settle(keep)


def verify_alone(pair: Pair) -> None:
    """A block of drafts that are wrong, on both."""
    pair.settle(0)
    assert pair.pending is not None
    if min(pair.shared.verifiable_rows(), pair.alone.verifiable_rows()) < 3:
        return
    block = [pair.pending, 1, 2]
    selected = pair.alone.verify(block)
    assert pair.shared.verify(block) == selected
    assert pair.alone.trim(2)
    assert pair.shared.trim(2)
    pair.pending = selected[0]


def test_an_adapter_beside_the_model_leaves_its_own_bits(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama")
    plain, slotted = load(str(folder), "a"), load(str(folder), "b", adapter_slots=2, adapter_rank=4)
    slots_of(slotted).load(1, random_adapter(1))
    tokens = mx.array([[5, 6, 7, 8]])
    expected = plain.forward(tokens, plain.make_cache())
    for slots in (None, mx.array([0], dtype=mx.uint32)):
        found = slotted.forward(tokens, slotted.make_cache(), slots)
        assert mx.array_equal(found, expected).item()
    other = slotted.forward(tokens, slotted.make_cache(), mx.array([1], dtype=mx.uint32))
    assert not mx.allclose(other, expected).item()


def test_a_forward_that_fails_leaves_every_row_as_it_was(models: dict[str, LoadedModel]) -> None:
    model = models["llama"]
    pairs = [Pair(model, [3 + at, 5, 7], at, 0) for at in range(2)]

    class Breaking:
        """The model, until its last layer."""

        def forward(self, *arguments: object) -> mx.array:
            model.forward(*arguments)  # type: ignore[arg-type]
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        launch_together(Breaking(), [p.shared for p in pairs], [1, 2])  # type: ignore[arg-type]
    for pair, token in zip(pairs, (1, 2), strict=True):
        assert pair.shared.layer_length() == pair.shared.length == 3
        assert pair.shared.in_flight() == 0
        pair.shared.launch(token)
        pair.alone.launch(token)
        pair.settle(0)
        assert pair.same_kv()


def exploding() -> LogitProcessors:
    """A grammar of which the next mask takes too much work."""
    file = EMBEDDED_FOLDER / "kakeya-tiny" / "tokenizer.json"
    grammars = Grammars(file, vocab_size=3072, end_ids=(0,), model_id="tiny")
    matcher = grammars.matcher('start: many\nmany: many many | "a" | "b"')
    matcher.extend(Tokenizer.from_file(str(file)).encode("a").ids * 320)
    return LogitProcessors(None, matcher)


@own_arithmetic
def test_a_grammar_that_explodes_ends_its_own_row_where_no_cache_can_be_trimmed(
    models: dict[str, LoadedModel],
) -> None:
    model = models["gemma3"]
    prompt = [2 + at for at in range(40)]  # beyond the sliding window
    pairs = [Pair(model, prompt, at, 0) for at in range(2)]
    faulty = MlxVerifier(model)
    faulty.prefill(prompt)
    faulty.select_with(Sampling(), exploding())
    launch_together(model, [pairs[0].shared, faulty, pairs[1].shared], [1, 2, 3])
    for pair, token in zip(pairs, (1, 3), strict=True):
        pair.alone.launch(token)
        pair.settle(0)
        assert pair.same_kv()
    with pytest.raises(InvalidArgument, match="Too many items"):
        faulty.collect()
    assert faulty.in_flight() == 0


def test_a_model_whose_attention_does_as_it_likes_is_not_batched(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(
        self: row_caches.RowCaches, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        keys, values = honest_fetch(self, keys, values)
        return keys + 0, values + 0

    monkeypatch.setattr(row_caches.RowCaches, "update_and_fetch", copied)
    assert "changes the arrays that its cache returned" in why_by_turns(models["llama"])


def test_rows_that_see_each_others_kv_are_noticed(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_caches.RowCaches, "update_and_fetch", crossed)
    assert "logits that are off by" in why_by_turns(models["llama"])


def test_logits_that_are_no_numbers_are_no_proof(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "forward_together", lambda *_: mx.full((3, VOCAB), float("nan")))
    assert "off by nan" in why_by_turns(models["llama"])


def crossed(
    self: row_caches.RowCaches, keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    self._parts = list(reversed(self._parts))
    return honest_fetch(self, keys, values)


honest_fetch = row_caches.RowCaches.update_and_fetch


@pytest.mark.parametrize("name", BATCHED)
def test_what_is_begun_early_has_the_bits_that_it_has_at_the_end(
    models: dict[str, LoadedModel], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin = batch._begin

    def counted(*arrays: object) -> None:
        begun.append(len(arrays))
        begin(*arrays)

    def all_of_it() -> list[bytes]:
        states = [MlxVerifier(models[name]) for _ in range(3)]
        for length, state in zip((5, 40, 61), states, strict=True):
            state.prefill([(7 * at) % VOCAB for at in range(length)])
        said = [states[0].verify([1, 2, 3])]
        for _ in range(3):
            launch_together(models[name], states, [4, 5, 6])
            said.append([state.collect() for state in states])
        states[1].launch(7)
        said.append([states[1].collect()])
        held = [part for state in states for layer in state.cache for part in layer.state[:2]]
        flat = [
            array for part in held for array in ([part] if isinstance(part, mx.array) else part)
        ]
        return [repr(said).encode(), *(bytes(memoryview(array)) for array in flat)]

    monkeypatch.setattr(batch, "_begin", counted)
    found = all_of_it()
    assert {1, 3} <= set(begun), "of steps also what attention gives"
    monkeypatch.setattr(batch, "_begin", lambda *arrays: None)
    assert found == all_of_it()


def test_nothing_is_begun_while_a_function_is_traced() -> None:
    def doubled(array: mx.array) -> mx.array:
        batch._begin(array)
        return array * 2

    assert mx.compile(doubled)(mx.ones(3)).tolist() == [2, 2, 2]
    assert mx.grad(lambda array: doubled(array).sum())(mx.ones(3)).tolist() == [2, 2, 2]
