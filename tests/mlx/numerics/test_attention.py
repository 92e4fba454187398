"""Attention in two parts gives what mlx's own does, and is asked only where it may be."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.mlx.batch.batch import hand_over
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.numerics import attention
from kakeya.mlx.numerics.attention import FAR_TOKENS, attend_far, is_far
from kakeya.mlx.numerics.grid import SCORE_BYTES, exactness
from kakeya.mlx.verifier import MlxVerifier
from tests.mlx.random_models import VOCAB, write_model

TEXT = [(7 * at + at // 11) % VOCAB for at in range(200)]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 3),
    each=st.integers(1, 3),
    past=st.integers(1, 50),
    count=st.integers(1, 9),
    kind=st.sampled_from((mx.float32, mx.float16)),
    seed=st.integers(0, 99),
)
def test_new_tokens_attend_as_mlx_does(
    groups: int, each: int, past: int, count: int, kind: mx.Dtype, seed: int
) -> None:
    mx.random.seed(seed)
    queries = mx.random.normal((1, groups * each, count, 8)).astype(kind)
    keys, values = (
        mx.random.normal((1, groups, past + count, width)).astype(kind) for width in (8, 6)
    )
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask="causal")
    found = attend_far(queries, keys, values, 0.3)
    assert found.shape == expected.shape
    assert found.dtype == kind
    assert mx.allclose(found, expected, atol=1e-5 if kind == mx.float32 else 5e-3).item()


@pytest.mark.parametrize("size", [1e-30, 1e4])
def test_scores_of_any_size_have_weights(size: float) -> None:
    """The highest is 2 to the power of 0, however high it is."""
    mx.random.seed(1)
    queries = size * mx.random.normal((1, 2, 4, 8))
    keys, values = mx.random.normal((1, 2, 40, 8)), mx.random.normal((1, 2, 40, 8))
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask="causal")
    found = attend_far(queries, keys, values, 1.0)
    assert mx.allclose(found, expected, atol=1e-4).item()


@pytest.mark.parametrize("bound", [1, 2000, 20_000])
def test_scores_in_parts_give_what_they_give_at_once(
    monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    mx.random.seed(2)
    queries = mx.random.normal((1, 6, 9, 8))
    keys, values = mx.random.normal((1, 3, 209, 8)), mx.random.normal((1, 3, 209, 5))
    expected = attend_far(queries, keys, values, 0.3)
    monkeypatch.setattr(attention, "SCORE_BYTES", bound)
    assert mx.allclose(attend_far(queries, keys, values, 0.3), expected, atol=1e-6).item()


def test_a_piece_behind_a_long_context_takes_bounded_memory() -> None:
    queries, keys = mx.zeros((1, 8, 128, 16)), mx.zeros((1, 2, 20_000, 16))
    mx.eval(queries, keys)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attend_far(queries, keys, keys, 0.3))
    assert mx.get_peak_memory() - before <= 4 * SCORE_BYTES < 8 * 128 * 20_000 * 4


KEYS = mx.zeros((1, 2, FAR_TOKENS + 3, 4))
NEW = mx.zeros((1, 2, 3, 4))


@pytest.mark.parametrize(
    ("queries", "keys", "mask", "sinks", "expected"),
    [
        (NEW, KEYS, "causal", None, True),
        (NEW, KEYS[:, :, 1:], "causal", None, False),
        (NEW[:, :, :1], KEYS, None, None, False),
        (NEW, KEYS, mx.ones((3, FAR_TOKENS + 3), dtype=mx.bool_), None, False),
        (NEW, KEYS, "causal", mx.zeros((2,)), False),
        (NEW, (KEYS, KEYS, KEYS), "causal", None, False),
        (mx.zeros((2, 2, 3, 4)), KEYS, "causal", None, False),
    ],
    ids=["far", "near", "one_row", "window", "sinks", "quantized", "several"],
)
def test_whose_attention_is_in_two_parts(
    queries: mx.array,
    keys: Any,
    mask: Any,
    sinks: mx.array | None,
    expected: bool,
) -> None:
    with patch.object(attention, "is_split_far", return_value=True):
        assert is_far(queries, keys, mask, sinks) == expected
    with patch.object(attention, "is_split_far", return_value=False):
        assert not is_far(queries, keys, mask, sinks)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    name: str = request.param
    loaded = load(str(write_model(tmp_path_factory.mktemp("model") / name, name)), name)
    hand_over(loaded.network)
    return loaded


def in_pieces(model: LoadedModel) -> mx.array:
    """The logits of a row behind the text, that is computed in pieces. Shape: [1, V]."""
    state = MlxVerifier(model)
    for start in range(0, len(TEXT), 25):
        state.prefill(TEXT[start : start + 25])
    return state.step(mx.array([3]))


def test_a_prompt_is_computed_as_mlx_lm_does_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = in_pieces(model)
    monkeypatch.setattr(attention, "is_split_far", lambda: True)
    monkeypatch.setattr(attention, "FAR_TOKENS", 60)
    with patch("kakeya.mlx.batch.batch.attend_far", wraps=attention.attend_far) as far:
        found = in_pieces(model)
    assert far.called
    assert mx.abs(found - expected).max().item() <= 1e-3 * mx.abs(expected).max().item()


def test_how_prompts_attend_is_part_of_what_their_bits_depend_on(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kakeya.mlx.numerics.grid.is_split_far", lambda: True)
    said = exactness(model, ((0, 64),))
    monkeypatch.setattr("kakeya.mlx.numerics.grid.is_split_far", lambda: False)
    assert exactness(model, ((0, 64),)) != said
