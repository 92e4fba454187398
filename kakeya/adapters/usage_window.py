"""How often each of many things was used in the last minute, without an allocation for each use.

One row for each thing, one column for each slice of the window. A use is one addition in the
column of the moment; when time enters a slice, its column is cleared for all rows at once. So
counts reach back a whole window, less up to one slice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FIRST_ROWS = 64


class AccessWindow:
    """Counts by row. Rows are given out by `add`, and used again after `drop`."""

    __slots__ = ("_at", "_counts", "_free", "_rows", "_slice_s", "_slices")

    def __init__(self, window_s: float, slices: int) -> None:
        self._slice_s = window_s / slices
        self._slices = slices
        self._counts = np.zeros((_FIRST_ROWS, slices), np.uint32)
        self._free: list[int] = []
        self._rows = 0
        self._at: int | None = None  # the slice that time is in

    def add(self) -> int:
        """A row with no uses."""
        if self._free:
            return self._free.pop()
        if self._rows == len(self._counts):
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._rows += 1
        return self._rows - 1

    def drop(self, row: int) -> None:
        """Forget a row."""
        self._counts[row] = 0
        self._free.append(row)

    def touch(self, row: int, now: float) -> None:
        """Count one use; `now` in monotonic seconds."""
        at = int(now / self._slice_s)
        if at != self._at:
            self._advance(at)
        self._counts[row, at % self._slices] += 1

    def count(self, row: int, now: float) -> int:
        """The uses of one row within the window."""
        self._advance(int(now / self._slice_s))
        return int(self._counts[row].sum())

    def counts(self, now: float) -> NDArray[np.int64]:
        """The uses of every row within the window. Shape: [rows]."""
        self._advance(int(now / self._slice_s))
        totals: NDArray[np.int64] = self._counts[: self._rows].sum(axis=1, dtype=np.int64)
        return totals

    def _advance(self, at: int) -> None:
        if self._at is None or at <= self._at:  # time does not go back
            self._at = at if self._at is None else self._at
            return
        if at - self._at >= self._slices:
            self._counts[:] = 0
        else:
            for entered in range(self._at + 1, at + 1):
                self._counts[:, entered % self._slices] = 0
        self._at = at
