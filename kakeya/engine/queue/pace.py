"""Pace of an engine: the time that prompts take, and how long a generation keeps its place.

The estimate begins with the probe of the model. Chunks that are computed correct it by one factor
on all of it, since the machine may be busy and adapters cost time. Pure: it reads no clock.
"""

from __future__ import annotations

from kakeya.engine.model import LoadedFacts
from kakeya.engine.queue.policy import ROUND_S

_WEIGHT = 0.2
"""Weight of the newest measurement in the mean."""
_STRETCH_S = 1.0
"""Seconds of chunks over which the time of steps between them is averaged."""
_SURPRISE = 4.0
"""A single measurement counts as at most this many times more or less than was expected."""
_ENDS_KNOWN = 4
"""The next end is unknown before so many generations ended."""


class Pace:
    """The pace of one model; belongs to the model thread."""

    def __init__(self, facts: LoadedFacts) -> None:
        self._probed = self._token_s = self._context_s = 0.0
        self._factor = self._stretch = 1.0
        self._round_s = self._stay_s = 0.0
        self._ends = 0
        self.learn(facts)

    def learn(self, facts: LoadedFacts) -> None:
        """Go by measured speeds, and begin anew where that of prompts is another one."""
        self._step_s = facts.forward_costs_s.get(1, 0.0)
        rate = facts.prefill_tokens_per_second
        if rate > 0 and (rate, facts.prefill_context_s) != (self._probed, self._context_s):
            self._probed, self._context_s = rate, facts.prefill_context_s
            self._token_s, self._factor = 1 / rate, 1.0

    @property
    def stretch(self) -> float:
        """Factor by which steps between the chunks of a prompt lengthen it; 1 = not at all."""
        return self._stretch

    @property
    def step_s(self) -> float:
        """Seconds that a token of an answer takes, alone."""
        return self._factor * self._step_s

    @property
    def round_s(self) -> float:
        """Seconds of a round of steps of all that decode; before one was measured, of a step."""
        return self._round_s or self.step_s

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds to compute the tokens `start <= position < end` of a prompt."""
        return self._factor * self._probed_s(start, end)

    def place_every_s(self, places: int) -> float:
        """Seconds until one of so many taken places falls vacant; 0 = unknown."""
        return self._stay_s / places if self._ends >= _ENDS_KNOWN else 0.0

    def computed(self, tokens: int, expected_s: float, seconds: float) -> None:
        """Learn the time that a forward over one prompt took, by that which was expected of it."""
        if self._token_s == 0:
            self._token_s = seconds / tokens  # the probe waits for a machine that is idle
        elif expected_s > 0 and seconds > 0:
            surprise = min(max(seconds / expected_s, 1 / _SURPRISE), _SURPRISE)
            self._factor *= 1 + _WEIGHT * (surprise - 1)

    def interleaved(self, chunk_s: float, steps_s: float) -> None:
        """Learn that steps took `steps_s` between two chunks of `chunk_s`."""
        if chunk_s > 0:
            # By seconds: several chunks follow each other between two steps.
            weight = min(1.0, chunk_s / _STRETCH_S)
            change = weight * (1 + steps_s / chunk_s - self._stretch)
            self._stretch += min(change, (_SURPRISE - 1) * self._stretch)

    def stepped(self, seconds: float) -> None:
        """Learn how long a round of steps took."""
        counted_s = min(seconds, _SURPRISE * max(self._round_s, ROUND_S))
        # By seconds: a round in which rows only ended says nothing.
        weight = min(1.0, counted_s / _STRETCH_S) if self._round_s else 1.0
        self._round_s += weight * (counted_s - self._round_s)

    def ended(self, stay_s: float) -> None:
        """Learn how long a generation had its place."""
        self._ends += 1
        self._stay_s += (stay_s - self._stay_s) * max(_WEIGHT, 1 / self._ends)

    def _probed_s(self, start: int, end: int) -> float:
        tokens = max(0, end - start)
        return tokens * (self._token_s + self._context_s * (start + end) / 2)
