"""When each warm prefix is to be looked after again, so that none goes unseen past its window.

    touched ---------------- due ------------- end of the window
       0                  0.8 window                 window

Theory: a sweep with a fixed period sees a prefix only at its own beats, so one that was touched
just after a beat may wait for two of them, longer than its window. Here every prefix has a deadline
of its own, and the sweep sleeps until the next one: only the waking may be late, for which a fifth
of the window is left. Pure: `now` is monotonic seconds.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from kakeya.generation.retention import Retention

STALE_FRACTION = 0.8
"""Of a window: how long a prefix stays unseen at most."""


@dataclass(slots=True)
class _Entry:
    retention: Retention
    due_mono: float
    end_mono: float
    order: int


class Deadlines:
    """The next look at each key. `keep_alive_s` bounds the pause of short-lived prefixes."""

    def __init__(self, keep_alive_s: float) -> None:
        self._keep_alive_s = keep_alive_s
        self._entries: dict[str, _Entry] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def pause_s(self, retention: Retention) -> float:
        """How long a prefix of this class stays unseen at most."""
        stale_s = STALE_FRACTION * retention.seconds
        return min(stale_s, self._keep_alive_s) if retention <= Retention.SHORT else stale_s

    def touched(
        self, key: str, retention: Retention, now: float, end_mono: float = math.inf
    ) -> None:
        """Note that a prefix was used or computed: its window begins anew. It is due at `end_mono`
        at the latest, since it is to be looked after no longer."""
        self._set(key, retention, now + self.pause_s(retention), end_mono)

    def used(self, key: str, now: float) -> None:
        """As `touched`, for a known key; other keys are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            self.touched(key, entry.retention, now, entry.end_mono)

    def postpone(self, key: str, until_mono: float) -> None:
        """Look again at that time: it could not be looked after now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._set(key, entry.retention, until_mono, entry.end_mono)

    def forget(self, key: str) -> None:
        """Look after it no more."""
        self._entries.pop(key, None)
        self._tidy()

    def due(self, now: float) -> tuple[str, ...]:
        """The keys to look after now, the longest overdue first. They stay due until they are
        touched, postponed or forgotten."""
        found = [
            (entry.due_mono, entry.order, key)
            for key, entry in self._entries.items()
            if entry.due_mono <= now
        ]
        return tuple(key for _, _, key in sorted(found))

    def next_due(self) -> float | None:
        """When the first one is due; None = nothing is looked after."""
        while self._heap:
            due_mono, order, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.order == order:
                return due_mono
            heapq.heappop(self._heap)
        return None

    def _set(self, key: str, retention: Retention, due_mono: float, end_mono: float) -> None:
        self._order += 1
        due_mono = min(due_mono, end_mono)
        self._entries[key] = _Entry(retention, due_mono, end_mono, self._order)
        heapq.heappush(self._heap, (due_mono, self._order, key))
        self._tidy()

    def _tidy(self) -> None:
        """Drop heap entries of keys that were touched anew, or are gone."""
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(e.due_mono, e.order, key) for key, e in self._entries.items()]
            heapq.heapify(self._heap)
