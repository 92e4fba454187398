"""Adapter folders as mlx_lm.lora writes them, by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

TINY_SHAPES = {
    "q_proj": (256, 256),
    "k_proj": (256, 128),
    "v_proj": (256, 128),
    "o_proj": (256, 256),
}
"""Of kakeya-tiny's attention: in, out."""


def safetensors(arrays: Mapping[str, tuple[str, np.ndarray]]) -> bytes:
    """The bytes of a file that holds these arrays, each with its dtype's name."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    data = b""
    for name, (dtype, array) in arrays.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def write_adapter(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    *,
    rank: int,
    scale: float = 20.0,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Write a folder with these arrays, by their names; float32 or float16."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "fine_tune_type": "lora",
        "num_layers": 4,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0},
    } | dict(config or {})
    (folder / "adapter_config.json").write_text(json.dumps(described))
    names = {"float32": "F32", "float16": "F16"}
    (folder / "adapters.safetensors").write_bytes(
        safetensors({name: (names[str(a.dtype)], a) for name, a in arrays.items()})
    )
    return folder


def tiny_arrays(
    seed: int, *, rank: int = 8, layers: int = 4, size: float = 0.02
) -> dict[str, np.ndarray]:
    """Random A and B for the attention of kakeya-tiny; other seeds, other outputs."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for layer in range(layers):
        for name, (ins, outs) in TINY_SHAPES.items():
            path = f"model.layers.{layer}.self_attn.{name}"
            arrays[f"{path}.lora_a"] = rng.normal(0, size, (ins, rank)).astype(np.float32)
            arrays[f"{path}.lora_b"] = rng.normal(0, size, (rank, outs)).astype(np.float32)
    return arrays


def tiny_adapter(folder: Path, seed: int, *, rank: int = 8, size: float = 0.02) -> Path:
    """A folder with a random adapter for kakeya-tiny."""
    return write_adapter(folder, tiny_arrays(seed, rank=rank, size=size), rank=rank)
