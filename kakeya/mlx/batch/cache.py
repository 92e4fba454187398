"""A layer's caches of many rows in the place of one cache, for a single forward.

Models of mlx-lm call their cache and then `scaled_dot_product_attention` with its result.
Here the cache is a `RowCaches`, which appends to its parts, and attends part by part:

    AloneKV    one row, over a cache of any kind, exactly as it would alone
    SlabKV     the rows of one slab: one scatter, then one attention for each stretch of places
               that follow each other, as long as its longest row, under a mask of their lengths;
               a prefix that all rows of a stretch share is read once (see
               `shared_prefix`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx

from kakeya.core.errors import InvariantBroken
from kakeya.mlx.batch.shared_prefix import RowRun
from kakeya.mlx.batch.shared_prefix import attend as attend_shared
from kakeya.mlx.batch.slabs import LayerSlab, PlacedKV

Attend = Callable[..., mx.array]
"""mlx-lm's attention."""


class RowMasks:
    """The parts' own attention masks, which a model passes on from its cache to its attention."""

    def __init__(self, masks: Sequence[Any]) -> None:
        self.masks = masks


class RowGroup(Protocol):
    """Some of the rows, one behind the other. Arrays have the shape [rows, H, 1, D]."""

    def make_mask(self, count: int, *, return_array: bool, window_size: int | None) -> Any:  # noqa: ANN401
        """The mask for `attend`; None = none."""
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

    @property
    def keys(self) -> mx.array:
        """All keys of the row's cache."""
        return cast("mx.array", self._cache.keys)

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._cache.keys = keys

    def make_mask(self, count: int, *, return_array: bool, window_size: int | None) -> Any:  # noqa: ANN401
        """The mask of the cache."""
        return self._cache.make_mask(count, return_array=return_array, window_size=window_size)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append to the row's cache."""
        self._fetched = self._cache.update_and_fetch(keys, values)

    def attend(
        self,
        attend: Attend,
        queries: mx.array,
        scale: float,
        mask: Any,  # noqa: ANN401
        sinks: mx.array | None,
    ) -> list[mx.array]:
        """Attention of the row, as if it were alone."""
        fetched, self._fetched = self._fetched, None
        return [attend(queries, *fetched, cache=self._cache, scale=scale, mask=mask, sinks=sinks)]


class Stretch:
    """Places of a slab that follow each other, of rows that do too; all layers share its mask."""

    def __init__(self, first: int, run: RowRun, lengths: Sequence[int], offset: mx.array) -> None:
        """From place `first` on; `offset` [rows] are the lengths before the append.

        No row is shorter than the prefix that the run shares.
        """
        self._places = slice(first, first + run.end - run.start)
        self._shared = run.shared
        self._longest = max(lengths) + 1
        self._is_even = min(lengths) + 1 == self._longest
        self._offset = offset
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    def attend(
        self,
        attend: Attend,
        queries: mx.array,
        slab: LayerSlab,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of each row over its place. Shapes: [rows, H, 1, D] -> the same."""
        sees_all = window is None or window >= self._longest
        if self._shared and sees_all and sinks is None:
            return attend_shared(
                queries,
                slab,
                self._places,
                shared=self._shared,
                longest=self._longest,
                scale=scale,
                mask=self._mask(self._shared, None),
            )
        keys, values = (part[self._places, :, : self._longest] for part in (slab.keys, slab.values))
        mask = self._mask(0, None if sees_all else window)
        return attend(queries, keys, values, cache=None, scale=scale, mask=mask, sinks=sinks)

    def _mask(self, first: int, window: int | None) -> mx.array | None:
        """Positions from `first` on that a row sees. Shape: [rows, 1, 1, tokens]; None = all."""
        if self._is_even and window is None:
            return None
        if (first, window) not in self._masks:
            at, last = mx.arange(first, self._longest), self._offset[:, None]
            seen = at <= last
            if window is not None:
                seen = seen & (at > last - window)
            self._masks[first, window] = seen[:, None, None]
        return self._masks[first, window]


class SlabRows:
    """The rows of a forward that lie in one slab, by their places; all layers share it."""

    def __init__(
        self, places: Sequence[int], lengths: Sequence[int], runs: Sequence[RowRun], *, total: int
    ) -> None:
        """`lengths` are those before the append; `total` is the count of the slab's places."""
        self.count = len(places)
        self._offset = offset = mx.array(list(lengths), dtype=mx.int32)
        self._index: dict[tuple[int, ...], mx.array] = {}
        self._rows = None if len(places) == total else mx.array(list(places))
        self.stretches = [
            Stretch(
                places[run.start], run, lengths[run.start : run.end], offset[run.start : run.end]
            )
            for run in runs
        ]
        self.bounds = [run.start for run in runs[1:]]

    def put(self, held: mx.array, rows: mx.array) -> mx.array:
        """Append a token to each row. Shapes: [P, H, C, D], [rows, H, 1, D] -> the first."""
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
        """The window; the stretch makes the mask of it."""
        del count, return_array
        return window_size

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append to all rows at once."""
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
        stretches = self._rows.stretches
        parts = [queries] if len(stretches) == 1 else split(queries, self._rows.bounds)
        return [
            stretch.attend(attend, part, self._slab, scale, mask, sinks)
            for part, stretch in zip(parts, stretches, strict=True)
        ]


class RowCaches:
    """One layer's caches of all rows, in the place of one cache. For a single forward."""

    def __init__(self, parts: Sequence[RowGroup], bounds: Sequence[int], offset: mx.array) -> None:
        """`bounds` are the rows at which a part ends and another begins."""
        self._parts = parts
        self._bounds = bounds
        self.offset = offset
        self._given: tuple[mx.array, mx.array] | None = None

    @property
    def keys(self) -> mx.array:
        """Those of the first part, on which mlx-lm makes a pipeline's sending depend."""
        return self._alone().keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._alone().keys = keys

    def _alone(self) -> AloneKV:
        part = self._parts[0]
        if not isinstance(part, AloneKV):
            raise InvariantBroken("batch", "a rank of a pipeline has its rows in a slab")
        return part

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
        """Append to each row's KV. Shapes: [B, H, 1, D]; returned as they are.

        The KV of the rows differs in length, so only `attend` reads it.
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
        """Attention of each row over its KV. Shapes: [B, H, 1, D] -> the same."""
        if self._given is None or given[0] is not self._given[0] or given[1] is not self._given[1]:
            raise InvariantBroken(
                "batch", "the model's attention changes the arrays that its cache returned"
            )
        masks = [None] * len(self._parts) if mask is None else mask.masks
        found: list[mx.array] = []
        for part, query, own in zip(self._parts, self._split(queries), masks, strict=True):
            found += part.attend(attend, query, scale, own, sinks)
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _split(self, rows: mx.array) -> Sequence[mx.array]:
        return split(rows, self._bounds) if self._bounds else (rows,)


def split(rows: mx.array, bounds: int | Sequence[int]) -> Sequence[mx.array]:
    """Cut axis 0 into so many parts, or at these rows; mlx's stub says it is a single array."""
    return cast("Sequence[mx.array]", mx.split(rows, bounds))
