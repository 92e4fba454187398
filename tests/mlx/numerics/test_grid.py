"""The prefill grid: the same on every start, and pieces by the shapes of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.mlx.kv.blocks import plan_blocks
from kakeya.mlx.loader import LoadedModel, load
from kakeya.mlx.model import MlxModel
from kakeya.mlx.numerics import grid as prefill_grid
from kakeya.mlx.numerics.grid import exactness, is_row_exact, nominal_grid
from kakeya.mlx.numerics.openblas import suit
from tests.mlx.random_models import write_model

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "kakeya" / "models" / "kakeya-tiny"


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load(str(TINY), "tiny")


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


def test_pieces_are_as_long_as_throughput_asks_and_lie_in_one_block(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = plan_blocks(tiny)
    assert nominal_grid(tiny, blocks) == ((0, 128),)
    # Its widest weight is of 704 times 256 values; logits, which a piece does not make, are wider.
    monkeypatch.setattr(prefill_grid, "_WIDE_BYTES", 4 * 704 * 256 - 1)
    assert nominal_grid(tiny, blocks) == ((0, blocks.block_tokens),)
    monkeypatch.setattr(prefill_grid, "_WIDE_BYTES", 4 * 704 * 256)
    assert nominal_grid(tiny, blocks) == ((0, 128),)
    short = load(str(write_model(tmp_path, "llama")), "short")
    assert nominal_grid(short, plan_blocks(short)) == ((0, plan_blocks(short).block_tokens),)


def test_the_layout_of_weights_does_not_change_the_grid(tiny: LoadedModel) -> None:
    widest = prefill_grid._widest_bytes(tiny.network)
    suit(tiny.network, in_strips=True)
    assert prefill_grid._widest_bytes(tiny.network) == widest == 4 * 704 * 256


def test_experts_are_not_multiplied_with_every_token(tmp_path: Path) -> None:
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
    attention = model.network.layers[0].self_attn.q_proj.weight
    assert prefill_grid._widest_bytes(model.network) == attention.nbytes
    assert not is_row_exact(model, plan_blocks(model))


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
