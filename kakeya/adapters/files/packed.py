"""The packed form of a LoRA adapter: the same bytes on disk, in pages and for an engine.

    64 bytes    magic, length of all, length of the header, sha256 of everything but itself
    header      JSON: rank, scale, precision, fingerprint of the base, where each array lies
    arrays      each at a multiple of 256 bytes: A [in, rank], B [rank, out], scales of columns

    y = base(x) + scale * (x @ A) @ B

In `int8`, a value is q * s with one s for each column, so it is off by at most s / 2 and s is the
column's largest magnitude / 127 (columns below 1e-36 become zero). `exact` keeps 16 and 32-bit
floats as they are. An adapter is packed once, when it is registered: its results do not depend on
where it lies, unless the node is told to round exact ones that idle (`rounded`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kakeya.adapters.files.folder import read_adapter
from kakeya.adapters.files.weights import FloatArray
from kakeya.core.errors import InvalidArgument

ALIGNMENT_BYTES = 256
_MAGIC = b"KKLORA01"
_PREAMBLE = struct.Struct("<8sQQ32s8x")
_SUM = slice(24, 56)
"""The place of the checksum in the preamble."""
_LEVELS = 127
_SMALLEST_COLUMN = float(np.finfo(np.float32).tiny) * _LEVELS
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "int8": np.dtype("i1"),
    "f16": np.dtype("<f2"),
    "f32": np.dtype("<f4"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADERS = 32
"""Parsed headers that are kept: adapters trained alike have the same one."""
Values = NDArray[np.int8] | FloatArray
Place = tuple[int, np.dtype[Any], tuple[int, ...]]
"""Offset behind the header, dtype, shape."""


class Precision(StrEnum):
    """The form in which values are kept."""

    INT8 = "int8"
    EXACT = "exact"


class PackedTensor(NamedTuple):
    """The part of an adapter for one linear module. Arrays are read-only views of the packed bytes.

    A tuple: each load makes one for each module, and frozen dataclasses take longer to make.

    Shapes: a [in, rank], b [rank, out], and for int8 a_scales [rank], b_scales [out], float32.
    """

    path: str  # of the module, as model.layers.0.self_attn.q_proj
    a: Values
    b: Values
    a_scales: NDArray[np.float32] | None
    b_scales: NDArray[np.float32] | None

    @property
    def in_size(self) -> int:
        """Features that the module takes."""
        return int(self.a.shape[0])

    @property
    def out_size(self) -> int:
        """Features that the module gives."""
        return int(self.b.shape[1])

    def floats(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A and B as float32; copies, unless they are packed so."""
        return _floats(self.a, self.a_scales), _floats(self.b, self.b_scales)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class PackedAdapter:
    """An unpacked adapter; `base` is the fingerprint of the model that it was made for."""

    rank: int
    scale: float
    precision: Precision
    base: str
    tensors: tuple[PackedTensor, ...]  # by path, in order


def pack(folder: Path, precision: Precision = Precision.INT8, *, base: str = "") -> bytes:
    """Pack the adapter in a folder of mlx-lm's; the same adapter gives the same bytes.

    Raises InvalidArgument for a folder without a plain LoRA adapter, or a damaged one.
    """
    adapter = read_adapter(folder)
    header = {"rank": adapter.rank, "scale": adapter.scale, "precision": precision, "base": base}
    return _pack(header, adapter.matrices(), precision)


def rounded(packed: bytes | memoryview) -> bytes:
    """Pack checked bytes anew in int8: the very bytes that `pack` gives for the same folder."""
    adapter = unpack(packed, is_trusted=True)
    int8 = Precision.INT8
    header = {"rank": adapter.rank, "scale": adapter.scale, "precision": int8, "base": adapter.base}
    return _pack(header, ((one.path, *one.floats()) for one in adapter.tensors), int8)


def _pack(
    header: dict[str, object],
    matrices: Iterable[tuple[str, FloatArray, FloatArray]],
    precision: Precision,
) -> bytes:
    writer = _Writer()
    tensors = [
        {"path": path} | writer.matrix("a", a, precision) | writer.matrix("b", b, precision)
        for path, a, b in matrices
    ]
    return _sealed(json.dumps(header | {"tensors": tensors}).encode(), writer.arrays)


def unpack(packed: bytes | memoryview, *, is_trusted: bool = False) -> PackedAdapter:
    """Read a packed adapter, without a copy. Raises InvalidArgument when it is damaged, or holds
    scales that are no numbers.

    `is_trusted` leaves both out, for bytes that were checked when they were laid there.
    """
    view = memoryview(packed).cast("B").toreadonly()
    start = _check(view, is_trusted=is_trusted)
    try:
        header = _header(bytes(view[_PREAMBLE.size : start]))
        payload = view[start:]
        tensors = tuple(_tensor(payload, places) for places in header.tensors)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as problem:
        raise InvalidArgument(f"the packed adapter has a damaged header: {problem!r}") from None
    if not is_trusted:
        _check_scales(tensors)
    return PackedAdapter(
        rank=header.rank,
        scale=header.scale,
        precision=header.precision,
        base=header.base,
        tensors=tensors,
    )


def digest(packed: bytes | memoryview) -> str:
    """The checksum that packed bytes carry, in hex: equal adapters have equal ones."""
    _, _, _, found = _preamble(memoryview(packed).cast("B"))
    return found.hex()


# --- writing


class _Writer:
    """Lays arrays one behind the other, aligned."""

    def __init__(self) -> None:
        self.arrays: list[bytes] = []
        self._end = 0

    def matrix(self, name: str, values: FloatArray, precision: Precision) -> dict[str, object]:
        """Add a matrix and its scales; returns their entry of the header."""
        if precision is Precision.EXACT:
            return {name: self._add(values)}
        quantised, scales = quantise(values)
        return {name: self._add(quantised), f"{name}_scales": self._add(scales)}

    def _add(self, values: Values) -> list[object]:
        data = _padded(np.ascontiguousarray(values).tobytes())
        self.arrays.append(data)
        offset, self._end = self._end, self._end + len(data)
        return [offset, _NAMES[values.dtype], list(values.shape)]


def quantise(values: FloatArray) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round each column to 255 levels. Shapes: [n, m] -> [n, m] int8, [m] f32."""
    wide = values.astype(np.float64)
    largest = np.abs(wide).max(axis=0)
    scales = np.where(largest < _SMALLEST_COLUMN, 0.0, largest / _LEVELS).astype(np.float32)
    divisors = np.where(scales > 0.0, scales, np.inf)
    return np.rint(wide / divisors).astype(np.int8), scales


def _floats(values: Values, scales: NDArray[np.float32] | None) -> NDArray[np.float32]:
    floats = values.astype(np.float32, copy=False)
    return floats if scales is None else floats * scales


def _sealed(header: bytes, arrays: list[bytes]) -> bytes:
    header += b"\0" * (-(_PREAMBLE.size + len(header)) % ALIGNMENT_BYTES)
    rest = b"".join((header, *arrays))
    first = _PREAMBLE.pack(_MAGIC, _PREAMBLE.size + len(rest), len(header), b"")
    checksum = _checksum(memoryview(first), memoryview(rest))
    return first[: _SUM.start] + checksum + first[_SUM.stop :] + rest


def _checksum(preamble: memoryview, rest: memoryview) -> bytes:
    sha256 = hashlib.sha256(preamble[: _SUM.start])
    sha256.update(preamble[_SUM.stop :])
    sha256.update(rest)
    return sha256.digest()


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % ALIGNMENT_BYTES)


# --- reading packed adapters


def _preamble(view: memoryview) -> tuple[bytes, int, int, bytes]:
    if len(view) < _PREAMBLE.size:
        raise InvalidArgument(f"{len(view)} bytes are no packed adapter")
    magic, length, header_bytes, checksum = _PREAMBLE.unpack_from(view)
    return magic, length, header_bytes, checksum


def _check(view: memoryview, *, is_trusted: bool) -> int:
    """Check lengths and the checksum; returns where the arrays begin."""
    magic, length, header_bytes, checksum = _preamble(view)
    start = _PREAMBLE.size + header_bytes
    if magic != _MAGIC or length != len(view) or start > length or start % ALIGNMENT_BYTES:
        raise InvalidArgument(
            f"{len(view)} bytes that begin with {magic!r} are no packed adapter of this version, "
            "or not a whole one"
        )
    if not is_trusted and _checksum(view[: _PREAMBLE.size], view[_PREAMBLE.size :]) != checksum:
        raise InvalidArgument("the packed adapter is damaged: its checksum differs")
    return start


def _check_scales(tensors: tuple[PackedTensor, ...]) -> None:
    for tensor in tensors:
        for scales in (tensor.a_scales, tensor.b_scales):
            if scales is not None and not np.isfinite(scales).all():
                raise InvalidArgument(
                    f"the packed adapter's {tensor.path} has scales that are no numbers"
                )


class _Places(NamedTuple):
    """The places of one module's arrays."""

    path: str
    a: Place
    b: Place
    a_scales: Place | None
    b_scales: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """A header that was read."""

    rank: int
    scale: float
    precision: Precision
    base: str
    tensors: tuple[_Places, ...]


@lru_cache(maxsize=_HEADERS)
def _header(data: bytes) -> _Header:
    """Read a header. Raises ValueError and others for malformed bytes."""
    fields = json.loads(data.rstrip(b"\0"))
    return _Header(
        rank=int(fields["rank"]),
        scale=float(fields["scale"]),
        precision=Precision(fields["precision"]),
        base=str(fields["base"]),
        tensors=tuple(_places(entry, fields["rank"]) for entry in fields["tensors"]),
    )


def _places(entry: Mapping[str, Any], rank: int) -> _Places:
    a, b = _place(entry["a"]), _place(entry["b"])
    if a[2][1:] != (rank,) or b[2][:-1] != (rank,):
        raise ValueError(f"{entry['path']} has the shapes {a[2]} and {b[2]}, rank {rank}")
    is_int8 = "a_scales" in entry
    return _Places(
        path=str(entry["path"]),
        a=a,
        b=b,
        a_scales=_place(entry["a_scales"]) if is_int8 else None,
        b_scales=_place(entry["b_scales"]) if is_int8 else None,
    )


def _place(found: tuple[int, str, list[int]]) -> Place:
    offset, dtype, shape = found
    return int(offset), _DTYPES[dtype], tuple(map(int, shape))


def _tensor(payload: memoryview, places: _Places) -> PackedTensor:
    path, a, b, a_scales, b_scales = places
    return PackedTensor(
        path,
        _array(payload, a),
        _array(payload, b),
        _array(payload, a_scales) if a_scales else None,
        _array(payload, b_scales) if b_scales else None,
    )


def _array(payload: memoryview, place: Place) -> NDArray[Any]:
    offset, dtype, shape = place
    return np.ndarray(shape, dtype, payload, offset)
