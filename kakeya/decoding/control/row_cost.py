"""The cost of a forward by its number of rows: measured where it was run, estimated elsewhere.

seconds(rows) = speed * shape(rows). A measurement that differs from the estimate is mostly put
down to `speed`, which all row counts share (the machine is busy, the context has grown), and a
little to the shape at that row count. So a plain decode that slows down does not make blocks look
cheap, though no block was measured for a while.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from kakeya.core.errors import InvalidArgument

TO_SPEED = 0.15
"""Share of a surprise that changes the common speed."""
TO_SHAPE = 0.08
"""Share of a surprise that changes the shape at the measured row count."""
SURPRISE = 2.0
"""A single measurement counts as at most this many times more or less than was expected."""
STALE = 0.01
"""The table is made anew when a node of the shape moved by this share."""
_UNKNOWN_SHAPE = {1: 1.0, 2: 1.5, 4: 2.0, 8: 3.0, 16: 5.0}
"""Before any sweep: dearer than on most machines, so that drafts must be good."""


class RowCosts:
    """Tv(rows) for 1..max_rows, in seconds; never falling with the rows."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._speed = 1.0
        self._measured = False
        self._nodes = dict(_UNKNOWN_SHAPE)
        self._tabled: dict[int, float] = {}
        self._tabled_speed = 0.0
        self._table: tuple[float, ...] = ()
        self._tabulate()

    def seed(self, seconds_by_rows: Mapping[int, float]) -> None:
        """Replace all measurements by a sweep. Raises InvalidArgument without a positive row 1."""
        if seconds_by_rows.get(1, 0.0) <= 0 or min(seconds_by_rows) < 1:
            raise InvalidArgument(
                f"row costs {dict(seconds_by_rows)} need positive seconds for 1 row and up"
            )
        self._speed = seconds_by_rows[1]
        self._measured = True
        self._nodes = {rows: seconds / self._speed for rows, seconds in seconds_by_rows.items()}
        self._tabulate()

    def observe(self, rows: int, seconds: float) -> None:
        """Take one measurement in."""
        if seconds <= 0 or rows < 1:
            return
        if not self._measured:
            self._speed = seconds / _shape(self._nodes, rows)
            self._measured = True
            self._tabulate()
            return
        shape = _shape(self._nodes, rows)
        surprise = min(max(seconds / (self._speed * shape), 1 / SURPRISE), SURPRISE) - 1.0
        self._speed *= 1.0 + TO_SPEED * surprise
        node = shape * (1.0 + TO_SHAPE * surprise)
        self._nodes[rows] = node
        moved = abs(node - self._tabled.get(rows, 0.0)) > STALE * node
        if moved or abs(self._speed - self._tabled_speed) > STALE * self._speed:
            self._tabulate()

    def seconds(self, rows: int) -> float:
        """Tv(rows)."""
        if rows == 1:  # asked at each step, the table only where there is a draft
            return self._tabled_speed * self._tabled[1]
        return self.table()[min(rows, self._max_rows) - 1]

    def table(self) -> tuple[float, ...]:
        """Tv(1), Tv(2), ... up to max_rows."""
        if not self._table:
            table: list[float] = []
            highest = 0.0
            for rows in range(1, self._max_rows + 1):
                highest = max(highest, self._tabled_speed * _shape(self._tabled, rows))
                table.append(highest)
            self._table = tuple(table)
        return self._table

    def _tabulate(self) -> None:
        """Drop the table; it is made anew from the measurements when it is asked for."""
        self._tabled = dict(self._nodes)
        self._tabled_speed = self._speed
        self._table = ()


def _shape(nodes: Mapping[int, float], rows: int) -> float:
    known = nodes.get(rows)
    return known if known is not None else _between(nodes, rows)


def _between(nodes: Mapping[int, float], rows: int) -> float:
    """Straight lines between the nodes; beyond the last one, its last slope goes on."""
    known = sorted(nodes)
    if len(known) == 1:
        return nodes[known[0]] * (1.0 + 0.5 * max(0, rows - known[0]))
    at = min(max(bisect_left(known, rows), 1), len(known) - 1)
    low, high = known[at - 1], known[at]
    slope = (nodes[high] - nodes[low]) / (high - low)
    return nodes[low] + slope * (rows - low)
