"""GGUF files for tests: without weights, or with those of a model that is shipped."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kakeya.core.safetensors import read_header

WORDS = [chr(one) for one in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)]]
"""The 256 bytes as a byte-level vocabulary writes them."""


def tiny_meta(**more: Any) -> dict[str, Any]:
    """The metadata of a model of two layers with the bytes and two merges as its vocabulary."""
    tokens = [*WORDS, "he", "hel", "<|im_start|>", "<|im_end|>"]
    meta = {
        "general.architecture": "llama",
        "general.file_type": 3,
        "llama.context_length": 512,
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    return {**meta, **more}


def write_gguf(path: Path, meta: Mapping[str, Any]) -> Path:
    path.write_bytes(gguf_bytes(meta))
    return path


def gguf_bytes(meta: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None) -> bytes:
    tensors = tensors or {}
    entries = b"".join(_text(key) + _typed(value) for key, value in meta.items())
    weights = infos = b""
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        infos += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        infos += struct.pack("<IQ", 0, len(weights))  # float32
        weights += _padded(tensor.astype("<f4").tobytes())
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(meta)) + entries + infos
    return (_padded(head) + weights) if tensors else head


def qwen3_gguf(folder: Path, path: Path) -> Path:
    """Write the GGUF file of a folder with a Qwen 3 whose tokenizer cuts as GPT-2's does."""
    config, tokenizer, text = (
        json.loads((folder / name).read_text())
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary | special, key=(vocabulary | special).__getitem__)
    meta = {
        "general.architecture": "qwen3",
        "general.file_type": 0,
        "qwen3.context_length": config["max_position_embeddings"],
        "qwen3.block_count": config["num_hidden_layers"],
        "qwen3.embedding_length": config["hidden_size"],
        "qwen3.feed_forward_length": config["intermediate_size"],
        "qwen3.attention.head_count": config["num_attention_heads"],
        "qwen3.attention.head_count_kv": config["num_key_value_heads"],
        "qwen3.attention.key_length": config["head_dim"],
        "qwen3.attention.value_length": config["head_dim"],
        "qwen3.attention.layer_norm_rms_epsilon": float(np.float32(config["rms_norm_eps"])),
        "qwen3.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": special["<|endoftext|>"],
        "tokenizer.ggml.eos_token_id": special[text["eos_token"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": text["chat_template"],
    }
    path.write_bytes(gguf_bytes(meta, dict(_tensors(folder / "model.safetensors"))))
    return path


_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"self_attn.{one}_norm": f"attn_{one}_norm" for one in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}


def _tensors(path: Path) -> list[tuple[str, np.ndarray]]:
    data, found = path.read_bytes(), []
    for name, entry in read_header(path).items():
        array = np.frombuffer(data[entry.begin : entry.end], "<f2").reshape(entry.shape)
        stem = name.removesuffix(".weight").removeprefix("model.")
        whole = {"embed_tokens": "token_embd", "norm": "output_norm"}
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            stem = f"blk.{layer}.{_NAMES[part]}"
        found.append((f"{whole.get(stem, stem)}.weight", array))
    return found


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


def _typed(value: Any) -> bytes:
    kind = _kind(value)
    return struct.pack("<I", kind) + _value(value, kind)


_FORMS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q"}


def _kind(value: Any) -> int:
    """The type that llama.cpp asks for, if the value fits into it."""
    match value:
        case bool():
            return 7
        case int():
            return 11 if value < 0 else 4 if value < 1 << 32 else 10
        case float():
            return 6
        case str():
            return 8
        case _:
            return 9


def _value(value: Any, kind: int) -> bytes:
    if kind == 8:
        return _text(value)
    if kind < 9 or kind > 9:
        return struct.pack(_FORMS[kind], value)
    kinds = {_kind(one) for one in value}
    each = 5 if kinds == {4} and max(value) < 1 << 31 else max(kinds, default=8)
    return struct.pack("<IQ", each, len(value)) + b"".join(_value(one, each) for one in value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
