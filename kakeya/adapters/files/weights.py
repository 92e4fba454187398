"""The arrays of safetensors files as numpy has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kakeya.core.errors import InvalidArgument
from kakeya.core.safetensors import ArrayEntry, damaged, open_regular

FloatArray = NDArray[np.float32] | NDArray[np.float16]


def read_array(path: Path, name: str, entry: ArrayEntry) -> FloatArray:
    """Read one array of 16 or 32-bit floats; bfloat16 becomes float32, which loses nothing.

    Raises InvalidArgument for other kinds, a file that became shorter, and values that are no
    numbers.
    """
    if entry.dtype not in ("F32", "F16", "BF16"):
        raise InvalidArgument(f"{name} of {path} is {entry.dtype}; it must be F32, F16 or BF16")
    with open_regular(path) as (file, _):
        file.seek(entry.begin)
        data = file.read(entry.end - entry.begin)
    if len(data) != entry.end - entry.begin:
        raise damaged(path, f"{name} ends before its last byte")
    array = _decoded(data, entry.dtype).reshape(entry.shape)
    if not np.isfinite(array).all():
        raise InvalidArgument(f"{name} of {path} holds values that are infinite or no numbers")
    return array


def _decoded(data: bytes, dtype: str) -> FloatArray:
    if dtype == "BF16":
        widened = np.frombuffer(data, np.dtype("<u2")).astype("<u4") << 16
        return widened.view(np.float32)
    if dtype == "F16":
        return np.frombuffer(data, np.float16)
    return np.frombuffer(data, np.float32)
