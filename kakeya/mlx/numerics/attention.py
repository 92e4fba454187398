"""Attention in two parts, by products of matrices: the common context, and a row's own tokens.

mlx's exponential takes most of the time of a softmax on the CPU, and behind a long context that of
a whole piece of a prompt. Powers of two take a third of it, so there scores are made exponents of
two; the sum of the weights is taken out of the result, not out of each weight.

A sequence's new tokens behind many others attend so on the CPU. In front of FAR_TOKENS prompts
keep the bits that mlx-lm gives them, though they would gain as well. Scores grow with the context,
so they are computed in parts of at most SCORE_BYTES: heads that share keys, and as many rows of
these as fit.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from kakeya.mlx.numerics.grid import FAR_TOKENS, SCORE_BYTES, is_cpu, is_split_far

_LOG2_E = math.log2(math.e)
_SCORE_SIZE = 4
"""Bytes of a score: float32."""


def score_scale(scale: float) -> float:
    """The factor of queries that makes scores for `weigh`."""
    return scale * _LOG2_E if is_cpu() else scale


def weigh(common: mx.array, own: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
    """The weights of scores, and the divisor of their products with values, None = none.

    Shapes: [groups, a * b, T], [groups, a, b, S] -> the same, [groups, a, b, 1]. Sums in float32.
    """
    if is_cpu():
        return _powers(common, own)
    groups, _, shared = common.shape
    scores = mx.concatenate([common, own.reshape(groups, -1, own.shape[-1])], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return weights[..., :shared], weights[..., shared:].reshape(own.shape), None


def _powers(common: mx.array, own: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """`weigh`, where scores are exponents of two."""
    common, own = common.astype(mx.float32), own.astype(mx.float32)
    shape = (*own.shape[:3], 1)
    top = mx.maximum(common.max(axis=-1).reshape(shape), own.max(axis=-1, keepdims=True))
    common = mx.power(2.0, common - top.reshape(*common.shape[:2], 1))
    own = mx.power(2.0, own - top)
    return common, own, common.sum(axis=-1).reshape(shape) + own.sum(axis=-1, keepdims=True)


def attend_far(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention of the newest tokens of a sequence, for the CPU.

    Shapes: [1, H, L, D], [1, groups, T, D], [1, groups, T, W] -> [1, H, L, W].
    """
    _, heads, count, width = queries.shape
    groups, past = keys.shape[1], keys.shape[2] - count
    asked = (queries * (scale * _LOG2_E)).reshape(groups, -1, count, width)
    row_bytes = _SCORE_SIZE * heads * keys.shape[2]
    if count * row_bytes <= SCORE_BYTES:
        found = _attend(asked, keys[0], values[0], past, 0)
    else:
        rows = max(1, SCORE_BYTES * groups // row_bytes)
        parts = []
        for one in (slice(group, group + 1) for group in range(groups)):
            held = []
            for first in range(0, count, rows):
                some = asked[one, :, first : first + rows]
                held.append(_attend(some, keys[0, one], values[0, one], past, first))
                mx.eval(held[-1])  # else scores of several parts are made ahead of their use
            parts.append(mx.concatenate(held, axis=2))
        found = mx.concatenate(parts)
    return found.astype(queries.dtype).reshape(1, heads, count, -1)


def _attend(asked: mx.array, keys: mx.array, values: mx.array, past: int, first: int) -> mx.array:
    """Attention of rows of a piece, from its row `first` on, behind `past` tokens.

    Shapes: [groups, each, rows, D], [groups, T, D], [groups, T, W] -> [groups, each, rows, W].
    """
    groups, _, rows, width = asked.shape
    count = keys.shape[1] - past
    flat = asked.reshape(groups, -1, width)
    own = (flat @ keys[:, past:].swapaxes(-1, -2)).reshape(groups, -1, rows, count)
    own = mx.where(mx.arange(count) <= mx.arange(first, first + rows)[:, None], own, -mx.inf)
    common, own, total = _powers(flat @ keys[:, :past].swapaxes(-1, -2), own)
    found = common.astype(values.dtype) @ values[:, :past]
    found = found.reshape(*own.shape[:3], -1) + own.astype(values.dtype) @ values[:, None, past:]
    return found / total


def is_far(queries: mx.array, keys: Any, mask: Any, sinks: mx.array | None) -> bool:  # noqa: ANN401
    """Whether `attend_far` is for these arguments of mlx-lm's attention."""
    return (
        isinstance(keys, mx.array)
        and keys.shape[2] - queries.shape[2] >= FAR_TOKENS
        and isinstance(mask, str)
        and mask == "causal"
        and sinks is None
        and queries.shape[0] == 1
        and is_split_far()
    )
