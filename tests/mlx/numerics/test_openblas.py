"""What is changed for OpenBLAS gives the bits that mlx's own gives, and is changed only there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.mlx import loader, lora
from kakeya.mlx.numerics import openblas
from kakeya.mlx.numerics.grid import exactness
from kakeya.mlx.numerics.openblas import (
    Angles,
    Rotation,
    StripEmbedding,
    StripLinear,
    strip_width,
    suit,
)
from kakeya.mlx.verifier import MlxVerifier
from tests.mlx.random_models import VOCAB, write_model

TEXT = [(7 * at + at // 11) % VOCAB for at in range(60)]
ARCHITECTURES = ("llama", "qwen3", "gemma3", "mamba", "falcon_h1")


def is_by_input(layer: nn.Module) -> bool:
    """Whether a weight's inputs are outermost in memory."""
    strides = np.array(layer.weight, copy=False).strides
    return bool(strides[0] < strides[1])


@given(
    half=st.integers(1, 40),
    base=st.sampled_from((10000.0, 1e5, 5e5, 1e6)),
    scale=st.sampled_from((1.0, 0.25, 3.0)),
    rows=st.integers(1, 9),
    offsets=st.one_of(
        st.integers(0, 40000), st.lists(st.integers(0, 40000), min_size=1, max_size=3)
    ),
)
def test_rotations_have_the_bits_of_mlx(
    half: int, base: float, scale: float, rows: int, offsets: int | list[int]
) -> None:
    sequences = len(offsets) if isinstance(offsets, list) else 1
    offset = mx.array(offsets) if isinstance(offsets, list) else offsets
    theirs = nn.RoPE(2 * half, traditional=False, base=base, scale=scale)
    angles = Angles()
    ours = Rotation(theirs, angles)
    queries, keys = (mx.random.normal((sequences, heads, rows, 2 * half)) for heads in (3, 1))
    with angles.forward():
        turned = [ours(part, offset=offset) for part in (queries, keys)]
    for found, part in zip(turned, (queries, keys), strict=True):
        assert mx.array_equal(found, theirs(part, offset=offset)).item()


def test_angles_are_made_once_a_forward_and_never_kept() -> None:
    angles = Angles()
    rope = nn.RoPE(8)
    offset = mx.array([3, 5])
    with angles.forward():
        first = angles.of(rope, offset, 2)
        assert angles.of(rope, offset, 2)[0] is first[0]
        assert angles.of(rope, offset, 1)[0].shape == (2, 1, 1, 8)
        assert angles.of(nn.RoPE(8, base=77.0), offset, 2)[0] is not first[0]
    offset += 1
    for _ in range(2):
        assert not mx.array_equal(angles.of(rope, offset, 2)[0], first[0]).item()
    with angles.forward():
        assert not mx.array_equal(angles.of(rope, offset, 2)[0], first[0]).item()


@pytest.mark.parametrize(
    ("theirs", "x"),
    [
        (nn.RoPE(8, traditional=True), mx.random.normal((1, 2, 3, 8))),
        (nn.RoPE(6), mx.random.normal((1, 2, 3, 8))),
        (nn.RoPE(8), mx.random.normal((1, 2, 3, 8)).astype(mx.float16)),
        (nn.RoPE(8), mx.random.normal((2, 3, 8))),
    ],
    ids=["pairs", "a_part", "half", "no_heads"],
)
def test_other_rotations_are_left_to_mlx(theirs: nn.RoPE, x: mx.array) -> None:
    angles = Angles()
    with angles.forward(), patch.object(Angles, "of", side_effect=AssertionError):
        found = Rotation(theirs, angles)(x, offset=11)
    assert found.dtype == x.dtype
    assert mx.array_equal(found, theirs(x, offset=11)).item()


def logits(model: loader.LoadedModel) -> mx.array:
    """Behind pieces of a text and a row alone. Shape: [1, V]."""
    state = MlxVerifier(model)
    for start in range(0, len(TEXT), 25):
        state.prefill(TEXT[start : start + 25])
    return state.step(mx.array([3]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_network_that_was_made_to_suit_computes_the_same(
    architecture: str, tmp_path: Path
) -> None:
    folder = str(write_model(tmp_path / architecture, architecture))
    with patch.object(loader, "is_openblas", return_value=False):
        theirs = loader.load(folder, "a")
    with patch.object(loader, "is_openblas", return_value=True):
        ours = loader.load(folder, "b")
    assert theirs.angles is None
    assert ours.angles is not None
    expected, found = logits(theirs), logits(ours)
    # Without OpenBLAS, as here, products of the other layout are summed in another order.
    assert mx.abs(found - expected).max().item() <= 1e-4 * mx.abs(expected).max().item()
    assert exactness(ours, ()) != exactness(theirs, ())
    weights = [m for m in ours.network.modules() if isinstance(m, nn.Linear)]
    assert weights
    assert all(map(is_by_input, weights))
    assert ours.weight_bytes == theirs.weight_bytes


def test_a_forward_makes_angles_once_for_all_layers(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "llama", "llama"))
    with patch.object(loader, "is_openblas", return_value=True):
        model = loader.load(folder, "a")
    state = MlxVerifier(model)
    with patch.object(openblas, "_angles", wraps=openblas._angles) as made:
        state.prefill(TEXT)
        assert made.call_count == 1
        state.step(mx.array([3]))
        assert made.call_count == 2


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_that_is_only_looked_up_in_stays_as_it_is(is_tied: bool) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 8)
            self.head = nn.Linear(8, 8 if is_tied else 32)

    network = Network()
    before = mx.array(network.table.weight)
    suit(network, in_strips=False)
    assert is_by_input(network.head)
    assert is_by_input(network.table) == is_tied
    assert mx.array_equal(network.table.weight, before).item()


@pytest.mark.parametrize(
    ("outputs", "inputs", "width"),
    [
        (576, 576, 96),
        (1536, 576, 128),
        (576, 1536, 96),
        (49152, 576, 128),
        (151936, 896, 128),
        (192, 576, 0),
        (704, 256, 0),
        (50257, 768, 0),
        (1000, 1000, 0),
    ],
)
def test_the_width_of_a_strip_follows_from_the_shapes(
    outputs: int, inputs: int, width: int
) -> None:
    assert strip_width(outputs, inputs) == width


@given(
    strips=st.integers(1, 4),
    width=st.sampled_from((1, 3, 32)),
    inputs=st.integers(1, 9),
    lead=st.sampled_from(((), (1,), (1, 1), (1, 5), (3, 1), (2, 3))),
    has_bias=st.booleans(),
)
def test_a_layer_in_strips_computes_the_same(
    strips: int, width: int, inputs: int, lead: tuple[int, ...], has_bias: bool
) -> None:
    linear = nn.Linear(inputs, strips * width, bias=has_bias)
    embedding = nn.Embedding(strips * width, inputs)
    x = mx.random.normal((*lead, inputs))
    tokens = mx.random.randint(0, strips * width, lead)
    for expected, found in (
        (linear(x), StripLinear(linear, width)(x)),
        (embedding.as_linear(x), StripEmbedding(embedding, width).as_linear(x)),
    ):
        assert found.shape == expected.shape
        assert mx.allclose(found, expected, atol=1e-5).item()
    assert mx.array_equal(embedding(tokens), StripEmbedding(embedding, width)(tokens)).item()


def test_layers_in_strips_replace_plain_ones_under_each_of_their_names() -> None:
    class Other(nn.Linear):
        pass

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(512, 1024), Other(512, 1024), nn.Linear(4, 32)]
            self.first = self.layers[0]

    network = Network()
    x = mx.random.normal((2, 512))
    expected = [layer(x) for layer in network.layers[:2]]
    suit(network, in_strips=True)
    assert [type(layer) for layer in network.layers] == [StripLinear, Other, nn.Linear]
    assert network.first is network.layers[0]
    assert all(map(is_by_input, network.layers[1:]))
    for layer, other in zip(network.layers[:2], expected, strict=True):
        assert mx.allclose(layer(x), other, atol=1e-5).item()


@pytest.mark.parametrize("in_strips", [True, False])
def test_a_large_layer_is_told_of_before_it_ends(in_strips: bool) -> None:
    network = nn.Sequential(nn.Linear(512, 1024), nn.Linear(8, 300))
    before = [mx.array(layer.weight) for layer in network.layers]
    told: list[int] = []
    suit(network, told.append, in_strips=in_strips)
    assert sum(told) == sum(weight.nbytes for weight in before)
    assert max(told) == before[0].nbytes // 2
    assert len(told) > 10
    first, second = network.layers
    strips = first.weight.swapaxes(1, 2).reshape(1024, 512) if in_strips else first.weight
    assert mx.array_equal(strips, before[0]).item()
    assert mx.array_equal(second.weight, before[1]).item()


def test_half_and_quantized_weights_stay_as_they_are() -> None:
    network = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    network.layers[0].set_dtype(mx.float16)
    nn.quantize(network, 32, 8, class_predicate=lambda path, _: path.endswith("1"))
    before = [mx.array(layer.weight) for layer in network.layers]
    suit(network, in_strips=False)
    assert not any(map(is_by_input, network.layers))
    for layer, weight in zip(network.layers, before, strict=True):
        assert mx.array_equal(layer.weight, weight).item()


def test_an_adapter_finds_the_sizes_of_a_layer_in_strips() -> None:
    assert lora._sizes(StripLinear(nn.Linear(8, 96), 32)) == (8, 96)


_WITH_OPENBLAS = """
import sys
from unittest.mock import patch
from kakeya.mlx.numerics.blas import is_openblas, is_strip_faster, preload_blas
preload_blas(1)
if not is_openblas():
    sys.exit(77)
import mlx.core as mx
from kakeya.mlx import loader
from kakeya.mlx.numerics import openblas
from tests.mlx.numerics.test_openblas import logits
with patch.object(openblas, "_CACHED_WEIGHTS", 0):
    ours = loader.load(sys.argv[1], "a")
assert ours.angles is not None
if is_strip_faster():
    assert any(isinstance(layer, openblas.StripLinear) for layer in ours.network.modules())
with patch.object(loader, "is_openblas", return_value=False):
    theirs = loader.load(sys.argv[1], "b")
expected, found = logits(theirs), logits(ours)
share = (mx.abs(found - expected).max() / mx.abs(expected).max()).item()
assert share <= 1e-5, share
"""


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_with_openblas_it_is_done_and_computes_the_same(architecture: str, tmp_path: Path) -> None:
    """In a process of its own: a BLAS is chosen before mlx is imported."""
    folder = str(write_model(tmp_path / architecture, architecture))
    done = subprocess.run(
        [sys.executable, "-c", _WITH_OPENBLAS, folder], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("no OpenBLAS on this machine")
    assert done.returncode == 0, done.stderr
