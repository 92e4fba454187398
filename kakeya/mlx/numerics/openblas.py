"""A network laid out for OpenBLAS: equal bits, in less time.

OpenBLAS copies both factors of a product into a form of its own before it multiplies, and for a
few rows that is most of the work. It copies a weight with its inputs outermost in three fifths of
the time that mlx-lm's layout takes, with its outputs outermost; so weights are laid out so, and
look to mlx as before.

mlx on the CPU makes sixteen small operations of a rotary embedding, in each layer for queries and
for keys. Most of them find sines and cosines of positions, which are the same in all layers: here
they are made once a forward, and four operations are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

Offset = int | mx.array
"""The position of the first row; of each sequence, where it is an array. Shape: [B]."""


class Angles:
    """Cosines and sines of the positions of the forward that is being built.

    Outside of a forward nothing is kept: the positions in an array may be changed in place.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], tuple[Offset, mx.array, mx.array]] | None = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Build one forward."""
        self._made = {}
        try:
            yield
        finally:
            self._made = None

    def of(self, rope: nn.RoPE, offset: Offset, rows: int) -> tuple[mx.array, mx.array]:
        """The factors of a rotation for its features, and for their other halves.

        Shapes: [rows, dims] both, [B, 1, rows, dims] where `offset` is of B sequences.
        """
        at = offset if isinstance(offset, int) else id(offset)
        key = (at, rows, rope.dims, rope.base, rope.scale)
        found = self._made.get(key) if self._made is not None else None
        if found is None:
            found = (offset, *_angles(rope, offset, rows))
            if self._made is not None:
                self._made[key] = found
        return found[1:]


class Rotation(nn.RoPE):
    """`nn.RoPE` with the same bits."""

    def __init__(self, rope: nn.RoPE, angles: Angles) -> None:
        super().__init__(rope.dims, rope.traditional, rope.base, rope.scale)
        self._angles = angles

    def __call__(self, x: mx.array, offset: Offset = 0) -> mx.array:
        """Shapes: x [B, H, L, D] -> the same."""
        half, width = self.dims // 2, x.shape[-1]
        is_plain = not self.traditional and self.dims == width and width % 2 == 0
        if not is_plain or x.dtype != mx.float32 or x.ndim != 4:
            return cast("mx.array", super().__call__(x, offset))
        cosines, sines = self._angles.of(self, offset, x.shape[-2])
        return x * cosines + mx.concatenate([x[..., half:], x[..., :half]], axis=-1) * sines


def suit(network: nn.Module) -> Angles:
    """Lay out a float32 network for OpenBLAS, while its weights may still be in their files.

    Largest first: a copy lies in memory twice, best while little else does. Raises
    RuntimeError where a file is damaged.
    """
    for layer in sorted(_multiplied(network), key=lambda layer: -layer.weight.size):
        turned = mx.contiguous(layer.weight.T)
        mx.eval(turned)
        layer.weight = turned.T
        del turned
        mx.clear_cache()
    angles = Angles()
    ropes = [(name, m) for name, m in network.named_modules() if type(m) is nn.RoPE]
    network.update_modules(tree_unflatten([(name, Rotation(m, angles)) for name, m in ropes]))
    return angles


def _multiplied(network: nn.Module) -> list[nn.Module]:
    """Layers with float32 weights that are a factor of a product."""
    linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
    outputs = {m.weight.shape[0] for m in linear}
    # Where another layer has an output for each token, the embedding is only looked up in.
    embeddings = [m for m in network.modules() if isinstance(m, nn.Embedding)]
    both = [m for m in embeddings if m.weight.shape[0] not in outputs]
    return [m for m in (*linear, *both) if m.weight.ndim == 2 and m.weight.dtype == mx.float32]


def _angles(rope: nn.RoPE, offset: Offset, rows: int) -> tuple[mx.array, mx.array]:
    """As mlx makes them, operation by operation."""
    half = rope.dims // 2
    positions = mx.arange(rows, dtype=mx.float32)
    if isinstance(offset, mx.array) and offset.ndim:
        offset = offset[:, None, None]
    positions = (positions + offset) * rope.scale
    steps = mx.arange(0, -half, -1, dtype=mx.float32)
    each = float(np.float32(math.log(rope.base)) / np.float32(half))
    theta = positions[..., None] * mx.exp(steps * each)
    cosines, sines = mx.cos(theta), mx.sin(theta)
    return (
        mx.concatenate([cosines, cosines], axis=-1),
        mx.concatenate([-sines, sines], axis=-1),
    )
