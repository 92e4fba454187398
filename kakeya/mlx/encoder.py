"""Encoders of the BERT family: texts in token ids become vectors.

The architecture is that of "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding" (Devlin et al., 2019), with the positions of RoBERTa where the config names it. How
the vectors of tokens become one is read from the files of Sentence-BERT (Reimers and Gurevych,
2019), which lie beside the weights:

    modules.json                the steps behind the encoder: pooling, and perhaps normalization
    1_Pooling/config.json       mean, first token ([CLS]), or maximum
    sentence_bert_config.json   the most tokens of a text, where they are fewer than the positions

A folder without these files pools by the mean, and normalizes nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from kakeya.core.errors import ConfigError
from kakeya.core.ids import ENCODERS
from kakeya.core.units import ENCODER_SCORE_BYTES

Pooling = Literal["mean", "cls", "max"]
_Kind = TypeVar("_Kind", dict[str, Any], list[Any])
_POSITIONS_BEHIND_PADDING = tuple(kind for kind in ENCODERS if kind != "bert")
"""Model types whose first position is that behind the padding token's id."""
_OVER = (1.97482765e-06, 2.88042474e-04, 4.00367881e-03, 0.0534675763, 1.96249705e-01, 1.12837898)
_UNDER = (3.74808943e-05, 1.21636858e-03, 1.54444858e-02, 1.1647673e-01, 5.07252931e-01, 1.0)
"""The error function is z * over(z^2) / under(z^2) up to |z| = 4, and +-1 beyond: fitted by least
squares, wrong by at most 4e-7."""


def gelu(x: mx.array) -> mx.array:
    """x times the normal distribution function of x.

    On the CPU mlx takes the error function value by value, which costs more than the products
    around it.
    """
    if x.dtype != mx.float32 or mx.default_device().type != mx.DeviceType.cpu:
        return cast("mx.array", nn.gelu(x))
    z = mx.clip(x * 0.5**0.5, -4.0, 4.0)
    square = z * z
    over, under = _OVER[0] * square + _OVER[1], _UNDER[0] * square + _UNDER[1]
    for above, below in zip(_OVER[2:], _UNDER[2:], strict=True):
        over, under = over * square + above, under * square + below
    return 0.5 * x * (1.0 + z * over / under)


_ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The architecture of an encoder, and the steps behind it.

    `first_position` is the row of the position table for a text's first token. `text_tokens` is
    the most tokens of a text. `nested_sizes` are lengths at which a vector may be cut off because
    the model was trained so; () = at none, (0,) = at any.
    """

    hidden_size: int
    inner_size: int
    heads: int
    layers: int
    vocab_size: int
    positions: int
    first_position: int
    types: int
    norm_eps: float
    activation: str
    text_tokens: int
    pooling: Pooling = "mean"
    normalizes: bool = False
    nested_sizes: tuple[int, ...] = ()


def read_config(folder: Path) -> EncoderConfig:
    """Read the architecture from the files of a folder. Raises ConfigError naming what is wrong."""
    config = _json(folder / "config.json", dict)
    kind = config.get("model_type")
    if kind not in ENCODERS:
        known = ", ".join(ENCODERS)
        raise ConfigError(
            f"{folder} holds a model of type {kind!r}; embeddings are computed by {known}"
        )
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError(
            f"{folder} has position_embedding_type {config['position_embedding_type']!r}; only "
            "'absolute' is known"
        )
    activation = config.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ConfigError(
            f"{folder} has hidden_act {activation!r}; known are {', '.join(_ACTIVATIONS)}"
        )
    pooling, normalizes = _steps(folder)
    try:
        padding = int(config.get("pad_token_id") or 0)
        first = padding + 1 if kind in _POSITIONS_BEHIND_PADDING else 0
        size, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        if heads < 1 or size % heads:
            raise ConfigError(
                f"{folder / 'config.json'} has hidden_size {size} and num_attention_heads {heads}; "
                "the size must be a multiple of the heads"
            )
        positions = int(config["max_position_embeddings"])
        return EncoderConfig(
            hidden_size=size,
            inner_size=int(config["intermediate_size"]),
            heads=heads,
            layers=int(config["num_hidden_layers"]),
            vocab_size=int(config["vocab_size"]),
            positions=positions,
            first_position=first,
            types=int(config.get("type_vocab_size", 2)),
            norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            activation=activation,
            text_tokens=min(positions - first, _most_tokens(folder) or positions),
            pooling=pooling,
            normalizes=normalizes,
            nested_sizes=_nested_sizes(config),
        )
    except (KeyError, TypeError, ValueError) as fault:
        raise ConfigError(f"{folder / 'config.json'} lacks a number: {fault}") from fault


class EncoderNetwork(nn.Module):
    """The network. Its parameters are named as `renamed` makes them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, size)
        self.positions = nn.Embedding(config.positions, size)
        self.types = nn.Embedding(config.types, size)
        self.norm = nn.LayerNorm(size, eps=config.norm_eps)
        self.layers = [EncoderLayer(config) for _ in range(config.layers)]
        self._config = config

    def __call__(self, tokens: mx.array, lengths: mx.array) -> mx.array:
        """One vector for each text.

        Shapes: tokens [B, L] int32, lengths [B] int32 -> [B, D] float32.
        """
        first, length = self._config.first_position, tokens.shape[1]
        x = self.words(tokens) + self.positions.weight[first : first + length]
        x = self.norm(x + self.types.weight[0])
        is_text = mx.arange(length)[None] < lengths[:, None]
        hidden = mx.where(is_text, 0.0, -math.inf).astype(x.dtype)[:, None, None]
        for layer in self.layers:
            x = layer(x, hidden)
        return self._pooled(x.astype(mx.float32), is_text[..., None], lengths)

    def _pooled(self, x: mx.array, is_text: mx.array, lengths: mx.array) -> mx.array:
        match self._config.pooling:
            case "cls":
                found = x[:, 0]
            case "max":
                found = mx.where(is_text, x, -math.inf).max(axis=1)
            case "mean":
                found = mx.where(is_text, x, 0.0).sum(axis=1) / lengths[:, None]
        return found


class EncoderLayer(nn.Module):
    """Attention over the whole text, then two linear layers, each behind its sum normalized."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.attend = nn.Linear(size, 3 * size)
        self.attended = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, eps=config.norm_eps)
        self.inner = nn.Linear(size, config.inner_size)
        self.outer = nn.Linear(config.inner_size, size)
        self.norm = nn.LayerNorm(size, eps=config.norm_eps)
        self._heads = config.heads
        self._activation = _ACTIVATIONS[config.activation]

    def __call__(self, x: mx.array, hidden: mx.array) -> mx.array:
        """Shapes: x [B, L, D], hidden [B, 1, 1, L] -> [B, L, D]."""
        rows, length, size = x.shape
        split = self.attend(x).reshape(rows, length, 3, self._heads, -1)
        queries, keys, values = split.transpose(2, 0, 3, 1, 4)
        found = _attention(queries, keys, values, hidden)
        x = self.attention_norm(x + self.attended(found.swapaxes(1, 2).reshape(rows, length, size)))
        return cast("mx.array", self.norm(x + self.outer(self._activation(self.inner(x)))))


def _attention(queries: mx.array, keys: mx.array, values: mx.array, hidden: mx.array) -> mx.array:
    """Shapes: [B, H, L, D] three times, [B, 1, 1, L] -> [B, H, L, D].

    A long text has many scores, and the CPU backend holds all of a call: they come in pieces.
    """
    rows, heads, length, size = queries.shape
    step = max(1, ENCODER_SCORE_BYTES // (4 * rows * heads * length))
    pieces = [
        mx.fast.scaled_dot_product_attention(
            queries[:, :, at : at + step], keys, values, scale=size**-0.5, mask=hidden
        )
        for at in range(0, length, step)
    ]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


_PARTS = {
    "attention.output.dense": "attended",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "inner",
    "output.dense": "outer",
    "output.LayerNorm": "norm",
}
_FIRST = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types",
    "embeddings.LayerNorm": "norm",
}
_LAYER_NAME = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)\Z")
_OWNER = re.compile(r"\A(?:bert|roberta|model)\.")
_OLD_KINDS = {"gamma": "weight", "beta": "bias"}
_ATTENDING = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))


def renamed(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The parameters of an `EncoderNetwork` from a checkpoint's tensors.

    The tensors may have the architecture's name in front; those of heads for other tasks are left
    out. Queries, keys and values become one layer.
    """
    found: dict[str, mx.array] = {}
    attending: dict[str, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        stem, _, kind = _OWNER.sub("", name, count=1).rpartition(".")
        kind = _OLD_KINDS.get(kind, kind)
        layer = _LAYER_NAME.match(f"{stem}.{kind}")
        if stem in _FIRST:
            found[f"{_FIRST[stem]}.{kind}"] = tensor
        elif layer and layer[2] in _PARTS:
            found[f"layers.{layer[1]}.{_PARTS[layer[2]]}.{kind}"] = tensor
        elif layer and layer[2] in _ATTENDING:
            attending.setdefault(f"layers.{layer[1]}.attend.{kind}", {})[layer[2]] = tensor
    for name, three in attending.items():
        if len(three) == len(_ATTENDING):
            found[name] = mx.concatenate([three[part] for part in _ATTENDING], axis=0)
    return found


def _steps(folder: Path) -> tuple[Pooling, bool]:
    """The pooling, and whether vectors are normalized. Raises ConfigError for any other step."""
    modules = _json(folder / "modules.json", list, default=[])
    pooling: Pooling = "mean"
    normalizes = False
    for module in modules:
        told = str(module.get("type", "")) if isinstance(module, dict) else repr(module)
        kind = told.rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise ConfigError(
                f"{folder / 'modules.json'} has a step {kind!r}; known are Transformer, Pooling, "
                "Normalize"
            )
    return pooling, normalizes


_POOLINGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}


def _pooling(path: Path) -> Pooling:
    config = _json(path, dict)
    modes = [key for key in config if key.startswith("pooling_mode_") and config[key] is True]
    if isinstance(named := config.get("pooling_mode"), str):
        modes = [key for key in _POOLINGS if key.split("_")[2] == named] or [named]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ConfigError(
            f"{path} pools by {' and '.join(modes) or 'nothing'}; one of {', '.join(_POOLINGS)} "
            "is known"
        )
    return _POOLINGS[modes[0]]


def _most_tokens(folder: Path) -> int:
    config = _json(folder / "sentence_bert_config.json", dict, default={})
    found = config.get("max_seq_length")
    return found if isinstance(found, int) and found > 0 else 0


def _nested_sizes(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Lengths of a vector's useful beginnings, by the keys that models trained so carry."""
    named: Sequence[object] = config.get("matryoshka_dimensions") or ()
    sizes = tuple(size for size in named if isinstance(size, int))
    return sizes or ((0,) if config.get("is_matryoshka") is True else ())


def _json(path: Path, kind: type[_Kind], default: _Kind | None = None) -> _Kind:
    """The content of a file. Raises ConfigError where it is not of this kind."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if default is None:
            raise ConfigError(f"there is no {path}; an encoder needs it") from None
        return default
    except (OSError, ValueError) as fault:
        raise ConfigError(f"{path} cannot be read: {fault}") from fault
    if not isinstance(found, kind):
        raise ConfigError(f"{path} must hold a JSON {'list' if kind is list else 'object'}")
    return found
