"""How many prompts came to a model lately, and for how much of the time it had one to compute.

Nodes tell it in their quotes: what a long prompt costs depends on how soon others follow, and of
those that other nodes send, the node that decides knows nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WINDOW_S = 60.0
"""The time over which is measured; moments are monotonic seconds of one clock."""
LEAST_SPAN_S = 10.0
"""One prompt after a start is no rate yet."""


class RecentPrompts:
    """See the module."""

    def __init__(self, now: float) -> None:
        self._since_mono = now
        self._came: deque[float] = deque()
        self._busy: deque[tuple[float, float]] = deque()
        """From when to when there were prompts to compute, in order."""
        self._open = 0
        self._open_mono = 0.0

    def begin(self, now: float) -> None:
        """Note that a prompt came."""
        self._came.append(now)
        self._forget(now)
        if not self._open:
            self._open_mono = now
        self._open += 1

    def end(self, now: float) -> None:
        """Note that a prompt is computed, or was given up."""
        self._open -= 1
        if not self._open:
            self._busy.append((self._open_mono, now))
            self._forget(now)

    @contextmanager
    def prompt(self, mono: Callable[[], float]) -> Iterator[Callable[[], None]]:
        """Count a prompt, until what is yielded is called or the context ends."""
        is_open = True

        def computed() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self.end(mono())

        self.begin(mono())
        try:
            yield computed
        finally:
            computed()

    def per_s(self, now: float) -> float:
        """Prompts per second."""
        return sum(came >= now - WINDOW_S for came in self._came) / self._span_s(now)

    def busy_share(self, now: float) -> float:
        """The share of the time with a prompt to compute, 0..1."""
        since = now - WINDOW_S
        busy_s = sum(max(0.0, end - max(since, begin)) for begin, end in self._busy)
        if self._open:
            busy_s += now - max(since, self._open_mono)
        return min(1.0, busy_s / self._span_s(now))

    def _span_s(self, now: float) -> float:
        return min(WINDOW_S, max(LEAST_SPAN_S, now - self._since_mono))

    def _forget(self, now: float) -> None:
        while self._came and self._came[0] < now - WINDOW_S:
            self._came.popleft()
        while self._busy and self._busy[0][1] < now - WINDOW_S:
            self._busy.popleft()
