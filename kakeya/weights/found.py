"""The models on this disk: which folders and files are one, by their names alone. Blocks.

    models folder          FOLDER, ORG/FOLDER, NAME.gguf
    Hugging Face's cache   models--ORG--NAME/snapshots/COMMIT, of the current commit
    configured             the folder or file that a model of this node was given as

A model folder has config.json and weights, a diffusers pipeline, or GGUF files. Only files with the
endings of a model belong to it, and of several sets of weights the one that is loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kakeya.core.errors import InvalidArgument
from kakeya.core.files import write_atomically
from kakeya.core.gguf import gguf_files, gguf_shards
from kakeya.core.ids import BLOCK_DIFFUSION, ENCODERS
from kakeya.core.log import event
from kakeya.core.weight_files import weight_files
from kakeya.generation.spec import GGUF, PIPELINE_FILE, kind_of
from kakeya.weights.manifest import SUFFIXES, check_file_name, check_model_name

_log = logging.getLogger(__name__)
RECORD = ".kakeya-pull.json"
"""In the folder of a model that a pull brought."""
_MOST_MODELS = 1_000
_MOST_FILES = 2_000
_RECORD_BYTES = 65536


class ModelFile(NamedTuple):
    """One file of a model, as it was found; a link is followed."""

    name: str
    path: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRecord:
    """What is noted of a model that a pull brought."""

    name: str
    digest: str
    keep: bool
    source: str
    pulled_at: float


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on this disk. `path` is the folder or the first GGUF file."""

    name: str
    path: Path
    files: tuple[ModelFile, ...]
    record: PullRecord | None = None
    is_text: bool = False
    """Whether it writes text, from safetensors: a node that has it may be asked for text."""

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(file.size for file in self.files)


def find_models(
    folder: Path, hub: Path | None, configured: Mapping[str, str]
) -> tuple[FoundModel, ...]:
    """All models, each path once; one that lies elsewhere has the name that it is served by."""
    found: dict[Path, FoundModel] = {}
    for name, path in (*_in_folder(folder), *_in_hub(hub), *_configured(configured)):
        with contextlib.suppress(OSError, InvalidArgument, RecursionError):
            check_model_name(name)
            real = path.resolve()
            is_new = real not in found and len(found) < _MOST_MODELS
            if is_new and (model := found_model(name, path)) is not None:
                found[real] = model
    return tuple(found.values())


def found_model(name: str, path: Path) -> FoundModel | None:
    """The model at a path; None = there is none, or not all of it. Blocks. Raises OSError and
    InvalidArgument."""
    files = _files(path)
    if not files:
        return None
    is_other = (path / PIPELINE_FILE).is_file()
    is_text = not is_other and kind_of(path) not in ("", BLOCK_DIFFUSION, *ENCODERS)
    return FoundModel(name, path, files, read_record(path), is_text)


def read_record(folder: Path) -> PullRecord | None:
    """The record of a pull in a folder; None = no pull brought it."""
    try:
        with (folder / RECORD).open("rb") as file:
            told = json.loads(file.read(_RECORD_BYTES))
        record = PullRecord(**told)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, RecursionError) as problem:
        event(
            _log, "the record of a pull is damaged", level=logging.WARNING, folder=str(folder),
            problem=repr(problem),
        )  # fmt: skip
        return None
    kinds = (str, str, bool, str, int | float)
    values = (record.name, record.digest, record.keep, record.source, record.pulled_at)
    return record if all(map(isinstance, values, kinds)) else None


def write_record(folder: Path, record: PullRecord) -> None:
    """Note what a pull brings into a folder. Raises OSError."""
    write_atomically(folder / RECORD, json.dumps(asdict(record)).encode())


def keep_record(model: FoundModel) -> None:
    """Exempt a model that a pull brought from clean-ups. Raises OSError."""
    if model.record is not None and not model.record.keep:
        write_record(model.path, replace(model.record, keep=True))


def _configured(sources: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for name, source in sources.items():
        path = Path(source)
        if path.is_absolute():  # else a name of Hugging Face, which the cache may have
            yield name, path


def _in_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    for one in _listed(folder):
        with contextlib.suppress(OSError):  # lost+found, or another user's
            if one.suffix == GGUF and one.is_file():
                if one in gguf_files(folder):
                    yield one.stem, one
            elif one.is_dir():
                if is_model(one):
                    yield one.name, one
                else:
                    yield from ((f"{one.name}/{two.name}", two) for two in _listed(one))


def _in_hub(hub: Path | None) -> Iterator[tuple[str, Path]]:
    for one in _listed(hub) if hub else ():
        if not one.name.startswith("models--"):
            continue
        with contextlib.suppress(OSError, ValueError):
            commit = (one / "refs" / "main").read_text("utf-8").strip()
            name = one.name.removeprefix("models--").replace("--", "/", 1)
            yield name, one / "snapshots" / commit


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    except OSError:
        return []


def is_model(folder: Path) -> bool:
    """Whether a folder looks like a model. Blocks. Raises OSError."""
    if (folder / PIPELINE_FILE).is_file() or gguf_files(folder):
        return True
    return (folder / "config.json").is_file() and bool(weight_files(folder))


def _files(path: Path) -> tuple[ModelFile, ...]:
    """The files of a model, by name; () = it is none, or not whole."""
    if path.suffix == GGUF and path.is_file():
        return tuple(_file(one, one.name) for one in gguf_shards(path))
    if not path.is_dir() or not is_model(path):
        return ()
    weights = set(weight_files(path))
    is_pipeline = (path / PIPELINE_FILE).is_file()
    found = []
    for one in sorted(path.rglob("*"), key=lambda one: one.relative_to(path).as_posix()):
        name = one.relative_to(path).as_posix()
        if one.suffix.lower() not in SUFFIXES or not one.is_file():
            continue
        is_other = one.suffix == ".safetensors" and one not in weights
        if (is_other and not is_pipeline) or any(part.startswith(".") for part in name.split("/")):
            continue
        check_file_name(name)
        found.append(_file(one, name))
        if len(found) > _MOST_FILES:
            return ()
    missing = [] if is_pipeline else [one for one in weights if not one.is_file()]
    return () if missing else tuple(found)


def _file(path: Path, name: str) -> ModelFile:
    real = path.resolve(strict=True)
    seen = real.stat()
    return ModelFile(name, str(real), seen.st_size, seen.st_mtime_ns, seen.st_ino)
