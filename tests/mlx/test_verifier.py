"""One sequence's KV: selection, pipelining, blocks, trimming by cache class."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p

from kakeya.decoding.draft.sampling import gumbel, probabilities
from kakeya.decoding.draft.sampling import select as reference
from kakeya.generation.request import Sampling
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.selection import select
from kakeya.mlx.verifier import UNBOUNDED_ROWS, MlxVerifier
from tests.mlx.random_models import write_model

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, 1.9], dtype=np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: load(str(write_model(root / name, name)), name)
        for name in ("llama", "gemma3", "mamba")
    }


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        pytest.param(Sampling(temperature=0.5, seed=2), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.3, top_k=3, seed=3), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.0, top_p=0.7, seed=4), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=0.8, top_k=4, top_p=0.9, seed=5), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.2, min_p=0.3, seed=6), marks=pytest.mark.slow),
        Sampling(temperature=1.2, top_p=0.95, top_k=4, min_p=0.2, seed=7),
    ],
)
def test_selection_draws_from_the_reference_distribution(sampling: Sampling) -> None:
    draws = 4000
    rows = mx.array(np.tile(LOGITS, (draws, 1)))
    counts = Counter(select(rows, sampling, first_position=17).tolist())
    expected = probabilities(LOGITS, sampling) * draws
    kept = expected > 0
    assert set(counts) <= set(np.flatnonzero(kept).tolist())
    seen = np.array([counts[token] for token in range(len(LOGITS))])
    chi_square = float((((seen - expected) ** 2)[kept] / expected[kept]).sum())
    # 99.99th percentile of chi-square with 5 degrees of freedom.
    assert chi_square < 25.7


@pytest.mark.parametrize("min_p", [0.001, pytest.param(0.05, marks=pytest.mark.slow), 0.3, 0.99])
@pytest.mark.parametrize(
    "temperature", [0.4, *(pytest.param(one, marks=pytest.mark.slow) for one in (1.0, 3.0))]
)
def test_min_p_keeps_the_tokens_that_mlx_lm_keeps(min_p: float, temperature: float) -> None:
    logits = 3 * np.random.default_rng(5).normal(size=(40, 96)).astype(np.float32)
    scaled = mx.array(logits) / temperature
    theirs = apply_min_p(scaled - mx.logsumexp(scaled, axis=-1, keepdims=True), min_p) > -mx.inf
    sampling = Sampling(temperature=temperature, min_p=min_p, seed=3)
    ours = np.stack([probabilities(row, sampling) > 0 for row in logits])
    assert ours.tolist() == theirs.tolist()
    for first_position in range(0, 400, 40):
        drawn = select(mx.array(logits), sampling, first_position)
        assert all(ours[row, token] for row, token in enumerate(drawn.tolist()))


@pytest.mark.parametrize("min_p", [0.0, 1e-30])
def test_a_min_p_that_drops_nothing_changes_nothing(min_p: float) -> None:
    logits = mx.array(np.random.default_rng(6).normal(size=(200, 96)).astype(np.float32))
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=4)
    expected = select(logits, sampling, 7).tolist()
    assert select(logits, replace(sampling, min_p=min_p), 7).tolist() == expected


def test_noise_belongs_to_the_position_not_to_the_row() -> None:
    sampling = Sampling(temperature=1.0, seed=9)
    rows = mx.array(np.tile(LOGITS, (8, 1)))
    block = select(rows, sampling, first_position=100).tolist()
    single = [select(rows[:1], sampling, first_position=100 + i).item() for i in range(8)]
    assert block == single


def test_greedy_ignores_the_seed_and_takes_the_lowest_of_equals() -> None:
    rows = mx.array([[1.0, 3.0, 3.0, 0.0]])
    assert select(rows, Sampling(seed=1), 0).item() == 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-29, 1e-31, 1e-40, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    rows = mx.array(np.tile(LOGITS[::-1], (4, 1)))
    sampling = Sampling(temperature=temperature, top_k=4, top_p=0.9, seed=1)
    assert select(rows, sampling, 7).tolist() == [5] * 4


@pytest.mark.parametrize("top_p", [1e-3, 1e-40, 1e-46, 5e-324])
def test_a_top_p_near_zero_keeps_the_best_token(top_p: float) -> None:
    rows = mx.array(np.tile(LOGITS[::-1], (4, 1)))
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=1)
    assert select(rows, sampling, 7).tolist() == [5] * 4
    noise = gumbel(1, 7, len(LOGITS))
    assert reference(LOGITS[::-1], sampling, noise) == 5


def test_a_pipeline_selects_what_single_steps_select(models: dict[str, LoadedModel]) -> None:
    for model in models.values():
        single, piped = MlxVerifier(model), MlxVerifier(model)
        single.prefill([3, 4, 5])
        piped.prefill([3, 4, 5])
        token, expected = 6, []
        for _ in range(10):
            single.launch(token)
            token = single.collect()
            expected.append(token)
        piped.launch(6)
        got = []
        for _ in range(9):
            piped.launch(None)
            got.append(piped.collect())
        got.append(piped.collect())
        assert got == expected
        assert piped.in_flight() == 0
        assert piped.length == piped.layer_length() == 13


def test_only_trimmable_caches_take_blocks(models: dict[str, LoadedModel]) -> None:
    full, window, recurrent = (MlxVerifier(models[n]) for n in ("llama", "gemma3", "mamba"))
    assert full.verifiable_rows() == UNBOUNDED_ROWS
    assert recurrent.verifiable_rows() == 0
    assert window.verifiable_rows() == 23
    window.prefill(list(range(10)))
    assert window.verifiable_rows() == 13
    window.prefill(list(range(10)))
    window.prefill(list(range(10)))
    assert window.verifiable_rows() == 0


def test_a_trim_that_cannot_be_changes_nothing(models: dict[str, LoadedModel]) -> None:
    recurrent = MlxVerifier(models["mamba"])
    recurrent.prefill([1, 2, 3])
    assert not recurrent.trim(1)
    assert recurrent.trim(0)
    assert recurrent.length == 3


def test_rejected_rows_leave_no_trace(models: dict[str, LoadedModel]) -> None:
    for name in ("llama", "gemma3"):
        touched, fresh = MlxVerifier(models[name]), MlxVerifier(models[name])
        touched.prefill([3, 4, 5])
        touched.verify([6, 7, 8, 9])
        assert touched.trim(3)
        fresh.prefill([3, 4, 5])
        fresh.verify([6])
        assert touched.length == fresh.length == touched.layer_length()
        assert touched.verify([10, 11]) == fresh.verify([10, 11])


def test_bytes_per_token_are_what_the_layers_take(models: dict[str, LoadedModel]) -> None:
    full = MlxVerifier(models["llama"])
    assert full.nbytes_per_token() == 0
    full.prefill([1, 2, 3])
    # 2 layers x keys and values x 2 heads x 16 x 4 bytes
    assert full.nbytes_per_token() == 2 * 2 * 2 * 16 * 4


def test_blas_is_found_where_it_is(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "from kakeya.mlx.numerics.blas import preload_blas; import ctypes.util, sys;"
        "fast = preload_blas(1);"
        "assert 'mlx.core' not in sys.modules;"
        "assert fast == (sys.platform == 'darwin' or bool(ctypes.util.find_library('openblas')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
