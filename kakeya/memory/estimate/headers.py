"""The headers of a model folder's weight files, read without reading a weight.

Several shards count together; a tensor that two of them hold counts once, as the loader takes it.
Symbolic links are followed, as in a Hugging Face cache. Damaged, short and missing files are named,
and the other files still count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kakeya.core.errors import InvalidArgument
from kakeya.core.safetensors import ArrayEntry, read_header
from kakeya.core.weight_files import INDEX, weight_files

_MAX_TEXT_BYTES = 64_000_000
"""Above what any config or index is; a larger one is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """All weight files of a folder together."""

    tensors: Mapping[str, ArrayEntry]
    file_bytes: int
    """Bytes of the weight files; an index that promises more, with shards missing, counts
    instead."""
    digest: str
    """Names the model: equal for equal headers, config and sizes."""
    problems: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def read_headers(folder: Path) -> Headers:
    """All safetensors files that a load of this folder reads. Blocks; raises nothing."""
    problems: list[str] = []
    tensors: dict[str, ArrayEntry] = {}
    digest = hashlib.sha256()
    total = 0
    config = read_json(folder / "config.json", problems)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(folder):
        try:
            size = path.stat().st_size
            total += size
            digest.update(f"{path.name} {size}".encode())
            found = read_header(path)
        except InvalidArgument as fault:
            problems.append(fault.message)
            continue
        except OSError as fault:
            problems.append(f"{path.name}: {_reason(fault)}")
            continue
        tensors.update(found)
        digest.update(repr(sorted((name, t.dtype, t.shape) for name, t in found.items())).encode())
    promised = _promised_bytes(folder, problems)
    return Headers(
        tensors=tensors,
        file_bytes=max(total, promised) if problems else total,
        digest=digest.hexdigest(),
        problems=tuple(problems),
        config=config,
    )


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """A file's JSON object; {} and a problem where it has none. A missing file is no problem."""
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes are too many")  # noqa: TRY301
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as fault:
        problems.append(f"{path.name}: {_reason(fault)}")
        return {}
    if not isinstance(fields, dict):
        problems.append(f"{path.name}: {type(fields).__name__} where an object is due")
        return {}
    return fields


def _promised_bytes(folder: Path, problems: list[str]) -> int:
    """The size of all tensors by the index of the files; 0 where it does not say."""
    metadata = read_json(folder / INDEX, problems).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return total if isinstance(total, int) else 0


def _reason(fault: Exception) -> str:
    text = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
    return text.splitlines()[0][:200] if text else type(fault).__name__
