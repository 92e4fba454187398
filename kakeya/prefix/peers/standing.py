"""Whether a peer is asked, by the record of its streams.

A peer that lies is left alone for long, a peer that fails for a moment:

    lied      it contradicted itself or the protocol: at once, and for long
    failed    it was late, silent or gone in the middle, or had nothing of what its card names:
              after some in a row, for a moment
    sent      all came that was asked for, as it should

A good answer to a lookup counts for nothing: a peer that lies answers well. Pure; times are
monotonic seconds.
"""

from __future__ import annotations

LIE_S = 600.0
LONGEST_LIE_S = 24 * 3600.0
FAILURES = 3
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0


class PeerRecord:
    """The faults of one peer."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._lie_s = LIE_S
        self._until_mono = float("-inf")

    def may_be_asked(self, now: float) -> bool:
        """Whether its last faults are long enough ago."""
        return now >= self._until_mono

    def lied(self, now: float) -> float:
        """Note a lie; returns for how many seconds it is not asked."""
        pause_s = self._lie_s
        self._until_mono = max(self._until_mono, now + pause_s)
        self._lie_s = min(2 * self._lie_s, LONGEST_LIE_S)
        return pause_s

    def failed(self, now: float) -> None:
        """Note that it did not bring the promised blocks."""
        self._failures += 1
        if self._failures >= FAILURES:
            self._until_mono = max(self._until_mono, now + self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def sent(self) -> None:
        """Note that it brought the promised blocks; lies are not forgotten for it."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
