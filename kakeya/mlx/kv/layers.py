"""The content of each class of mlx-lm's layer caches, and how it is set.

    KVCache, QuantizedKVCache   a row for every position
    RotatingKVCache             a row for each of the last `max_size` positions, the first `keep`
                                ("sinks") among them however long the text is
    ArraysCache                 recurrent state: a few arrays that do not grow with the text
    CacheList                   several of these

Any other class, subclasses too, is unknown here: it may remember anything else.

A row is the part at one place of axis 2 of an array of shape [1, heads, places, width]; keys and
values are such arrays, and quantized ones are three each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

Range = tuple[int, int]
_ROWS = (KVCache, QuantizedKVCache, ConcatenateKVCache, RotatingKVCache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """An array with a row for each position: [1, heads, positions, width]."""

    heads: int
    width: int
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one position."""
        return self.heads * self.width * int(self.dtype.size)

    def shape(self, positions: int) -> tuple[int, ...]:
        """The shape of the array for so many positions."""
        return 1, self.heads, positions, self.width

    def describe(self) -> list[object]:
        """As JSON."""
        return [_name(self.dtype), self.heads, self.width]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """An array that has this shape whatever the text."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        size = int(self.dtype.size)
        for length in self.shape:
            size *= length
        return size

    def describe(self) -> list[object]:
        """As JSON."""
        return [_name(self.dtype), list(self.shape)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The order of a window's rows, which go round in it where they are appended one by one.

    The first `rows` of `places` on axis 2 hold something; the next row goes to `following`.
    """

    rows: int
    places: int
    following: int


def layers_of(cache: Sequence[Any]) -> list[Any]:
    """The caches, with the members of a CacheList in its place."""
    found: list[Any] = []
    for layer in cache:
        found += layers_of(layer.caches) if type(layer) is CacheList else (layer,)
    return found


def is_known(layer: Any) -> bool:  # noqa: ANN401 - mlx-lm's caches share no public type
    """Whether the functions below hold for it."""
    return type(layer) in (KVCache, QuantizedKVCache, RotatingKVCache, ArraysCache)


def is_state(layer: Any) -> bool:  # noqa: ANN401
    """Whether it holds recurrent state in the place of rows."""
    return type(layer) is ArraysCache


def grows(layer: Any) -> bool:  # noqa: ANN401
    """Whether it holds rows of the whole text, and attention to them takes longer and longer."""
    return type(layer) in (KVCache, QuantizedKVCache)


def windows(cache: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """(tokens, bytes of each) of layers with a window; the caches hold some tokens."""
    found: Counter[int] = Counter()
    for layer in layers_of(cache):
        if isinstance(layer, RotatingKVCache):
            found[int(layer.max_size)] += int(layer.nbytes) // int(layer.keys.shape[2])
    return tuple(sorted(found.items()))


def state_bytes(cache: Sequence[Any]) -> int:
    """Bytes of layers without rows, or of unknown classes; the caches hold some text."""
    return sum(int(layer.nbytes) for layer in layers_of(cache) if not isinstance(layer, _ROWS))


def arrays(layer: Any) -> list[mx.array]:  # noqa: ANN401
    """Its arrays, in order; [] where it holds nothing, or less than it can."""
    if is_state(layer):
        held = list(layer.cache)
        return [] if any(part is None for part in held) else held
    if layer.keys is None:
        return []
    if type(layer) is QuantizedKVCache:
        return [*layer.keys, *layer.values]
    return [layer.keys, layer.values]


def place(layer: Any, first: int, last: int) -> Range | None:  # noqa: ANN401
    """Where on axis 2 the rows of positions [first, last) lie; None where they don't.

    Recurrent state has no rows: any answer is right.
    """
    if is_state(layer):
        return 0, 0
    offset = int(layer.offset)
    if last > offset:
        return None
    if type(layer) is not RotatingKVCache:
        return first, last
    # The newest rows lie in order in front of `_idx`, be it a ring or not.
    end = int(layer._idx) - (offset - last)  # noqa: SLF001 - part of its state
    start = end - (last - first)
    is_whole = offset <= layer.keys.shape[2]
    return (start, end) if start >= (0 if is_whole else int(layer.keep)) else None


def wanted(layer: Any, tokens: int) -> tuple[Range, ...]:  # noqa: ANN401
    """The positions of its rows behind a text of so many tokens, in order."""
    if is_state(layer):
        return ()
    if type(layer) is not RotatingKVCache or tokens <= layer.max_size:
        return ((0, tokens),)
    keep, window = int(layer.keep), int(layer.max_size)
    newest = (tokens - (window - keep), tokens)
    return ((0, keep), newest) if keep else (newest,)


def ring(layer: Any) -> Ring | None:  # noqa: ANN401
    """The order of its rows; None where they lie by their positions, or it has none."""
    if type(layer) is not RotatingKVCache or layer.keys is None:
        return None
    places = int(layer.keys.shape[2])
    following = int(layer._idx)  # noqa: SLF001
    return Ring(rows=min(int(layer.offset), places), places=places, following=following)


def places(layer: Any, tokens: int) -> int:  # noqa: ANN401
    """How long axis 2 is to be for `restore`.

    A cache that grows allocates in steps; the next token is sure to come, so there is a place.
    """
    if is_state(layer):
        return 0
    if type(layer) is RotatingKVCache:
        return min(tokens, int(layer.max_size))
    step = int(layer.step)
    return (tokens // step + 1) * step


def restore(
    layer: Any,  # noqa: ANN401
    held: Sequence[mx.array],
    tokens: int,
    ring: Ring | None = None,
) -> None:
    """Make an empty cache hold this: as after a prefill of so many tokens, or as a ring lay.

    Behind a prefill that went beyond its window, a RotatingKVCache has more rows than `max_size`;
    whatever is appended next, it drops them first.
    """
    if is_state(layer):
        layer.cache = list(held)
        return
    half = len(held) // 2
    if type(layer) is QuantizedKVCache:
        layer.keys, layer.values = tuple(held[:half]), tuple(held[half:])
    else:
        layer.keys, layer.values = held
    layer.offset = tokens
    if type(layer) is RotatingKVCache:
        layer._idx = places(layer, tokens) if ring is None else ring.following  # noqa: SLF001


def straighten(layer: Any) -> None:  # noqa: ANN401
    """Make a cache hold its rows as `restore` has them, where one row was appended alone.

    That goes round a window, and attention sums in another order then.
    """
    if type(layer) is not RotatingKVCache or layer.keys is None:
        return
    # The order is that of mlx-lm itself, in front of several rows.
    order = layer._temporal_order  # noqa: SLF001
    layer.keys, layer.values = order(layer.keys), order(layer.values)
    layer._idx = layer.keys.shape[2]  # noqa: SLF001


def describe(layer: Any) -> dict[str, object]:  # noqa: ANN401
    """Properties of a cache that must be equal for its contents to mean the same, as JSON."""
    found: dict[str, object] = {"class": type(layer).__name__}
    if type(layer) is RotatingKVCache:
        found |= {"window": int(layer.max_size), "keep": int(layer.keep)}
    elif type(layer) is QuantizedKVCache:
        found |= {"bits": int(layer.bits), "group_size": int(layer.group_size)}
    return found


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
