"""The prefill grid: the same on every start, and pieces that stay within their time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.mlx.kv.blocks import plan_blocks
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.model import MlxModel
from kakeya.mlx.numerics import grid as prefill_grid
from kakeya.mlx.numerics.grid import exactness, is_row_exact, nominal_grid, plan_grid
from tests.mlx.random_models import write_model

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "kakeya" / "models" / "kakeya-tiny"


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load(str(TINY), "tiny")


@given(
    st.floats(0, 0.1),
    st.floats(0, 1e-3),
    st.sampled_from([16, 32]),
    st.sampled_from([32, 64, 256]),
    st.integers(1, 100_000),
)
def test_a_grid_is_cut_in_powers_of_two_that_get_finer_where_blocks_begin(
    token_s: float, context_s: float, least: int, block: int, context: int
) -> None:
    limit_s = 0.15
    grid = plan_grid(
        token_s,
        context_s,
        limit_s=limit_s,
        least=least,
        block_tokens=block,
        context_tokens=context,
    )
    positions, chunks = [p for p, _ in grid], [c for _, c in grid]
    assert positions[0] == 0
    assert positions == sorted(set(positions))
    assert all(position % block == 0 for position in positions)
    assert chunks == sorted(set(chunks), reverse=True)
    assert all(block % chunk == 0 and chunk >= least for chunk in chunks)
    # Each piece within its time up to where the next begins, or as short as it can be.
    for (_, chunk), end in zip(grid, [*positions[1:], context // block * block], strict=True):
        assert chunk == least or chunk * (token_s + context_s * end) <= limit_s * (1 + 1e-9)


def test_a_model_has_the_same_grid_on_every_start(tiny: LoadedModel) -> None:
    """Unlike what is measured: the machine may be busy at one of them."""
    first, second = (nominal_grid(tiny, plan_blocks(tiny)) for _ in range(2))
    assert (
        first
        == second
        == nominal_grid(load(str(TINY), "again", adapter_slots=2), plan_blocks(tiny))
    )
    assert exactness(tiny, first) == exactness(tiny, second)


def test_a_restart_finds_its_blocks(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path, "gemma3"))
    first, second = (MlxModel(load(folder, "m"), 0.0, False).facts for _ in range(2))
    assert first.kv_exactness == second.kv_exactness
    assert first.kv_layout == second.kv_layout
    assert first.prefill_grid == second.prefill_grid != ()


def test_slower_machines_and_larger_models_have_finer_grids(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = plan_blocks(tiny)
    rates = (1e9, 1e10, 1e11, 1e13)
    first = []
    for rate in rates:
        monkeypatch.setattr(prefill_grid, "_operations_per_s", lambda rate=rate: rate)
        first.append(nominal_grid(tiny, blocks)[0][1])
    assert first == sorted(first)
    assert first[0] < first[-1] == blocks.block_tokens


def test_experts_count_as_far_as_a_token_is_sent_to_them(tmp_path: Path) -> None:
    changes = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    model = load(str(write_model(tmp_path, "qwen3", changes=changes)), "moe")
    config = model.config
    weights = prefill_grid._weights_of_a_token(model.network, config)
    fewer = prefill_grid._weights_of_a_token(model.network, {**config, "num_experts_per_tok": 1})
    assert weights - fewer == 2 * 3 * 64 * 64
    assert not is_row_exact(model, plan_blocks(model))


def test_packed_weights_count_as_what_they_stand_for(tmp_path: Path) -> None:
    plain = load(str(write_model(tmp_path / "plain", "llama")), "plain")
    packed = load(str(write_model(tmp_path / "packed", "llama", quantize_bits=4)), "packed")
    counts = [prefill_grid._weights_of_a_token(m.network, m.config) for m in (plain, packed)]
    assert counts[0] == counts[1] > 0


def test_exactness_names_what_bits_depend_on(tiny: LoadedModel) -> None:
    said = json.loads(exactness(tiny, ((0, 64),)))
    assert said["grid"] == [[0, 64]]
    assert json.loads(exactness(tiny, ()))["grid"] == "any"
    assert {"mlx", "mlx_lm", "machine", "device", "architecture", "blas", "dtype"} <= set(said)
    other = exactness(replace(tiny, dtype="bfloat16"), ((0, 64),))
    assert other != exactness(tiny, ((0, 64),))


def test_an_engine_says_why_its_kv_cannot_be_handed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path, "llama", changes={"max_position_embeddings": 100})
    facts = MlxModel(load(str(folder), "short"), 0.0, False).facts
    assert (facts.kv_block_tokens, facts.kv_block_bytes, facts.kv_layout) == (0, 0, "")
    said = next(
        r for r in caplog.records if r.message == "KV of the model cannot leave this engine"
    )
    assert "a context of 100 tokens is too short for blocks" in str(vars(said))
