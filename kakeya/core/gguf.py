"""The metadata of GGUF files, the model files of llama.cpp, read without reading a weight.

    "GGUF", version   4 bytes and u32, little-endian; versions 2 and 3
    counts            u64 tensors, u64 entries
    entries           key, type, value: a number, a text, or an array of one type

No file is trusted: every length must lie in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kakeya.core.errors import InvalidArgument
from kakeya.core.safetensors import open_regular

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MOST_ENTRIES = 100_000
_SAMPLES, _SAMPLE_BYTES = 512, 64
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z")
_NO_MODEL = re.compile(r"mmproj", re.IGNORECASE)
"""Names of files that hold the encoder of pictures beside a model."""


def read_gguf(path: Path) -> Mapping[str, Any]:
    """The metadata of a file: key -> int, float, bool, str, or a list of these. Blocks.

    Raises InvalidArgument for a file that is no whole GGUF file.
    """
    with open_regular(path) as (file, size):
        if size < 24:
            raise InvalidArgument(f"{path} has {size} bytes; a GGUF file begins with 24")
        with contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data:
            try:
                return dict(_entries(data, path))
            except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as fault:
                raise InvalidArgument(
                    f"{path} is damaged: its metadata cannot be read ({fault!r}); download it again"
                ) from None


def gguf_files(folder: Path) -> list[Path]:
    """The models of a folder, each by its first file; () = it holds none. Blocks."""
    found = (one for one in sorted(folder.glob("*.gguf")) if not _NO_MODEL.search(one.name))
    return [one for one in found if not (shard := _SHARD.search(one.name)) or int(shard[1]) == 1]


def gguf_shards(path: Path) -> list[Path]:
    """All files of the model that begins with this one, in order; those that are missing, too."""
    shard = _SHARD.search(path.name)
    if shard is None:
        return [path]
    stem, count = path.name[: shard.start()], int(shard[2])
    return [path.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]


def gguf_fingerprint(path: Path) -> str:
    """Name the weights of a model: another name for other sizes and samples.

    Blocks. Raises OSError.
    """
    sha256 = hashlib.sha256()
    for shard in gguf_shards(path):
        with open_regular(shard) as (file, size):
            sha256.update(size.to_bytes(8, "little"))
            for sample in range(_SAMPLES):  # tuning may leave any of the layers unchanged
                file.seek(size * sample // _SAMPLES)
                sha256.update(file.read(_SAMPLE_BYTES))
    return sha256.hexdigest()


def _entries(data: mmap.mmap, path: Path) -> Iterator[tuple[str, Any]]:
    magic, version, _, entries = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version not in _VERSIONS:
        raise InvalidArgument(
            f"{path} begins with {magic!r} and version {version}; a GGUF file of llama.cpp begins "
            "with b'GGUF' and version 2 or 3"
        )
    if entries > _MOST_ENTRIES:
        raise InvalidArgument(
            f"{path} has {entries} entries of metadata, more than {_MOST_ENTRIES}"
        )
    at = 24
    for _ in range(entries):
        key, at = _text(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        value, at = _value(data, at + 4, kind)
        yield key, value


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _TEXT:
        return _text(data, at)
    if kind != _ARRAY:
        form = struct.Struct("<" + _NUMBERS[kind])
        return form.unpack_from(data, at)[0], at + form.size
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _NUMBERS:
        each = struct.calcsize("<" + _NUMBERS[inner])
        if count * each > len(data) - at:
            raise struct.error(f"an array of {count} numbers is longer than the file")
        form = struct.Struct(f"<{count}{_NUMBERS[inner]}")
        return list(form.unpack_from(data, at)), at + form.size
    values = []
    for _ in range(count):
        value, at = _value(data, at, inner)
        values.append(value)
    return values, at


def _text(data: mmap.mmap, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", data, at)
    at += 8
    if size > len(data) - at:
        raise struct.error(f"a text of {size} bytes is longer than the file")
    return data[at : at + size].decode("utf-8"), at + size
