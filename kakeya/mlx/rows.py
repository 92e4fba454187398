"""A layer's caches of many rows in the place of one cache, for a single forward.

Models of mlx-lm call their cache and then `scaled_dot_product_attention` with what it returned.
Here the cache is a `RowCaches`, which appends to what its parts hold, and attends part by part:

    AloneKV    one row, over a cache of any kind, exactly as it would alone
    SlabKV     the rows of one slab: one scatter, then one attention for each stretch of places
               that follow each other, as long as its longest row, under a mask of their lengths
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx

from kakeya.core.errors import InvariantBroken
from kakeya.mlx.slabs import LayerSlab, PlacedKV

Attend = Callable[..., mx.array]
"""mlx-lm's attention."""


class RowMasks:
    """The parts' own attention masks; what a model passes on from its cache to its attention."""

    def __init__(self, masks: Sequence[Any]) -> None:
        self.masks = masks


class Part(Protocol):
    """Some of the rows, one behind the other. Arrays have the shape [rows, H, 1, D]."""

    def make_mask(self, count: int, *, return_array: bool, window_size: int | None) -> Any:  # noqa: ANN401
        """What `attend` is to be given as its mask; None = nothing."""
        ...

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append to each row's KV."""
        ...

    def attend(
        self,
        attend: Attend,
        queries: mx.array,
        scale: float,
        mask: Any,  # noqa: ANN401
        sinks: mx.array | None,
    ) -> list[mx.array]:
        """Attention of each row over its KV, in pieces."""
        ...


class AloneKV:
    """A row with a cache of its own, or that is to be computed as if it had one."""

    def __init__(self, cache: Any) -> None:  # noqa: ANN401 - mlx-lm's caches share no public type
        self._cache = cache
        self._fetched: Any = None

    def make_mask(self, count: int, *, return_array: bool, window_size: int | None) -> Any:  # noqa: ANN401
        """The cache's own."""
        return self._cache.make_mask(count, return_array=return_array, window_size=window_size)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append."""
        self._fetched = self._cache.update_and_fetch(keys, values)

    def attend(
        self,
        attend: Attend,
        queries: mx.array,
        scale: float,
        mask: Any,  # noqa: ANN401
        sinks: mx.array | None,
    ) -> list[mx.array]:
        """As alone."""
        fetched, self._fetched = self._fetched, None
        return [attend(queries, *fetched, cache=self._cache, scale=scale, mask=mask, sinks=sinks)]


class Stretch:
    """Places of a slab that follow each other, of rows that do too; all layers share its mask."""

    def __init__(self, first: int, count: int, lengths: Sequence[int], offset: mx.array) -> None:
        """`offset` [count] are the rows' lengths, in front of what is appended."""
        self.places = slice(first, first + count)
        self.longest = max(lengths) + 1
        self._is_even = min(lengths) + 1 == self.longest
        self._offset = offset
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window: int | None) -> mx.array | None:
        """What each row sees. Shape: [count, 1, 1, longest]; None = all of it."""
        if self._is_even and (window is None or window >= self.longest):
            return None
        if window not in self._masks:
            at, last = mx.arange(self.longest), self._offset[:, None]
            seen = at <= last
            if window is not None:
                seen = seen & (at > last - window)
            self._masks[window] = seen[:, None, None]
        return self._masks[window]


class SlabRows:
    """The rows of a forward that sit in one slab, by their places; all layers share it."""

    def __init__(self, places: Sequence[int], lengths: Sequence[int], *, total: int) -> None:
        """`lengths` are those in front of what is appended; `total` are the slab's places."""
        self.count = len(places)
        self._offset = offset = mx.array(list(lengths), dtype=mx.int32)
        self._index: dict[tuple[int, ...], mx.array] = {}
        self._rows = None if len(places) == total else mx.array(list(places))
        starts = [at for at in range(len(places)) if not at or places[at] != places[at - 1] + 1]
        self.stretches = [
            Stretch(places[start], end - start, lengths[start:end], offset[start:end])
            for start, end in zip(starts, [*starts[1:], len(places)], strict=True)
        ]
        self.bounds = starts[1:]

    def put(self, held: mx.array, rows: mx.array) -> mx.array:
        """Put each row behind those it has. Shapes: [P, H, C, D], [rows, H, 1, D] -> the first."""
        if self._rows is not None:
            held[self._rows, :, self._offset] = rows[:, :, 0]
            return held
        if rows.shape not in self._index:
            self._index[rows.shape] = mx.broadcast_to(self._offset[:, None, None, None], rows.shape)
        return mx.put_along_axis(held, self._index[rows.shape], rows, axis=2)


class SlabKV:
    """One layer of `SlabRows`."""

    def __init__(self, rows: SlabRows, slab: LayerSlab, caches: Sequence[PlacedKV]) -> None:
        self._rows = rows
        self._slab = slab
        self._caches = caches

    def make_mask(self, count: int, *, return_array: bool, window_size: int | None) -> int | None:
        """The window; the mask itself is the stretch's."""
        del count, return_array
        return window_size

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append, all rows at once."""
        slab, rows = self._slab, self._rows
        slab.keys = rows.put(slab.keys, keys)
        slab.values = rows.put(slab.values, values)
        for cache in self._caches:
            cache.offset += 1

    def attend(
        self,
        attend: Attend,
        queries: mx.array,
        scale: float,
        mask: int | None,
        sinks: mx.array | None,
    ) -> list[mx.array]:
        """Attention stretch by stretch."""
        stretches, slab = self._rows.stretches, self._slab
        parts = [queries] if len(stretches) == 1 else split(queries, self._rows.bounds)
        return [
            attend(
                part,
                slab.keys[stretch.places, :, : stretch.longest],
                slab.values[stretch.places, :, : stretch.longest],
                cache=None,
                scale=scale,
                mask=stretch.mask(mask),
                sinks=sinks,
            )
            for part, stretch in zip(parts, stretches, strict=True)
        ]


class RowCaches:
    """One layer's caches of all rows, in the place of one cache. For a single forward."""

    def __init__(self, parts: Sequence[Part], bounds: Sequence[int], offset: mx.array) -> None:
        """`bounds` are the rows at which a part ends and another begins."""
        self._parts = parts
        self._bounds = bounds
        self.offset = offset
        self._given: tuple[mx.array, mx.array] | None = None

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> RowMasks | None:
        """The parts' masks for `count` new tokens; None where no part needs one."""
        masks = [
            part.make_mask(count, return_array=return_array, window_size=window_size)
            for part in self._parts
        ]
        return None if all(mask is None for mask in masks) else RowMasks(masks)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append to each row's KV. Shapes: [B, H, 1, D]; they come back as they are.

        What the rows hold differs in length; `attend` has it.
        """
        for part, key, value in zip(
            self._parts, self._split(keys), self._split(values), strict=True
        ):
            part.append(key, value)
        self._given = keys, values
        return keys, values

    def attend(
        self,
        attend: Attend,
        queries: mx.array,
        given: tuple[mx.array, mx.array],
        scale: float,
        mask: RowMasks | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of each row over what it holds. Shapes: [B, H, 1, D] -> the same."""
        if self._given is None or given[0] is not self._given[0] or given[1] is not self._given[1]:
            raise InvariantBroken("batch", "the model's attention changes what its cache returned")
        masks = [None] * len(self._parts) if mask is None else mask.masks
        found: list[mx.array] = []
        for part, query, own in zip(self._parts, self._split(queries), masks, strict=True):
            found += part.attend(attend, query, scale, own, sinks)
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _split(self, rows: mx.array) -> Sequence[mx.array]:
        return split(rows, self._bounds) if self._bounds else (rows,)


def split(rows: mx.array, bounds: int | Sequence[int]) -> Sequence[mx.array]:
    """Cut axis 0 into so many or at these; mlx's stub says that it is a single array."""
    return cast("Sequence[mx.array]", mx.split(rows, bounds))
