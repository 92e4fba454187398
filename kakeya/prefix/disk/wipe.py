"""Removing all files of a folder of stored blocks, and naming those that stay. Blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kakeya.prefix.disk.index import QUARANTINE, SUFFIX, TEMPORARY


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """How many files went; `kept` are those that did not, or folders that hide some, and why."""

    files: int = 0
    kept: tuple[str, ...] = ()


def wipe_folder(folder: Path) -> Removal:
    """Remove every block, the remains of cut-off writes, and the quarantine, but no other files."""
    files, kept = 0, list[str]()
    for path in _ours(folder, kept):
        try:
            path.unlink(missing_ok=True)
            files += 1
        except OSError as problem:
            kept.append(_why(path, problem))
    return Removal(files=files, kept=tuple(kept))


def shards_of(folder: Path) -> list[Path]:
    """The folders that blocks lie in, in order. Raises OSError, but not where there is none."""
    try:
        with os.scandir(folder) as found:
            return sorted(Path(entry.path) for entry in found if _is_shard(entry))
    except FileNotFoundError:
        return []


def _ours(folder: Path, kept: list[str]) -> Iterator[Path]:
    """The files to remove; a folder that cannot be read is noted."""
    try:
        shards = shards_of(folder)
    except OSError as problem:
        kept.append(_why(folder, problem))
        return
    for shard in shards:
        inside = _inside(shard, kept)
        yield from (path for path in inside if path.name.endswith((SUFFIX, SUFFIX + TEMPORARY)))
    # Last: damaged blocks may have been moved there meanwhile.
    yield from _inside(folder / QUARANTINE, kept)


def _inside(folder: Path, kept: list[str]) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as problem:
        kept.append(_why(folder, problem))
        return []


def _is_shard(entry: os.DirEntry[str]) -> bool:
    return len(entry.name) == 2 and entry.is_dir(follow_symlinks=False)


def _why(path: Path, problem: OSError) -> str:
    return f"{path}: {problem.strerror or problem}"
