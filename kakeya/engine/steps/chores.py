"""Chores of a model: checks and measurements in slices, for times when no request computes.

`Model.chores` yields before each slice the seconds for which the engine must have been idle. A
slice that waits for no idleness is a check: it is also done between rounds of several sequences,
which wait for its result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

from kakeya.core.log import event

_log = logging.getLogger(__name__)
LEAST_IDLE_S = 0.3
"""A request that waited for the load comes before the first slice."""


class Chores:
    """Belongs to the model thread."""

    __slots__ = ("_busy_s", "_idle_s", "_slices", "_timer")

    def __init__(self, slices: Iterator[float], timer: Callable[[], float]) -> None:
        self._slices = slices
        self._timer = timer
        self._busy_s = timer()
        self._idle_s = next(slices, math.inf)

    @property
    def is_urgent(self) -> bool:
        """Whether the next slice waits for no idleness."""
        return self._idle_s == 0

    def busy(self, now_s: float) -> None:
        """Note that requests were computed until now."""
        self._busy_s = now_s

    def wait_s(self, now_s: float) -> float | None:
        """Seconds of idleness until the next slice; None = there is none."""
        if self._idle_s == math.inf:
            return None
        return max(0.0, self._busy_s + max(self._idle_s, LEAST_IDLE_S) - now_s)

    def work(self) -> None:
        """Do a slice. A failure ends the chores: the engine serves without their findings."""
        try:
            self._idle_s = next(self._slices, math.inf)
        except Exception as failure:  # noqa: BLE001 - whatever a model does that is not known
            self._idle_s = math.inf
            event(_log, "a chore failed", level=logging.WARNING, error=repr(failure))
