"""Whether the bytes of a block can be KV at all: a forward gives no infinite number, and no NaN.

A hash says that bytes arrived as they were sent, not that they are KV. One NaN in a prompt's KV
makes all answers to it rubbish, and would be kept, written to disk and handed on. Where numbers lie
is read from the layout that the own engine tells; of a layout that is not known as a text, or of
arrays that are no floating point, nothing is said.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_FORMAT = 1
_EXPONENTS = {
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
    "float32": ("<u4", 0x7F800000),
}
"""All ones in it: infinite, or not a number."""
_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "float16": 2, "bfloat16": 2, "float32": 4}
_MAX_LAYOUT = 1 << 20


class _Run(NamedTuple):
    """Arrays of one type behind each other; bytes for each token, or of the whole."""

    dtype: str
    nbytes: int


class _Layout(NamedTuple):
    rows: tuple[_Run, ...]
    state: tuple[_Run, ...]


def is_finite(payload: bytearray, tokens: int, layout: str) -> bool:
    """Tell whether all numbers of a block of so many tokens are finite, as far as is known."""
    known = _read(layout)
    return known is None or all(
        _is_finite(payload, run.dtype, start, end) for run, start, end in _places(known, tokens)
    )


def _places(layout: _Layout, tokens: int) -> Iterator[tuple[_Run, int, int]]:
    """Each run with its first byte and the one behind its last."""
    start = 0
    for runs, factor in ((layout.rows, tokens), (layout.state, 1)):
        for run in runs:
            end = start + run.nbytes * factor
            yield run, start, end
            start = end


def _is_finite(payload: bytearray, dtype: str, start: int, end: int) -> bool:
    end = min(end, len(payload))  # state lies behind some blocks only
    count = max(0, end - start) // _BYTES[dtype]
    if dtype not in _EXPONENTS or not count:
        return True
    unsigned, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(payload, unsigned, count, start)
    return not bool(((bits & exponent) == exponent).any())


@functools.lru_cache(maxsize=64)
def _read(layout: str) -> _Layout | None:
    """Read an engine's layout of a block; None = the layout is of an unknown kind."""
    if len(layout) > _MAX_LAYOUT:
        return None
    try:
        said = json.loads(layout)
        if said["format"] != _FORMAT:
            return None
        arrays = [array for layer in said["layers"] for array in layer["arrays"]]
        # Of rows the heads and the width are told, of state its shape.
        rows = [(dtype, math.prod(rest)) for dtype, *rest in arrays if len(rest) == 2]
        state = [(dtype, math.prod(rest[0])) for dtype, *rest in arrays if len(rest) == 1]
        return _Layout(_merged(rows), _merged(state))
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def _merged(arrays: Sequence[tuple[str, int]]) -> tuple[_Run, ...]:
    if len({dtype for dtype, _ in arrays}) == 1:
        dtype = arrays[0][0]
        return (_Run(dtype, _BYTES[dtype] * sum(count for _, count in arrays)),)
    return tuple(_Run(dtype, _BYTES[dtype] * count) for dtype, count in arrays)
