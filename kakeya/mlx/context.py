"""The positions that a model was made for, by the files of its folder.

config.json             its own word, under one of several names; times the factor of a scaled
                        RoPE whose positions it counts unscaled
transformers            the default of the architecture, where config.json leaves it out
tokenizer_config.json   model_max_length, where the architecture has no such bound
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
_DEFAULT_TOKENS = 8192
_MOST_TOKENS = 1 << 30
"""Tokenizers say 10 ** 30 where they mean no bound."""
_SCALED_ROPES = frozenset({"linear", "dynamic", "yarn"})
"""Others count their positions scaled."""


def context_tokens(folder: Path, sections: Iterable[Mapping[str, Any]]) -> int:
    """The tokens of a context; `sections` are parts of config.json, the one about text first."""
    parts = list(sections)
    for part in parts:
        for key in _KEYS:
            if found := _count(part.get(key)):
                return _scaled(found, part)
    types = (part.get("model_type") for part in parts)
    defaults = (_default(kind) for kind in types if isinstance(kind, str))
    return next(filter(None, defaults), 0) or _of_tokenizer(folder) or _DEFAULT_TOKENS


def _scaled(tokens: int, config: Mapping[str, Any]) -> int:
    """The positions that a scaled RoPE reaches; Gemma 3 counts them scaled, unlike others."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or str(config.get("model_type")).startswith("gemma3"):
        return tokens
    factor = rope.get("factor")
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in _SCALED_ROPES or not isinstance(factor, int | float):
        return tokens
    original = _count(rope.get("original_max_position_embeddings")) or tokens
    return max(tokens, int(original * factor))


def _default(model_type: str) -> int:
    """The positions of an architecture by its defaults; 0 = unknown."""
    with contextlib.suppress(Exception):  # other people's constructors: any fault means unknown
        config = CONFIG_MAPPING[model_type]()
        return _count(getattr(config, "max_position_embeddings", 0))
    return 0


def _of_tokenizer(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        return _count(config.get("model_max_length"))
    return 0


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return value if 0 < value < _MOST_TOKENS else 0
