"""Times that generations of a model took, for estimates of the next ones.

longest_s    a whole generation: a long prompt and a long answer take longer, so only those count
             that had a prompt at most twice as long and asked for an answer at most twice as long
left_s       until all generations of some have ended: it is as likely as not, by the lengths of
             past answers, that the last of them ends earlier; tokens take less time as others end
token_times  how long a token takes beside others: a line through what the last generations and
             those that decode now have seen, and through the speed that the model was measured at
             alone, which weighs as much as one of them; time that went into prompts of others
             meanwhile is not counted
prefill_per_s  how many tokens of prompts are computed in a second in which any is, beside what else
             the engine does: a model that never was on a quiet machine has no other measurement
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

from kakeya.generation.answer_length import AnswerLengths
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Usage
from kakeya.generation.request import DecodeRequest

KEPT_S = 3600.0
_KEPT = 128
_SPEEDS = 16
"""Of so many generations the speed counts."""
_TOLD_PROMPT_TOKENS = 16
"""Shorter prompts tell of single steps."""
_CHANGED = 0.2
"""A speed within this share of the known one is that one: a card that changes goes to all nodes."""
_MOST_ROWS = 32
"""Of more generations some stand for all, since an estimate holds up the event loop."""
_PIECES = 8
"""Into so many the time until all have ended is cut, to add up how long tokens take."""


class _Run(NamedTuple):
    ended_mono: float
    prompt_tokens: int
    max_tokens: int
    seconds: float


class _PromptSpan(NamedTuple):
    """From the first piece of a prompt to the first token, in monotonic seconds."""

    began_mono: float
    ended_mono: float
    tokens: int


class DecodedSpan(NamedTuple):
    """A generation from its first token on, in monotonic seconds: the tokens after that one, and
    those of its prompt that were computed before."""

    began_mono: float
    ended_mono: float
    tokens: int
    prompt_tokens: int


class TokenTimes(NamedTuple):
    """Seconds of a token alone, and those that each further generation adds."""

    alone_s: float
    row_s: float

    def token_s(self, rows: float) -> float:
        """Seconds of a token of each of so many."""
        return self.alone_s + self.row_s * max(0.0, rows - 1)


class _Seen(NamedTuple):
    rows: float
    token_s: float
    weight: float


class _Row(NamedTuple):
    """A generation that begins so many tokens from now, has made some, and may have `most`."""

    begins: int
    made: int
    most: int


class RunTimes:
    """The last generations of one model, an hour of them at most."""

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque(maxlen=_KEPT)
        self._lengths = AnswerLengths()
        self._decoded: deque[DecodedSpan] = deque(maxlen=_KEPT)
        self._prompts: deque[_PromptSpan] = deque(maxlen=_SPEEDS)
        self.prefill_per_s = 0.0
        """Tokens; 0 = not known."""

    def add(self, request: DecodeRequest, usage: Usage, now: float) -> None:
        """Note what a whole generation took, from its begin to its last token."""
        run = _Run(now, len(request.token_ids), request.max_tokens, usage.total_s)
        self._runs.append(run)
        began_mono = now - (usage.total_s - usage.prefill_s)
        prompt_tokens = len(request.token_ids) - usage.cached_tokens
        if prompt_tokens >= _TOLD_PROMPT_TOKENS and usage.prefill_s > 0:
            span = _PromptSpan(began_mono - usage.prefill_s, began_mono, prompt_tokens)
            self._prompts.append(span)
            self._note_prefill()
        if made := usage.forwards + usage.accepted:
            tokens = made + 1  # the first one comes from the prompt
            self._lengths.add(tokens, is_whole=tokens < request.max_tokens)
            self._decoded.append(DecodedSpan(began_mono, now, made, prompt_tokens))

    def _note_prefill(self) -> None:
        busy_s, until_mono = 0.0, -math.inf
        for one in sorted(self._prompts):
            busy_s += max(0.0, one.ended_mono - max(one.began_mono, until_mono))
            until_mono = max(until_mono, one.ended_mono)
        if not busy_s:  # shorter than the clock tells
            return
        rate = sum(one.tokens for one in self._prompts) / busy_s
        if abs(rate - self.prefill_per_s) >= _CHANGED * self.prefill_per_s:
            self.prefill_per_s = round(rate, 1)

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

    def left_s(
        self, jobs: Sequence[Continuation], facts: ModelFacts, now: float, more: int = 0
    ) -> float | None:
        """Estimate the seconds until these have all ended, without what is left of their prompts,
        and so many more that are like the last ones, with their prompts.

        The speed that the model was measured at counts where no generation tells another; None =
        it has none either.
        """
        times = self._token_times(jobs, facts, now)
        if times is None:
            return None
        bounds = sorted(run.max_tokens for run in self._runs) or [facts.context_tokens]
        likely = (bounds[(2 * at + 1) * len(bounds) // (2 * more)] for at in range(more))
        rows = [_Row(0, job.tokens, job.most_tokens(facts.context_tokens)) for job in jobs]
        rows += [_Row(0, 0, most) for most in likely]
        some = sorted(rows, reverse=True)[:: math.ceil(max(1, len(rows)) / _MOST_ROWS)]
        stands_for = max(1, len(rows)) / max(1, len(some))
        placed = self._in_places(some, max(1, round(facts.batch_rows / stands_for)))
        each = self._ended_at(placed, stands_for) / _PIECES
        middles = ((piece + 0.5) * each for piece in range(_PIECES))
        going_on = (stands_for * sum(self._going_on(placed, at)) for at in middles)
        sharing = (min(facts.batch_rows, rows) for rows in going_on)
        return more * self._prompt_s(facts) + sum(each * times.token_s(one) for one in sharing)

    def _token_times(
        self, jobs: Sequence[Continuation], facts: ModelFacts, now: float
    ) -> TokenTimes | None:
        decoding = [
            DecodedSpan(now - seconds, now, job.tokens - 1, job.prompt_tokens)
            for job in jobs
            if (seconds := job.decoding_s(now)) is not None
        ]
        newest = min(_SPEEDS, len(self._decoded)) + len(decoding)
        return token_times([*self._decoded, *decoding], newest, facts)

    def _prompt_s(self, facts: ModelFacts) -> float:
        """Seconds of the mean prompt."""
        if not self._decoded or not facts.prefill_tokens_per_second:
            return 0.0
        tokens = sum(one.prompt_tokens for one in self._decoded) / len(self._decoded)
        return tokens / facts.prefill_tokens_per_second

    def _in_places(self, rows: Sequence[_Row], places: int) -> list[_Row]:
        """Let each generation begin that finds no place when the first one ends that has one."""
        ends, placed = [0] * places, []
        for row in rows:
            placed.append(row._replace(begins=ends[0]))
            if len(rows) > places:
                heapreplace(ends, ends[0] + self._ended_at([row], 1.0))
        return placed

    def _ended_at(self, rows: Sequence[_Row], stands_for: float) -> int:
        """The tokens from now after which all have ended, as likely as not, where each stands for
        so many."""
        return bisect_left(
            range(max((row.begins + row.most - row.made for row in rows), default=0)),
            0.5 ** (1 / stands_for),
            key=lambda at: math.prod(1 - going_on for going_on in self._going_on(rows, at)),
        )

    def _going_on(self, rows: Sequence[_Row], at: float) -> Iterator[float]:
        """The probability that each goes on so many tokens from now."""
        for begins, made, most in rows:
            yield 1.0 if at < begins else self._lengths.goes_on(made, most, at - begins)


def token_times(seen: Sequence[DecodedSpan], newest: int, facts: ModelFacts) -> TokenTimes | None:
    """Fit the line to the `newest` ones, which are the last of all those `seen`; None = nothing is
    known."""
    points = _points(seen, seen[len(seen) - newest :], facts)
    if facts.tokens_per_second:
        usual = sum(one.weight for one in points) / len(points) if points else 1.0
        points.append(_Seen(1.0, 1 / facts.tokens_per_second, usual))
    if not points:
        return None
    weights = sum(one.weight for one in points)
    rows = sum(one.rows * one.weight for one in points) / weights
    token_s = sum(one.token_s * one.weight for one in points) / weights
    spread = sum(one.weight * (one.rows - rows) ** 2 for one in points)
    slope = sum(one.weight * (one.rows - rows) * one.token_s for one in points)
    # At most in proportion: a token takes some time alone, too.
    row_s = min(max(0.0, slope / spread), token_s / rows) if spread > 0 else 0.0
    return TokenTimes(token_s - row_s * (rows - 1), row_s)


def _points(
    seen: Sequence[DecodedSpan], newest: Sequence[DecodedSpan], facts: ModelFacts
) -> list[_Seen]:
    rate = facts.prefill_tokens_per_second
    prompts = [(one.began_mono, one.prompt_tokens / rate if rate else 0.0) for one in seen]
    prompts_s = _steps(prompts)
    changes = [(one.began_mono, 1.0) for one in seen] + [(one.ended_mono, -1.0) for one in seen]
    rows_s = _integral(changes)
    points = []
    for one in newest:
        whole_s = one.ended_mono - one.began_mono
        own_s = whole_s - (prompts_s(one.ended_mono) - prompts_s(one.began_mono))
        if one.tokens > 0 and own_s > 0:
            rows = (rows_s(one.ended_mono) - rows_s(one.began_mono)) / whole_s
            points.append(_Seen(rows, own_s / one.tokens, float(one.tokens)))
    return points


def _steps(changes: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The sum of all changes up to a time."""
    ordered = sorted(changes)
    times = [at for at, _ in ordered]
    sums = [0.0, *accumulate(change for _, change in ordered)]
    return lambda at: sums[bisect_right(times, at)]


def _integral(changes: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The integral of that sum over time, up to a time."""
    rows, ordered = _steps(changes), sorted(at for at, _ in changes)
    areas = [0.0]
    for before, after in pairwise(ordered):
        areas.append(areas[-1] + rows(before) * (after - before))

    def area(at: float) -> float:
        place = bisect_right(ordered, at) - 1
        return areas[place] + rows(ordered[place]) * (at - ordered[place])

    return area
