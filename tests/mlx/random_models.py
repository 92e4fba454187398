"""Model folders with random weights, of several architectures, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

VOCAB = 96
EOS = 1

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}

CONFIGS: dict[str, dict[str, object]] = {
    "llama": {**_COMMON, "model_type": "llama"},
    "qwen3": {**_COMMON, "model_type": "qwen3"},
    # Sliding-window layers keep a rotating cache that stops being trimmable when it is full.
    "gemma3": {
        **_COMMON,
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    # Recurrent state: nothing can ever be trimmed.
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
    },
    # Attention and recurrent state in each layer.
    "falcon_h1": {
        "model_type": "falcon_h1",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_d_ssm": 32,
        "mamba_d_head": 16,
        "mamba_n_heads": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
    },
}

QWEN3_MOE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
}
"""Changes of `qwen3`: four layers of experts, of which mlx-lm has a pipeline."""


def write_model(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    quantize_bits: int | None = None,
    dtype: mx.Dtype = mx.float32,
    scale: float = 1.0,
    changes: Mapping[str, object] | None = None,
) -> Path:
    """Write config.json and model.safetensors; weights depend on the seed alone.

    `changes` go over the architecture's config; one of "" has no config but them.
    """
    config = {**CONFIGS.get(architecture, {}), **(changes or {})}
    model_class, args_class = _get_classes(config=config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    weights = [
        (name, (mx.random.normal(value.shape) * 0.25 * scale).astype(dtype))
        if value.ndim > 1
        else (name, value.astype(dtype))
        for name, value in tree_flatten(model.parameters())
    ]
    model.load_weights(weights)
    if quantize_bits is not None:
        nn.quantize(model, group_size=32, bits=quantize_bits)
        config["quantization"] = {"group_size": 32, "bits": quantize_bits}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder
