"""A network laid out for OpenBLAS: the same products in less time.

OpenBLAS copies both factors of a product into a form of its own before it multiplies, and for a
few rows that is most of the work. Three layouts of a weight [outputs, inputs]:

    by output   as mlx-lm has it, for all other devices
    by input    inputs outermost: copied in three fifths of the time; looks to mlx as before
    in strips   [strips, inputs, STRIP_OUTPUTS], each by input, and a product of its own: below
                10^6 multiplications kernels for AVX-512 copy nothing, and beyond it, for a
                prompt, a strip is copied from memory that is read in order

A step of four rows of a model with 135 M parameters takes 91 ms by output or by input and 61 in
strips, one row 86, 55 and 46, a piece of 128 rows 247, 266 and 222. Kernels without AVX-512 always
copy, and several threads share only a product that is not small: both are faster by input. So are
weights that the processor's caches hold. All of this follows from the library and the shapes alone,
so the layout, which decides bits, is the same at every load.

mlx on the CPU makes sixteen small operations of a rotary embedding, in each layer for queries and
for keys. Most of them find sines and cosines of positions, which are the same in all layers: here
they are made once a forward, and four operations are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import AllToShardedLinear, ShardedToAllLinear
from mlx.utils import tree_unflatten

STRIP_OUTPUTS = 128
"""The most outputs of a strip: a step of 7 rows stays small up to 1,100 inputs."""
_STRIP_STEP = 32
"""A strip has a multiple of so many: two registers of AVX-512."""
_CACHED_WEIGHTS = 1 << 18
"""A weight of so many values, 1 MiB, stays in a core's own cache."""
Offset = int | mx.array
"""The position of the first row; of each sequence, where it is an array. Shape: [B]."""
Told = Callable[[int], None]
"""Hears how many more bytes of weights lie there."""


def _untold(_: int) -> None:
    pass


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


class StripLinear(nn.Linear):
    """A linear layer in strips. Shapes: weight [strips, inputs, width]."""

    def __init__(self, linear: nn.Linear, width: int, told: Told = _untold) -> None:
        nn.Module.__init__(self)
        self.weight = _laid_out(linear.weight, width, told)
        if "bias" in linear:
            self.bias = linear.bias

    def __call__(self, x: mx.array) -> mx.array:
        """Shapes: x [..., inputs] -> [..., outputs]."""
        found = _by_strips(x, self.weight)
        return found + self.bias if "bias" in self else found


class StripEmbedding(nn.Embedding):
    """An embedding in strips, which is multiplied with too. Shapes: weight [strips, D, width]."""

    def __init__(self, embedding: nn.Embedding, width: int, told: Told = _untold) -> None:
        nn.Module.__init__(self)
        self.weight = _laid_out(embedding.weight, width, told)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Shapes: tokens [...] -> [..., D]."""
        width = self.weight.shape[2]
        return self.weight[tokens // width, :, tokens % width]

    def as_linear(self, x: mx.array) -> mx.array:
        """Shapes: x [..., D] -> [..., outputs]."""
        return _by_strips(x, self.weight)


def strip_width(outputs: int, inputs: int) -> int:
    """Outputs of a strip of a weight of these shapes; 0 = it is better by input."""
    if outputs * inputs <= _CACHED_WEIGHTS:
        return 0
    widths = range(STRIP_OUTPUTS, 0, -_STRIP_STEP)
    return next((width for width in widths if outputs % width == 0), 0)


def _laid_out(weight: mx.array, width: int, told: Told) -> mx.array:
    """Shapes: [outputs, inputs] -> [strips, inputs, width]; [inputs, outputs] where width is 0."""
    mx.eval(weight)
    told(weight.nbytes // 2)
    outputs, inputs = weight.shape
    laid = mx.zeros((outputs // width, inputs, width) if width else (inputs, outputs))
    mx.eval(laid)
    told(weight.nbytes // 4)  # memory that was never touched takes as long as what is copied there
    # A few outputs at a time: they stay in the cache while they are turned, and told of.
    step = width or STRIP_OUTPUTS
    for at in range(0, outputs, step):
        part = mx.contiguous(weight[at : at + step].T)
        if width:
            laid[at // width] = part
        else:
            laid[:, at : at + step] = part
        mx.eval(laid)
        told(part.nbytes // 4)
    return laid


def _by_strips(x: mx.array, strips: mx.array) -> mx.array:
    """Shapes: [..., inputs], [strips, inputs, width] -> [..., outputs]."""
    found = x.reshape(1, -1, x.shape[-1]) @ strips
    return found.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


_LINEAR = (nn.Linear, AllToShardedLinear, ShardedToAllLinear)
_STRIPPED: dict[type[nn.Module], Callable[[Any, int, Told], nn.Module]] = {
    nn.Linear: StripLinear,
    nn.Embedding: StripEmbedding,
}
"""Only layers of these very types: a subclass may compute otherwise."""


def suit(network: nn.Module, told: Told = _untold, *, in_strips: bool) -> tuple[Angles, str]:
    """Lay out a float32 network for OpenBLAS, while its weights may still be in their files.

    Returns the angles of its rotations, and a name of the layout.

    Largest first: a copy lies in memory twice, best while little else does. `told` hears half of
    a layer's bytes once they are read, and the others as they are laid out. Raises RuntimeError
    where a file is damaged.
    """
    named = network.named_modules()
    for layer in sorted(_multiplied(network), key=lambda layer: -layer.weight.size):
        width = strip_width(*layer.weight.shape) if in_strips else 0
        kind = _STRIPPED.get(type(layer))
        if width and kind is not None:
            made = kind(layer, width, told)
            mx.eval(made.parameters())
            names = [(name, made) for name, module in named if module is layer]
            network.update_modules(tree_unflatten(names))
            layer.weight = made.weight  # the list holds the layer, and must not hold its weight
        else:
            layer.weight = _laid_out(layer.weight, 0, told).T
        mx.clear_cache()
    angles = Angles()
    ropes = [(name, m) for name, m in network.named_modules() if type(m) is nn.RoPE]
    network.update_modules(tree_unflatten([(name, Rotation(m, angles)) for name, m in ropes]))
    return angles, f"in strips of {STRIP_OUTPUTS}" if in_strips else "by input"


def _multiplied(network: nn.Module) -> list[nn.Module]:
    """Layers with float32 weights that are a factor of a product."""
    linear = [m for m in network.modules() if isinstance(m, _LINEAR)]
    outputs = {m.weight.shape[0] for m in linear}
    # Where another layer has an output for each token, the embedding is only looked up in.
    embeddings = [m for m in network.modules() if isinstance(m, nn.Embedding)]
    both = [m for m in embeddings if m.weight.shape[0] not in outputs]
    known = {id(layer): layer for layer in (*linear, *both)}  # one may have several names
    return [m for m in known.values() if m.weight.ndim == 2 and m.weight.dtype == mx.float32]


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
