"""Block-diffusion drafters with random weights."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx

from kakeya.core.ids import BLOCK_DIFFUSION
from kakeya.mlx.diffusion.network import BlockDiffusion, BlockDiffusionConfig

SMALL = BlockDiffusionConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=2,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=512,
    mask_token_id=3,
    block_tokens=8,
    window_tokens=16,
    verifier_layers=(0, 1),
    verifier_hidden_size=12,
)


def network(seed: int = 1, **changes: object) -> BlockDiffusion:
    """A network with random weights, as large as those of a trained one."""
    mx.random.seed(seed)
    made = BlockDiffusion(replace(SMALL, **changes))  # type: ignore[arg-type]
    made.model.embed_tokens.weight = mx.random.normal(made.model.embed_tokens.weight.shape)
    mx.eval(made.parameters())
    return made


def write_drafter(folder: Path, seed: int = 1, **changes: object) -> Path:
    """A folder of such a model."""
    folder.mkdir(parents=True, exist_ok=True)
    made = network(seed, **changes)
    made.save_weights(str(folder / "model.safetensors"))
    config = {"model_type": BLOCK_DIFFUSION, **asdict(made.config)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
