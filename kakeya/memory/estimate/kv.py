"""The bytes of a model's keys and values, by its config and its weights' shapes.

    attention layers     rows of k_proj + rows of v_proj, as the headers have them for each layer;
                         where keys, values and queries share a matrix, 2 * heads * head size
    latent attention     rows of kv_a_proj (rank + rotary part), where the loader keeps the latent
    sliding windows      no more than the window, on the architectures that keep them so
    recurrent layers     nothing that grows

Tensors that the loader keeps in full, although the architecture would not need it, count in full.
The state of recurrent layers does not grow; it is left to the measurement.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya.core.safetensors import ArrayEntry

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)\Z")
_OTHER_TOWERS = re.compile(
    r"(?:^|\.)(?:vision\w*|visual|audio\w*|multi_modal_projector|embed_vision|embed_audio"
    r"|mm_projector|image_newline|mtp)(?:\.|\Z)"
)
"""Tensors that a text model's load leaves in the file."""
_KEYS = re.compile(r"(?:^|\.)(?:self_attn|attn|attention|mixer)\.(?:k_proj|wk|key)\.weight\Z")
_VALUES = re.compile(r"(?:^|\.)(?:self_attn|attn|attention|mixer)\.(?:v_proj|wv|value)\.weight\Z")
_LATENT = re.compile(r"\.kv_a_proj_with_mqa\.weight\Z")
_INDEXER = re.compile(r"\.indexer\.wk\.weight\Z")
_EXPANDS_LATENT = ("deepseek_v2", "minicpm3", "youtu_llm")
"""Models with latent attention that the loader keeps as full keys and values."""
_BY_LAYER_TYPE = (
    *("afmoe", "exaone_moe", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss"),
    *("laguna", "llama", "mellum", "ministral3", "mistral3", "muse_spark", "olmo3"),
    *("spark2_5", "step3p5"),
)
"""Models with rotating windows in the loader where `layer_types` says sliding_attention."""
_BY_PATTERN = {"gemma3_text": (6, 512), "gemma3": (6, 512), "cohere2": (4, 4096), "plamo3": (8, 0)}
"""Models with a full layer after each `pattern - 1` rotating ones in the loader: the pattern and
the window where the config leaves them out."""
_STEP_TOKENS = 256
"""Tokens by which the loader grows a full layer, and the most that it prefills at once."""
_RECURRENT = ("mamba", "mamba2", "rwkv7", "falcon_mamba")
_LINEAR_TYPES = ("linear_attention", "mamba", "conv", "recurrent", "linear")


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Numbers that one layer keeps of one token, for at most `window` tokens."""

    width: int
    window: int | None = None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def layer_count(config: Mapping[str, Any]) -> int:
    """Layers of the language model; 0 where the config does not tell."""
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return 0


def is_loaded(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor of the file is loaded; `config` is the language model's."""
    if _OTHER_TOWERS.search(name):
        return False
    if name.rpartition(".")[0].endswith("lm_head"):
        keeps_head = str(config.get("model_type", "")).startswith("gemma3")
        return keeps_head or not config.get("tie_word_embeddings", False)
    layer = _LAYER.search(name)
    layers = layer_count(config)
    return not (layer and layers and int(layer[1]) >= layers)


def layer_of(name: str) -> int | None:
    """The layer of a tensor, from 0; None = it is of none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def kv_layers(config: Mapping[str, Any], tensors: Mapping[str, ArrayEntry]) -> tuple[KvLayer, ...]:
    """The layers that keep keys and values, and the numbers of each per token."""
    config = text_config(config)
    kind = str(config.get("model_type", ""))
    if kind in _RECURRENT:
        return ()
    widths = _widths(config, kind, tensors)
    shared = config.get("num_kv_shared_layers")
    last = layer_count(config) - (shared if isinstance(shared, int) else 0)
    return tuple(
        KvLayer(width, _window(config, kind, layer))
        for layer, width in sorted(widths.items())
        if layer < last or last <= 0
    )


def kv_bytes(layers: Sequence[KvLayer], tokens: int, number_bytes: int) -> int:
    """The most bytes of `tokens` tokens of one sequence: during prefill a window also holds the
    chunk that is being added."""
    grown = -(-tokens // _STEP_TOKENS) * _STEP_TOKENS
    kept = sum(
        one.width * (grown if one.window is None else min(grown, one.window + _STEP_TOKENS))
        for one in layers
    )
    return kept * number_bytes


def kv_bytes_per_token(layers: Sequence[KvLayer], number_bytes: int) -> int:
    """Bytes that one more token of a long sequence takes."""
    return sum(one.width for one in layers if one.window is None) * number_bytes


def _widths(
    config: Mapping[str, Any], kind: str, tensors: Mapping[str, ArrayEntry]
) -> dict[int, int]:
    """Numbers per token of each layer."""
    keys: dict[int, int] = {}
    values: dict[int, int] = {}
    latent: dict[int, int] = {}
    indexer: dict[int, int] = {}
    for name, tensor in tensors.items():
        layer = _LAYER.search(name)
        if layer is None or len(tensor.shape) < 2 or not is_loaded(name, config):
            continue
        for pattern, found in (
            (_KEYS, keys),
            (_VALUES, values),
            (_LATENT, latent),
            (_INDEXER, indexer),
        ):
            if pattern.search(layer[2]) or pattern.search("." + layer[2]):
                found[int(layer[1])] = tensor.shape[0]
    if latent and kind in _EXPANDS_LATENT:
        return dict.fromkeys(latent, _expanded(config))
    if latent:
        return {layer: width + indexer.get(layer, 0) for layer, width in latent.items()}
    if keys:
        return {layer: width + values.get(layer, width) for layer, width in keys.items()}
    return dict.fromkeys(_attention_layers(config), _plain(config))


def _expanded(config: Mapping[str, Any]) -> int:
    heads = _number(config, "num_attention_heads")
    rotary = _number(config, "qk_rope_head_dim")
    plain = _number(config, "qk_nope_head_dim")
    return heads * (plain + rotary + (_number(config, "v_head_dim") or plain))


def _plain(config: Mapping[str, Any]) -> int:
    """Grouped-query attention by the config alone."""
    heads = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = _number(config, "hidden_size", "n_embd", "d_model", "dim")
    size = _number(config, "head_dim") or (hidden // heads if heads else 0)
    kept = _number(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
    if config.get("multi_query") is True:
        kept = 1
    return 2 * kept * size


def _attention_layers(config: Mapping[str, Any]) -> list[int]:
    layers = range(layer_count(config))
    kinds = config.get("layer_types", config.get("layers_block_type"))
    if not isinstance(kinds, list):
        return list(layers)
    return [layer for layer in layers if layer >= len(kinds) or kinds[layer] not in _LINEAR_TYPES]


def _window(config: Mapping[str, Any], kind: str, layer: int) -> int | None:
    """The most tokens that a layer keeps; None = all."""
    if kind in _BY_PATTERN:
        pattern, window = _BY_PATTERN[kind]
        pattern = _number(config, "sliding_window_pattern") or pattern
        window = _number(config, "sliding_window") or window
        return None if layer % pattern == pattern - 1 else window or None
    window = _number(config, "sliding_window")
    kinds = config.get("layer_types")
    if window <= 0 or kind not in _BY_LAYER_TYPE or not isinstance(kinds, list):
        return None
    is_sliding = layer < len(kinds) and kinds[layer] == "sliding_attention"
    return window if is_sliding else None


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
