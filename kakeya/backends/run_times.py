"""Seconds that generations of a model took, for the estimate of the next one.

A long prompt and a long answer take longer: only generations count that had a prompt at most twice
as long and asked for an answer at most twice as long.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kakeya.generation.request import DecodeRequest

KEPT_S = 3600.0
_KEPT = 128


class _Run(NamedTuple):
    ended_mono: float
    prompt_tokens: int
    max_tokens: int
    seconds: float


class RunTimes:
    """The last generations of one model, an hour of them at most."""

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque(maxlen=_KEPT)

    def add(self, request: DecodeRequest, seconds: float, now: float) -> None:
        """Note what a whole generation took, from its begin to its last token."""
        self._runs.append(_Run(now, len(request.token_ids), request.max_tokens, seconds))

    def longest_s(self, request: DecodeRequest, now: float) -> float:
        """The longest of those that are alike, of so many their p99; 0 = there was none."""
        prompt, answer = 2 * len(request.token_ids), 2 * request.max_tokens
        alike = (
            run.seconds
            for run in self._runs
            if now - run.ended_mono <= KEPT_S
            and run.prompt_tokens <= prompt
            and run.max_tokens <= answer
        )
        return max(alike, default=0.0)
