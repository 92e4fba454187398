"""Free ranges of pages: the choice of one for an allocation, and the merging of neighbours.

    slab 0                          slab 1
    [0 . . . . . . . . . . . 127]   [128 . . . . . . . . . 255]
    free 3 |    used    | free 40   a range never crosses a slab: slabs are separate mappings

A range is (start, size) with `start` its first page. Best fit finds the smallest size that suffices
as the lowest set bit of one integer, in which bit `n` says that ranges of `n` pages exist; first
fit walks the starts in order.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from kakeya.memory.pages.content import Fit


class Extents:
    """The free ranges of all slabs."""

    __slots__ = (
        "_by_size",
        "_fit",
        "_size_at",
        "_sizes",
        "_slab_pages",
        "_start_of",
        "_starts",
        "pages",
    )

    def __init__(self, *, slab_pages: int, fit: Fit) -> None:
        self._slab_pages = slab_pages
        self._fit = fit
        self._size_at: dict[int, int] = {}  # start -> size
        self._start_of: dict[int, int] = {}  # page behind the end -> start
        self._by_size: list[dict[int, None]] = [{} for _ in range(slab_pages + 1)]
        self._sizes = 0  # bit n is set: there are ranges of n pages
        self._starts: list[int] = []  # in order; kept for first fit alone
        self.pages = 0

    def take(self, size: int) -> int | None:
        """Take `size` pages in a row; their first one, or None when no free range is so long."""
        start = self._choose(size)
        if start is None:
            return None
        self._cut(start, size)
        return start

    def take_smallest(self, limit: int) -> tuple[int, int] | None:
        """Take the first `limit` pages of the smallest range, or all of it; (first page, size).

        With first fit, of the lowest range.
        """
        start = self._choose(1)
        if start is None:
            return None
        size = min(limit, self._size_at[start])
        self._cut(start, size)
        return start, size

    def give(self, start: int, size: int) -> None:
        """Give pages back; the range merges with its free neighbours in the same slab."""
        slab = self._slab_pages
        if start % slab:
            before = self._start_of.get(start)
            if before is not None:
                size += start - before
                start = before
                self._drop(before)
        end = start + size
        if end % slab:
            after = self._size_at.get(end)
            if after is not None:
                self._drop(end)
                size += after
        self._put(start, size)

    def size_at(self, start: int) -> int:
        """The length of the free range that starts here; 0 where none does."""
        return self._size_at.get(start, 0)

    def largest(self) -> int:
        """The longest free range, in pages."""
        return max(0, self._sizes.bit_length() - 1)

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Every free range as (start, size), by address."""
        return tuple(sorted(self._size_at.items()))

    def remove(self, start: int) -> None:
        """Take one whole free range out, as when its slab goes."""
        self._drop(start)

    def _choose(self, size: int) -> int | None:
        if self._fit is Fit.FIRST:
            return next((start for start in self._starts if self._size_at[start] >= size), None)
        fitting = self._sizes >> size
        if not fitting:
            return None
        smallest = size + (fitting & -fitting).bit_length() - 1
        return next(reversed(self._by_size[smallest]))

    def _cut(self, start: int, size: int) -> None:
        """Take the first `size` pages of a range; the rest keeps its end."""
        left = self._size_at[start] - size
        if not left:
            self._drop(start)
            return
        found = self._size_at.pop(start)
        rest = start + size
        self._size_at[rest] = left
        self._start_of[rest + left] = rest
        same = self._by_size[found]
        del same[start]
        if not same:
            self._sizes ^= 1 << found
        self._by_size[left][rest] = None
        self._sizes |= 1 << left
        self.pages -= size
        if self._fit is Fit.FIRST:
            self._starts[bisect_left(self._starts, start)] = rest

    def _put(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_of[start + size] = start
        self._by_size[size][start] = None
        self._sizes |= 1 << size
        self.pages += size
        if self._fit is Fit.FIRST:
            insort(self._starts, start)

    def _drop(self, start: int) -> None:
        size = self._size_at.pop(start)
        del self._start_of[start + size]
        same = self._by_size[size]
        del same[start]
        if not same:
            self._sizes ^= 1 << size
        self.pages -= size
        if self._fit is Fit.FIRST:
            del self._starts[bisect_left(self._starts, start)]
