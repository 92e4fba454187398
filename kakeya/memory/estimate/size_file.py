"""The file of measured model sizes, and the folder in which to look for weights.

Written whole (write aside, fsync, rename), with a version and a checksum. A file that does not read
back exactly is set aside as `*.corrupt` and named in the log: a wrong size is worse than none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from kakeya.core.files import write_atomically
from kakeya.core.log import event
from kakeya.memory.estimate.history import KEPT, MAX_MODELS, SizeHistory, SizeRecord

_log = logging.getLogger(__name__)
SIZES = "sizes.json"
SIZES_VERSION = 1
_MAX_FILE_BYTES = 8 << 20
"""Above what the most records take."""


class SizeFile:
    """`sizes.json` in a node's data directory."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SIZES

    def load(self) -> SizeHistory:
        """Read it; empty at the first start, and when it is damaged or cannot be read."""
        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"{self.path.stat().st_size} bytes are too many")  # noqa: TRY301
            return SizeHistory(decode_sizes(self.path.read_bytes()))
        except FileNotFoundError:
            return SizeHistory()
        except (OSError, ValueError) as problem:
            self._set_aside(problem)
            return SizeHistory()

    def save(self, records: Sequence[SizeRecord]) -> None:
        """Replace it. Raises OSError; the old file then stays."""
        write_atomically(self.path, encode_sizes(records))

    def _set_aside(self, problem: Exception) -> None:
        aside = self.path.with_name(self.path.name + ".corrupt")
        try:
            self.path.replace(aside)
        except OSError as refused:
            aside = self.path
            problem = refused
        event(
            _log,
            "the sizes of models are damaged and set aside; they are measured again",
            level=logging.WARNING,
            file=aside,
            problem=problem,
        )


def encode_sizes(records: Sequence[SizeRecord]) -> bytes:
    """Write records with their version and the checksum of their content."""
    content = json.dumps([[one.digest, one.kind, list(one.measured)] for one in records])
    digest = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps({"version": SIZES_VERSION, "sha256": digest, "sizes": content}).encode()


def decode_sizes(data: bytes) -> tuple[SizeRecord, ...]:
    """Read what `encode_sizes` wrote. Raises ValueError for anything else."""
    try:
        outer = json.loads(data)
        content = outer["sizes"]
        is_ours = outer["version"] == SIZES_VERSION
        is_whole = hashlib.sha256(content.encode()).hexdigest() == outer["sha256"]
        if not is_ours or not is_whole:
            raise ValueError("the checksum differs" if is_ours else "sizes of another version")
        return tuple(_record(fields) for fields in json.loads(content)[-MAX_MODELS:])
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"no sizes: {problem}") from problem


def hub_folder(environ: Mapping[str, str], home: Path) -> Path:
    """The cache of Hugging Face models, by the settings of its own library."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    cache = Path(environ["XDG_CACHE_HOME"]) if environ.get("XDG_CACHE_HOME") else home / ".cache"
    return cache.expanduser() / "huggingface" / "hub"


def _record(fields: Sequence[object]) -> SizeRecord:
    digest, kind, measured = fields
    if not (isinstance(digest, str) and isinstance(kind, str) and isinstance(measured, list)):
        raise TypeError(f"{fields!r} is no record")
    if not 1 <= len(measured) <= KEPT or not all(type(n) is int and n > 0 for n in measured):
        raise ValueError(f"{measured!r} are no measurements")
    return SizeRecord(digest, kind, tuple(measured))
