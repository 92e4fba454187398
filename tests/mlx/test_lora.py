"""What does not fit the network is refused by name, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kakeya.adapters.files.packed import PackedAdapter, PackedTensor
from kakeya.core.errors import InvalidArgument
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.lora import AdapterSlots
from tests.mlx.batch.test_batch import random_adapter, slots_of
from tests.mlx.random_models import write_model

TOKENS = mx.array([[5, 6, 7, 8]])


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    return load(str(write_model(tmp_path, "llama")), "m", adapter_slots=2, adapter_rank=4)


def logits(model: LoadedModel, slot: int) -> mx.array:
    return model.forward(TOKENS, model.make_cache(), mx.array([slot], dtype=mx.uint32))


def with_tensor(**changes: object) -> PackedAdapter:
    adapter = random_adapter(1)
    first = adapter.tensors[0]._replace(**changes)  # type: ignore[arg-type]
    return replace(adapter, tensors=(first, *adapter.tensors[1:]))


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (with_tensor(path="model.layers.7.self_attn.q_proj"), "layers.7.self_attn.q_proj.*nothing"),
        (with_tensor(path="model.layers.0.self_attn.q_proj.x"), "q_proj.x.*nothing"),
        (with_tensor(path="model.layers.x.mlp"), "layers.x.mlp.*nothing"),
        (with_tensor(path="model.layers.0.mlp"), "layers.0.mlp.*a MLP there"),
        (with_tensor(path="model.embed_tokens"), "embed_tokens.*a Embedding there"),
        (with_tensor(path=""), "must be a linear layer"),
        (with_tensor(a=zeros(65, 2)), "q_proj takes 65 features and gives 64"),
        (with_tensor(b=zeros(2, 63)), "q_proj takes 64 features and gives 63"),
        (with_tensor(b=np.full((2, 64), np.nan, np.float32)), "q_proj holds values that are no"),
        (replace(random_adapter(1), rank=5), "rank 5, and slots take 1 to 4"),
        (replace(random_adapter(1), base="other"), "base other, and this model is mine"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    model: LoadedModel, adapter: PackedAdapter, said: str
) -> None:
    slots = AdapterSlots(model.network, count=2, max_rank=4, base="mine")
    before = model.forward(TOKENS, model.make_cache())
    with pytest.raises(InvalidArgument, match=said):
        slots.load(1, adapter)
    assert slots.nbytes == 0
    assert mx.array_equal(model.forward(TOKENS, model.make_cache()), before).item()


def test_a_slot_that_is_filled_anew_keeps_nothing_of_the_old_one(model: LoadedModel) -> None:
    slots = slots_of(model)
    small = random_adapter(1)
    lone = replace(small, tensors=small.tensors[:1])
    slots.load(1, lone)
    expected = logits(model, 1)
    mx.eval(expected)
    slots.load(1, random_adapter(3))
    assert not mx.allclose(logits(model, 1), expected).item()
    slots.load(1, lone)
    assert mx.array_equal(logits(model, 1), expected).item()


def test_adapters_of_one_shape_are_told_apart_and_another_shape_is_looked_at(
    model: LoadedModel,
) -> None:
    """What is known of a shape is where it belongs, never what is in it."""
    slots, first = slots_of(model), random_adapter(1)
    lone = replace(first, tensors=first.tensors[-1:])
    for slot, adapter in ((1, first), (2, replace(first, scale=-2 * first.scale))):
        slots.load(slot, adapter)
    assert not mx.allclose(logits(model, 1), logits(model, 2)).item()
    slots.load(2, lone)
    with_lone = logits(model, 2)
    mx.eval(with_lone)
    slots.load(2, first)
    assert mx.array_equal(logits(model, 2), logits(model, 1)).item()
    slots.load(2, lone)
    assert mx.array_equal(logits(model, 2), with_lone).item()
    damaged = first.tensors[0].a.copy()
    damaged[0, 0] = np.inf
    with pytest.raises(InvalidArgument, match="no numbers"):
        slots.load(2, with_tensor(a=damaged))
    assert mx.array_equal(logits(model, 2), with_lone).item()


def test_filling_one_slot_leaves_the_others(model: LoadedModel) -> None:
    slots = slots_of(model)
    slots.load(1, random_adapter(1))
    expected = logits(model, 1)
    mx.eval(expected)
    slots.load(2, random_adapter(2))
    assert mx.array_equal(logits(model, 1), expected).item()


def test_bytes_are_foreseen(model: LoadedModel) -> None:
    assert model.adapters is not None
    slots, adapter = model.adapters, random_adapter(2)
    part = replace(adapter, tensors=adapter.tensors[:1])
    for number, (one, count) in enumerate(((part, 1), (adapter, 1), (adapter, 2)), start=1):
        foreseen = slots.nbytes + slots.missing_bytes(one, count)
        slots.grow(count)
        slots.load(min(number, count), one)
        assert slots.nbytes == foreseen > 0
        assert slots.missing_bytes(one, count) == 0


def test_adapters_stay_as_they_are_when_slots_are_added(model: LoadedModel) -> None:
    assert model.adapters is not None
    slots = model.adapters
    slots.grow(1)
    slots.load(1, random_adapter(1))
    before = logits(model, 1)
    slots.grow(2)  # while a step is in flight
    after = logits(model, 1)
    slots.load(2, random_adapter(3))
    assert mx.array_equal(before, after).item()
    assert mx.array_equal(before, logits(model, 1)).item()
    assert not mx.array_equal(before, logits(model, 2)).item()


def test_a_quantized_layer_takes_adapters_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama", quantize_bits=4)
    model = load(str(folder), "m", adapter_slots=2, adapter_rank=4)
    before = logits(model, 0)
    mx.eval(before)
    slots_of(model).load(1, random_adapter(2))
    assert mx.array_equal(logits(model, 0), before).item()
    assert not mx.allclose(logits(model, 1), before).item()


def test_int8_values_are_used_with_their_scales(model: LoadedModel) -> None:
    exact = random_adapter(1)
    slots_of(model).load(1, exact)
    slots_of(model).load(2, replace(exact, tensors=tuple(map(as_int8, exact.tensors))))
    near, far = logits(model, 2) - logits(model, 1), logits(model, 0) - logits(model, 1)
    assert 0 < mx.abs(near).max().item() < 0.1 * mx.abs(far).max().item()


def as_int8(tensor: PackedTensor) -> PackedTensor:
    a, b = tensor.floats()
    a_scales, b_scales = (np.abs(part).max(axis=0) / 127 for part in (a, b))
    return tensor._replace(
        a=np.rint(a / a_scales).astype(np.int8),
        b=np.rint(b / b_scales).astype(np.int8),
        a_scales=a_scales,
        b_scales=b_scales,
    )
