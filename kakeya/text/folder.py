"""The text files of a model folder, read as transformers reads them.

templates        chat_template.jinja and additional_chat_templates/NAME.jinja, else
                 tokenizer_config.json (a text, or a list of {name, template}), else
                 chat_template.json
special tokens   tokenizer_config.json, and special_tokens_map.json beside an older one
end tokens       generation_config.json, and the eos_token
sampling         generation_config.json
context          config.json, as far as it states one
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.core.log import event
from kakeya.generation.request import Sampling

_log = logging.getLogger(__name__)

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
"""The names of the template of a conversation, and of the one that takes its place with tools."""
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_MAP_KEYS = ("extra_special_tokens", "model_specific_special_tokens")
_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
_MOST_TOKENS = 1 << 30
"""Tokenizers say 10 ** 30 where they mean no bound."""
_SCALED_ROPES = frozenset({"linear", "dynamic", "yarn"})
"""Others count their positions scaled."""
Stamps = tuple[tuple[str, int, int], ...]
"""(name, time of the last change in ns, bytes) of each file that is there."""


def text_files(folder: Path) -> list[Path]:
    """The files that a folder's text comes from; some may not be there. Blocks."""
    return [*(folder / name for name in _TEXT_FILES), *sorted(folder.glob(_MORE_TEMPLATES))]


def stamps(folder: Path) -> Stamps:
    """The state of the files that a folder's text comes from. Blocks."""
    found = []
    for path in text_files(folder):
        with contextlib.suppress(OSError):
            seen = path.stat()
            found.append((path.name, seen.st_mtime_ns, seen.st_size))
    return tuple(found)


def read_config(path: Path) -> dict[str, object]:
    """Read a JSON object of a model folder; a missing file is an empty object."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as fault:
        raise Unsupported(f"{path} cannot be read: {fault}") from fault
    if not isinstance(loaded, dict):
        raise Unsupported(f"{path} holds {type(loaded).__name__}, not a JSON object")
    return loaded


def special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens, as templates know them: `bos_token`, `eos_token` and others."""
    config = read_config(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_config(folder / "special_tokens_map.json")
    named: dict[str, object] = {k: v for k, v in config.items() if k.endswith("_token")}
    for key in _MAP_KEYS:
        more = config.get(key)
        named |= more if isinstance(more, dict) else {}
    found = {}
    for key, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[key] = content
    return found


def stop_ids(folder: Path) -> frozenset[int]:
    """The ids that end an answer by generation_config.json."""
    declared = read_config(folder / "generation_config.json").get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(one for one in ids if isinstance(one, int) and not isinstance(one, bool))


def sampling_defaults(folder: Path) -> Sampling:
    """How tokens are selected where a caller says nothing.

    Values that no sampling can have are told in the log, and count for nothing.
    """
    config = read_config(folder / "generation_config.json")
    found = Sampling(temperature=1.0)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = config.get(name)
        if value is None or (name == "top_k" and value in (0, -1)):  # off
            continue
        try:
            found = replace(found, **{name: _number(name, value)})
        except InvalidArgument as fault:
            _tell(folder, fault.message)
    return replace(found, temperature=0.0) if config.get("do_sample") is False else found


def _number(name: str, value: object) -> Any:  # noqa: ANN401 - an int for top_k, else a float
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (name == "top_k" and (not isinstance(value, int) or value < 1)):
        raise InvalidArgument(f"{name} is {value!r}, it must be a number in its range")
    return value


def _tell(folder: Path, problem: str) -> None:
    event(
        _log,
        "generation_config.json asks for sampling that is left out",
        level=logging.WARNING,
        folder=str(folder),
        problem=problem,
    )


def templates(folder: Path) -> dict[str, str]:
    """The sources of a folder's chat templates by name; {} where it has none."""
    found = _named(read_config(folder / "chat_template.json").get("chat_template"))
    found = _named(read_config(folder / "tokenizer_config.json").get("chat_template")) or found
    files = {path.stem: path for path in sorted(folder.glob(_MORE_TEMPLATES))}
    if (folder / "chat_template.jinja").is_file():
        found = {}
        files[DEFAULT_TEMPLATE] = folder / "chat_template.jinja"
    try:
        return found | {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, ValueError) as fault:
        raise Unsupported(f"the chat template in {folder} cannot be read: {fault}") from fault


def _named(declared: object) -> dict[str, str]:
    """Templates as a JSON file declares them: a text, a list of {name, template}, or by name."""
    if isinstance(declared, str):
        return {DEFAULT_TEMPLATE: declared}
    pairs: Mapping[object, object] = {}
    if isinstance(declared, list):
        entries = [entry for entry in declared if isinstance(entry, dict)]
        pairs = {entry.get("name"): entry.get("template") for entry in entries}
    elif isinstance(declared, dict):
        pairs = declared
    return {
        name: source
        for name, source in pairs.items()
        if isinstance(name, str) and isinstance(source, str)
    }


def stated_context(sections: Iterable[Mapping[str, Any]]) -> int:
    """The tokens of a context, times the factor of a scaled RoPE whose positions are counted
    unscaled; 0 = not stated. `sections` are parts of config.json, the one about text first."""
    for part in sections:
        for key in _KEYS:
            if found := token_count(part.get(key)):
                return _scaled(found, part)
    return 0


def _scaled(tokens: int, config: Mapping[str, Any]) -> int:
    """The positions that a scaled RoPE reaches; Gemma 3 counts them scaled, unlike others."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or str(config.get("model_type")).startswith("gemma3"):
        return tokens
    factor = rope.get("factor")
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in _SCALED_ROPES or not isinstance(factor, int | float):
        return tokens
    original = token_count(rope.get("original_max_position_embeddings")) or tokens
    return max(tokens, int(original * factor))


def token_count(value: object) -> int:
    """Read a number of positions; 0 for anything that is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return value if 0 < value < _MOST_TOKENS else 0
