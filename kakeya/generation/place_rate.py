"""How soon places become free where all are taken, and when a refused caller may come again.

A caller that is refused is told the time at which a place is expected to be free for it: so many
places later as callers were told before it. So they come back one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

LEAST_S = 1.0
"""The shortest time to come again in, and that before any place became free."""
MOST_S = 60.0
"""The longest: a place may become free sooner than the last ones did."""
_KEPT = 32
"""Places that became free, over which the rate is measured."""


class PlaceRate:
    """The rate of one bound; `mono` is a monotonic clock, in seconds."""

    def __init__(self, mono: Callable[[], float]) -> None:
        self._mono = mono
        self._freed: deque[float] = deque(maxlen=_KEPT)
        self._told_mono = 0.0
        self._full_mono: float | None = None
        """Since when all places have been taken; None = not all are."""

    def full(self) -> None:
        """Note that all places are taken."""
        if self._full_mono is None:
            self._full_mono = self._mono()

    def freed(self, *, is_full: bool) -> None:
        """Note that a place becomes free; `is_full` = all were taken until then, or still are."""
        if is_full:
            self._freed.append(self._mono())
        else:
            self._freed.clear()
            self._full_mono = None

    def retry_after_s(self) -> float:
        """Give a refused caller its time to come again, later than that of the one before."""
        now = self._mono()
        self.full()
        if not self._freed or self._full_mono is None:
            return LEAST_S
        since = self._full_mono if len(self._freed) < _KEPT else self._freed[0]
        every_s = (now - since) / len(self._freed)
        self._told_mono = min(max(self._told_mono, now) + every_s, now + MOST_S)
        return min(max(LEAST_S, self._told_mono - now), MOST_S)
