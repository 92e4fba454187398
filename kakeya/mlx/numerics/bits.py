"""The bits of arrays as numpy sees them: copied, compared and filled in place, without a kernel.

Only for arrays that are computed, and that nothing in flight reads or writes. A view is let go
before an array is changed by mlx again: it counts as another user, and the change would copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[Any]
"""Unsigned integers of an array's shape, in its memory."""
ROUNDING = 0.02
"""Two ways to compute one thing may differ by so much of the largest logit: rounding in 16 bits
stays below, a wrong row or foreign KV does not."""
_KINDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def share_off(found: mx.array, expected: mx.array) -> float:
    """The largest difference of logits as a share of the largest one; no number where one is none.

    Compare as `share_off(...) <= ROUNDING`, which is false then.
    """
    return abs((mx.abs(found - expected).max() / mx.abs(expected).max()).item())


def kind_of(dtype: mx.Dtype) -> mx.Dtype:
    """The unsigned integers of a type's size."""
    return _KINDS[dtype.size]


def bits(held: Sequence[mx.array]) -> Iterator[Bits]:
    """View arrays as unsigned integers of their size, without a copy; waits for them."""
    raws = [part.view(kind_of(part.dtype)) for part in held]
    mx.eval(raws)
    return (np.array(raw, copy=False) for raw in raws)


def copied(parts: Sequence[mx.array], length: int) -> mx.array:
    """Copies in one buffer of their own, each from position 0 on, with zeros behind it.

    Shapes: [1, H, tokens, D] each -> [B, H, length, D].
    """
    heads, width = parts[0].shape[1], parts[0].shape[3]
    made = mx.zeros((len(parts), heads, length, width), parts[0].dtype)
    into, *rows = bits([made, *parts])
    for place, row in enumerate(rows):
        into[place, :, : row.shape[2]] = row[0]
    return made


def put(held: mx.array, place: int, part: mx.array) -> None:
    """Copy a part into a place of `held`, with zeros behind it.

    Shapes: [places, H, length, D], [1, H, tokens, D]. `held` keeps its name and its memory.
    """
    into, row = bits([held, part])
    tokens = row.shape[2]
    into[place, :, :tokens] = row[0]
    into[place, :, tokens:] = 0
