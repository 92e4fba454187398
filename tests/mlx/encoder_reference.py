"""Encoders with random weights, and the published architecture in numpy to compare them with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 40,
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
WORDS = [
    *[
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "the",
        "a",
        "capital",
        "of",
        "france",
        "is",
        "paris",
        "bread",
        "made",
        "##s",
    ]
]


def write_encoder(
    folder: Path,
    *,
    changes: Mapping[str, object] | None = None,
    pooling: Mapping[str, object] | None = MEAN,
    normalizes: bool = True,
    most_tokens: int | None = None,
    prefix: str = "",
    seed: int = 0,
) -> Path:
    """Write a folder as sentence-transformers does; `pooling` None = without its files."""
    config = {**CONFIG, **(changes or {})}
    folder.mkdir(parents=True, exist_ok=True)
    weights = random_weights(config, seed)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {prefix + name: mx.array(value) for name, value in weights.items()},
    )
    (folder / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        steps = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
        modules = [
            {"idx": i, "path": f"{i}_{step}" if i else "", "type": f"sentence_transformers.{step}"}
            for i, step in enumerate(steps)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if most_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": most_tokens})
        )
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)  # as many folders have it; it must not cut in silence
    tokenizer.save(str(folder / "tokenizer.json"))


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed)
    size, inner = config["hidden_size"], config["intermediate_size"]

    def draw(*shape: int) -> np.ndarray:
        return noise.normal(0, 0.3, shape).astype(np.float32)

    found = {
        "embeddings.word_embeddings.weight": draw(config["vocab_size"], size),
        "embeddings.position_embeddings.weight": draw(config["max_position_embeddings"], size),
        "embeddings.token_type_embeddings.weight": draw(config["type_vocab_size"], size),
        "pooler.dense.weight": draw(size, size),  # of another task: left out
    }
    linear = {
        "attention.self.query": (size, size),
        "attention.self.key": (size, size),
        "attention.self.value": (size, size),
        "attention.output.dense": (size, size),
        "intermediate.dense": (inner, size),
        "output.dense": (size, inner),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        for name, shape in linear.items():
            found |= {f"{at}{name}.weight": draw(*shape), f"{at}{name}.bias": draw(shape[0])}
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    for name in norms:
        found |= {f"{name}.weight": 1 + draw(size), f"{name}.bias": draw(size)}
    return found


def reference(
    folder: Path, ids: Sequence[int], *, pooling: str = "mean", normalizes: bool = True
) -> np.ndarray:
    """The vector of one text alone, in float64, from the files of its folder."""
    config = json.loads((folder / "config.json").read_text())
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    w = {name: np.array(value, dtype=np.float64) for name, value in tensors.items()}
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(ids), heads, -1).swapaxes(0, 1)

    first = 0 if config["model_type"] == "bert" else config["pad_token_id"] + 1
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.position_embeddings.weight"][first : first + len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            split(linear(x, f"{at}.attention.self.{part}")) for part in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        found = (scores / scores.sum(-1, keepdims=True)) @ v
        found = found.swapaxes(0, 1).reshape(len(ids), -1)
        x = norm(
            x + linear(found, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm"
        )
        inner = linear(x, f"{at}.intermediate.dense")
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    vector = {"mean": x.mean(0), "cls": x[0], "max": x.max(0)}[pooling]
    return vector / np.linalg.norm(vector) if normalizes else vector
