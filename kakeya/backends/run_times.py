"""Times that generations of a model took, for estimates of the next ones.

longest_s    a whole generation: a long prompt and a long answer take longer, so only those count
             that had a prompt at most twice as long and asked for an answer at most twice as long
left_s       until all generations of some have ended: each gets the length at another quantile
             of past answers, so that they do not all end at once; tokens take as long as those
             that came last
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple

from kakeya.generation.answer_length import UNENDED, answer_tokens_left
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Usage
from kakeya.generation.request import DecodeRequest

KEPT_S = 3600.0
_KEPT = 128
_SPEEDS = 16
"""Of so many generations the speed counts."""


class _Run(NamedTuple):
    ended_mono: float
    prompt_tokens: int
    max_tokens: int
    seconds: float


class RunTimes:
    """The last generations of one model, an hour of them at most."""

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque(maxlen=_KEPT)
        self._lengths: deque[int] = deque(maxlen=_KEPT)
        self._decoded: deque[tuple[float, int]] = deque(maxlen=_SPEEDS)

    def add(self, request: DecodeRequest, usage: Usage, now: float) -> None:
        """Note what a whole generation took, from its begin to its last token."""
        run = _Run(now, len(request.token_ids), request.max_tokens, usage.total_s)
        self._runs.append(run)
        if made := usage.forwards + usage.accepted:
            tokens = made + 1  # the first one comes from the prompt
            self._lengths.append(tokens if tokens < request.max_tokens else UNENDED)
            self._decoded.append((usage.total_s - usage.prefill_s, made))

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

    def left_s(self, jobs: Sequence[Continuation], facts: ModelFacts, now: float) -> float | None:
        """Estimate the seconds until these have all ended, without what is left of their prompts.

        The speed that the model was measured at counts where no generation tells another; None =
        it has none either.
        """
        ends = [0] * facts.batch_rows  # in tokens from now
        for number, job in enumerate(sorted(jobs, key=lambda job: job.tokens)):
            quantile = (number + 0.5) / len(jobs)
            most = job.most_tokens(facts.context_tokens)
            left = answer_tokens_left(job.tokens, most, self._lengths, quantile)
            heapreplace(ends, ends[0] + left)
        token_s = self._token_s(jobs, now)
        if not token_s and facts.tokens_per_second:
            token_s = 1 / facts.tokens_per_second
        return max(ends) * token_s if token_s else None

    def _token_s(self, jobs: Sequence[Continuation], now: float) -> float:
        """Seconds of a token: of those that decode, else of the last generations; 0 = not known."""
        speeds = [speed for job in jobs if (speed := job.token_s(now)) is not None]
        if speeds:
            return sum(speeds) / len(speeds)
        tokens = sum(made for _, made in self._decoded)
        return sum(seconds for seconds, _ in self._decoded) / tokens if tokens else 0.0
