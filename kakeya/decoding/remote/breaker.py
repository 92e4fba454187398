"""When to stop asking a peer that fails, and when to try it again.

    CLOSED    calls pass; FAILURES in a row -> OPEN
    OPEN      nothing passes until the backoff is over; then one call passes -> TRYING
    TRYING    nothing else passes; success -> CLOSED, failure -> OPEN with twice the backoff

Pure but for the jitter of the backoff: methods take `now` in monotonic seconds.
"""

from __future__ import annotations

import random
from enum import StrEnum

FAILURES = 3
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
JITTER = 0.2
"""Share of the backoff, up or down: nodes that lost one peer do not return to it together."""


class BreakerState(StrEnum):
    """The state of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"


class CircuitBreaker:
    """The breaker of one peer."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures = 0
        self._backoff_s = FIRST_BACKOFF_S
        self.state = BreakerState.CLOSED
        self.retry_mono = 0.0

    def admit(self, now: float) -> bool:
        """Let a call pass, or not. A call that passed reports `succeeded` or `failed`."""
        if self.state is BreakerState.OPEN and now >= self.retry_mono:
            self.state = BreakerState.TRYING
            return True
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """The call was answered properly."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._backoff_s = FIRST_BACKOFF_S

    def failed(self, now: float) -> None:
        """The call was not answered, or not properly."""
        self._failures += 1
        if self.state is BreakerState.CLOSED and self._failures < FAILURES:
            return
        spread = 1.0 + JITTER * (2.0 * self._rng.random() - 1.0)
        self.state = BreakerState.OPEN
        self.retry_mono = now + self._backoff_s * spread
        self._backoff_s = min(2.0 * self._backoff_s, LONGEST_BACKOFF_S)

    def withdrawn(self) -> None:
        """The call was cancelled by its caller: it says nothing about the peer."""
        if self.state is BreakerState.TRYING:
            self.state = BreakerState.OPEN
