"""The parts of a model that a ring group shares out: its layers, and what each rank holds.

Of a mixture of experts a token reads those that the router selects, so that it reads less than the
model takes. Sizes are those in memory, read from the headers of the weight files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kakeya.core.errors import InvalidArgument
from kakeya.core.safetensors import ArrayEntry
from kakeya.memory.estimate.estimate import kv_number_bytes, loaded_tensors
from kakeya.memory.estimate.headers import read_headers
from kakeya.memory.estimate.kv import kv_bytes, kv_layers, layer_count, layer_of, text_config

_EXPERTS = re.compile(r"\.(?:experts|switch_mlp)\.")
_HEAD = re.compile(r"(?:^|\.)lm_head\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embeddings?|word_embeddings)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Sizes in bytes. `layer_bytes` are those of the largest layer, `kv_bytes` of all layers.

    A token reads `read_bytes` of all layers and `head_bytes` of the output layer, and is multiplied
    by `products` weights of all layers. `number_bytes` are those of a number between two layers.
    """

    kind: str
    layers: int
    layer_bytes: int
    rest_bytes: int
    kv_bytes: int
    read_bytes: int
    head_bytes: int
    products: int
    heads: int
    kv_heads: int
    hidden_size: int
    number_bytes: int


def read_parts(folder: Path, *, kv_tokens: int, widens: bool) -> ModelParts:
    """The parts of the model in a folder, with KV of so many tokens; `widens` as in
    `estimate_model`. Blocks. Raises InvalidArgument where the files do not tell."""
    headers = read_headers(folder)
    if headers.problems:
        raise InvalidArgument(f"{folder} cannot be read: {'; '.join(headers.problems)}")
    config = text_config(headers.config)
    sizes = loaded_tensors(headers, config, widens=widens)
    layers = layer_count(config)
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    if not sizes or not layers or not heads or not hidden:
        raise InvalidArgument(
            f"{folder} does not tell its layers and heads: its config.json needs "
            "num_hidden_layers, num_attention_heads and hidden_size"
        )
    active, bits = _active_share(config), _bits(config)
    by_layer = [0] * layers
    read = products = 0.0
    for name, size in sizes.items():
        if (layer := layer_of(name)) is None:
            continue
        part = active if _EXPERTS.search(name) else 1.0
        by_layer[layer] += size
        read += part * size
        products += part * _weights(name, headers.tensors[name], bits)
    if not products:
        raise InvalidArgument(f"the weights in {folder} are of no layers that are known")
    rest = sum(sizes.values()) - sum(by_layer)
    number = 4 if widens else kv_number_bytes(headers.tensors)
    return ModelParts(
        kind=str(headers.config.get("model_type", "")),
        layers=layers,
        layer_bytes=max(by_layer),
        rest_bytes=rest,
        kv_bytes=kv_bytes(kv_layers(config, headers.tensors), kv_tokens, number),
        read_bytes=round(read),
        head_bytes=_sum(sizes, _HEAD) or _sum(sizes, _EMBEDDING),
        products=round(products),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads") or heads,
        hidden_size=hidden,
        number_bytes=number,
    )


def _sum(sizes: Mapping[str, int], names: re.Pattern[str]) -> int:
    return sum(size for name, size in sizes.items() if names.search(name))


def _active_share(config: Mapping[str, Any]) -> float:
    """The part of the experts that a token selects."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    there = next((count for name in names if (count := _count(config, name))), 0)
    chosen = _count(config, "num_experts_per_tok") or _count(config, "num_experts_per_token")
    return min(1.0, chosen / there) if there and chosen else 1.0


def _bits(config: Mapping[str, Any]) -> int:
    """Of a packed weight."""
    for name in ("quantization", "quantization_config"):
        said = config.get(name)
        if isinstance(said, dict) and isinstance(said.get("bits"), int) and said["bits"] > 0:
            return int(said["bits"])
    return 8


def _weights(name: str, tensor: ArrayEntry, bits: int) -> int:
    """Weights that multiply: no norms, no scales."""
    if len(tensor.shape) < 2 or name.endswith(("scales", "biases")):
        return 0
    return tensor.count if tensor.is_float else tensor.nbytes * 8 // bits


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
