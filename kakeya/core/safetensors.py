"""The headers of safetensors files: which arrays a file holds, without reading a weight.

    8 bytes, little-endian   length of the header
    header                   JSON: name -> dtype, shape, where its bytes begin and end
    bytes of all arrays

No header is trusted: each entry must lie in the file and be as long as its shape says.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

from kakeya.core.errors import InvalidArgument

MAX_HEADER_BYTES = 64 << 20
_LENGTH_BYTES = 8
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayEntry:
    """One array of a file: `begin` and `end` count bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return self.end - self.begin

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers, not packed integers."""
        return self.dtype in ("F16", "BF16", "F32", "F64") or self.dtype.startswith("F8_E4M3")


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file to read; yield it and its length in bytes.

    Raises InvalidArgument for a pipe, which may never answer, for a device, which may never end,
    and for a file that cannot be opened or read in the block.
    """
    try:
        # Without O_NONBLOCK, opening a pipe that has no writer would block.
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except ValueError as problem:  # a NUL, or half a surrogate pair
            raise InvalidArgument(f"{str(path)!r} is no name of a file: {problem}") from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidArgument(f"{path} cannot be read: it is not a regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                yield file, found.st_size
        finally:
            os.close(descriptor)
    except OSError as problem:
        raise InvalidArgument(f"{path} cannot be read: {problem.strerror or problem}") from None


def read_header(path: Path) -> Mapping[str, ArrayEntry]:
    """Read which arrays a file holds. Raises InvalidArgument if it is not a safetensors file."""
    with open_regular(path) as (file, size):
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise damaged(path, f"its header would have {length} of its {size} bytes")
        text = file.read(length)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged(path, "its header is not JSON") from None
    if not isinstance(tree, dict):
        raise damaged(path, "its header is not a JSON object")
    first = _LENGTH_BYTES + length
    entries = {
        name: _entry(path, name, found, first)
        for name, found in tree.items()
        if name != "__metadata__"
    }
    last = max((entry.end for entry in entries.values()), default=0)
    if last > size:
        raise damaged(path, f"it has {size} bytes; its header promises {last}")
    in_order = sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end))
    for (name, entry), (other, following) in itertools.pairwise(in_order):
        if following.begin < entry.end:
            raise damaged(path, f"{name[:80]!r} and {other[:80]!r} share bytes")
    return entries


def _entry(path: Path, name: str, found: object, first: int) -> ArrayEntry:
    if not isinstance(found, dict):
        raise damaged(path, f"the entry of {name[:80]!r} is not an object")
    dtype, shape, place = found.get("dtype"), found.get("shape"), found.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise damaged(path, f"{name[:80]!r} has the unknown dtype {str(dtype)[:20]!r}")
    if not _are_counts(shape) or not _are_counts(place) or len(place) != 2:
        raise damaged(path, f"{name[:80]!r} has no shape, or no place in the file")
    begin, end = place
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise damaged(
            path, f"{name[:80]!r} of shape {shape} in {dtype} is said to be bytes {begin}..{end}"
        )
    return ArrayEntry(dtype=dtype, shape=tuple(shape), begin=first + begin, end=first + end)


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def damaged(path: Path, why: str) -> InvalidArgument:
    """Make the error for a file that breaks the format."""
    return InvalidArgument(f"{path} is damaged or not a safetensors file: {why}")
