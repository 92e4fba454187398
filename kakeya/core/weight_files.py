"""The weight files of a model folder: an index decides, where there is one.

model.safetensors.index.json   the files that it names, and no other
model*.safetensors             else all of these
*.safetensors                  else any
"""

from __future__ import annotations

import json
from pathlib import Path

from kakeya.core.errors import InvalidArgument

INDEX = "model.safetensors.index.json"
_MOST_BYTES = 64_000_000
"""Above the size of any index; a larger one is not read."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, in order, those that are missing too. Blocks.

    An index that cannot be read decides nothing here; `missing_weights` tells of it.
    """
    try:
        named = _read_index(folder)
    except InvalidArgument:
        named = None
    if named is not None:
        return [folder / name for name in named]
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))


def missing_weights(folder: Path) -> str:
    """Say what a folder lacks of its weights; "" = nothing. Blocks.

    Raises InvalidArgument for an index that cannot be read.
    """
    _read_index(folder)
    files = weight_files(folder)
    if not files:
        return "*.safetensors"
    missing = [path.name for path in files if not path.is_file()]
    if not missing:
        return ""
    return f"{' and '.join(missing)}, which {INDEX} names; download it again"


def _read_index(folder: Path) -> list[str] | None:
    """The names of the files in a folder's index, in order; None without an index."""
    path = folder / INDEX
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidArgument(f"{path} has {path.stat().st_size} bytes, too many for an index")
        index = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as fault:
        raise InvalidArgument(f"{path} cannot be read: {fault}") from None
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise InvalidArgument(f"{path} has no weight_map; download it again, or remove it")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise InvalidArgument(f"{path} names {str(name)[:80]!r}, which is no file beside it")
    return sorted(set(listed.values()))
