"""The weights in a folder or a GGUF file: a digest of all their bytes, and the state of the files
that it was made of.

KV that other weights made gives other answers, and weights that were tuned may differ in a few
bytes only. So every byte counts. Reading them takes a while, which is why a digest is kept with the
state of the files that it was made of: names, sizes, times, and where they lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from kakeya.core.errors import Cancelled, InvalidArgument
from kakeya.core.gguf import gguf_shards
from kakeya.core.weight_files import weight_files
from kakeya.generation.spec import is_gguf

_CHUNK_BYTES = 8 << 20


def weights_state(model: Path) -> str:
    """The state of the weight files and the configuration, which changes with any of them; ""
    without any.

    Canonical JSON. Blocks.
    """
    found = []
    for file in _files(model):
        try:
            stat = file.stat()
        except OSError:
            return ""
        found.append([file.name, stat.st_size, stat.st_mtime_ns, stat.st_ino])
    return json.dumps(found, separators=(",", ":")) if found else ""


def weights_digest(model: Path, state: str, is_given_up: Callable[[], bool] = lambda: False) -> str:
    """The sha256 of configuration and weights, hex, whose state is this. Blocks for long.

    Raises InvalidArgument where the files are, or become, others than those of the state, and
    Cancelled when it is given up.
    """
    sha256 = hashlib.sha256()
    try:
        for file in _files(model):
            sha256.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            with file.open("rb", buffering=0) as opened:
                while chunk := opened.read(_CHUNK_BYTES):
                    sha256.update(chunk)
                    if is_given_up():
                        raise Cancelled(f"the digest of {model} is not needed any more")
    except OSError as problem:
        raise InvalidArgument(f"weights in {model} cannot be read: {problem}") from None
    if weights_state(model) != state:
        raise InvalidArgument(
            f"the weights in {model} are not those that were loaded: they were replaced since; "
            "restart their model, so that it serves what lies there"
        )
    return sha256.hexdigest()


def _files(model: Path) -> list[Path]:
    if is_gguf(str(model)):
        return gguf_shards(model)
    weights = weight_files(model)
    return [model / "config.json", *weights] if weights else []
