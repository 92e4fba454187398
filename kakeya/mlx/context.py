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

from kakeya.text.folder import stated_context, token_count

_DEFAULT_TOKENS = 8192


def context_tokens(folder: Path, sections: Iterable[Mapping[str, Any]]) -> int:
    """The tokens of a context; `sections` are parts of config.json, the one about text first."""
    parts = list(sections)
    if stated := stated_context(parts):
        return stated
    types = (part.get("model_type") for part in parts)
    defaults = (_default(kind) for kind in types if isinstance(kind, str))
    return next(filter(None, defaults), 0) or _of_tokenizer(folder) or _DEFAULT_TOKENS


def _default(model_type: str) -> int:
    """The positions of an architecture by its defaults; 0 = unknown."""
    with contextlib.suppress(Exception):  # other people's constructors: any fault means unknown
        from transformers import CONFIG_MAPPING  # two seconds, and few folders need it

        config = CONFIG_MAPPING[model_type]()
        return token_count(getattr(config, "max_position_embeddings", 0))
    return 0


def _of_tokenizer(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        return token_count(config.get("model_max_length"))
    return 0
