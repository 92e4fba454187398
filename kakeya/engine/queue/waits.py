"""Tells generations that wait their place in the queue, and when the first token is expected."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from kakeya.engine.queue.estimate import (
    MOST_BUSY,
    Arrivals,
    PlaceWork,
    first_tokens_s,
    service_order,
    tokens_left,
)
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import INPUT_WEIGHT, OUTPUT_WEIGHT, SPECULATIVE
from kakeya.engine.queue.rows import QueueRow
from kakeya.generation.answer_length import UNENDED
from kakeya.generation.frames import Done, QueuePlace, StopReason

TELL_S = 1.0
"""Between two times that all are told."""
_SPARE = 100
"""Telling takes at most such a part of the time."""
_KEPT = 64
"""Lengths of past answers."""
_SPEED_S = 15.0
"""Over about such a time the speed of decoding is measured: long enough for other programs of the
machine to come and go, short enough for the estimate to follow a change of rows."""


class QueueWaits:
    """Belongs to the model thread. `pace` is that of the engine; `prompts_s` returns the seconds
    spent on prompts so far."""

    def __init__(self, pace: Pace, prompts_s: Callable[[], float]) -> None:
        self._prompts_s = prompts_s
        self._pace = pace
        self._past: deque[int] = deque(maxlen=_KEPT)
        self._arrivals = Arrivals()
        self._step_s = self._seconds = self._tokens_made = self._measured_s = 0.0
        self._places = 1
        self._next_s = 0.0

    def tell(
        self,
        waiting: Sequence[QueueRow],
        running: Sequence[QueueRow],
        now_s: float,
        timer: Callable[[], float],
    ) -> None:
        """Tell all that wait their places."""
        began_s = timer()
        self._tell_all(waiting, running, now_s)
        self._next_s = now_s + max(TELL_S, _SPARE * (timer() - began_s))

    def _tell_all(
        self, waiting: Sequence[QueueRow], running: Sequence[QueueRow], now_s: float
    ) -> None:
        asked = [row for row in waiting if row.priority != SPECULATIVE]
        if not asked or not running:
            return
        self._places = len(running)
        self._measure(running, now_s)
        order = service_order(asked, self._weighted_tokens)
        found = first_tokens_s([*map(self._work, running)], [*map(self._work, order)], self._step_s)
        for place, (row, seconds) in enumerate(zip(order, found, strict=True), 1):
            if not row.has_first_token:
                busy = self._arrivals.more_urgent(row.priority, now_s)
                self._tell_one(row, place, seconds / (1.0 - min(busy, MOST_BUSY)), now_s)

    def is_due(self, waiting: Sequence[QueueRow], now_s: float) -> bool:
        """Whether some generation is to be told its place."""
        return now_s >= self._next_s and bool(waiting)

    def placed(self, row: QueueRow, now_s: float) -> None:
        """Tell a generation that waited that it has its place."""
        row.mark_s, row.mark_tokens = self._decoding_s(now_s), row.made
        if row.has_first_token:
            return
        self._arrivals.add(row.priority, self._share_s(row), now_s)
        if row.told_s:
            seconds = self._work(row).prompt_s + self._step_s
            row.ticket.on_frame(QueuePlace(position=0, seconds=seconds))

    def begun(self, row: QueueRow, now_s: float) -> None:
        """Note the first token of a generation."""
        row.mark_s, row.mark_tokens = self._decoding_s(now_s), row.made

    def ended(self, row: QueueRow, done: Done) -> None:
        """Learn the length of an answer."""
        is_whole = done.reason is StopReason.STOP_TOKEN
        self._past.append(row.made if is_whole else UNENDED)

    def _tell_one(self, row: QueueRow, place: int, seconds: float, now_s: float) -> None:
        if not row.told_s:
            row.told_s, row.told_at_s = seconds, now_s
        row.ticket.on_frame(QueuePlace(position=place, seconds=seconds))

    def _decoding_s(self, now_s: float) -> float:
        """A clock that stands while prompts are computed."""
        return now_s - self._prompts_s()

    def _measure(self, running: Sequence[QueueRow], now_s: float) -> None:
        """Take the mean time of a token, over the last seconds of all that decode."""
        kept = math.exp(-max(0.0, now_s - self._measured_s) / _SPEED_S)
        self._measured_s = now_s
        now_s = self._decoding_s(now_s)
        self._seconds, self._tokens_made = self._seconds * kept, self._tokens_made * kept
        for row in running:
            if row.has_first_token and row.made > row.mark_tokens:
                self._seconds += now_s - row.mark_s
                self._tokens_made += row.made - row.mark_tokens
                row.mark_s, row.mark_tokens = now_s, row.made
        if self._tokens_made:
            self._step_s = self._seconds / self._tokens_made
        elif not self._step_s:
            self._step_s = self._pace.step_s

    def _share_s(self, row: QueueRow) -> float:
        """Seconds of the engine that a generation takes from the others."""
        work = self._work(row)
        return work.prompt_s + work.tokens * self._step_s / self._places

    def _tokens(self, row: QueueRow) -> int:
        return tokens_left(row.made, row.ticket.job.max_tokens, self._past, row.number)

    def _weighted_tokens(self, row: QueueRow) -> int:
        return INPUT_WEIGHT * row.prompt_left + OUTPUT_WEIGHT * self._tokens(row)

    def _work(self, row: QueueRow) -> PlaceWork:
        last = len(row.ticket.job.token_ids) - 1
        prompt_s = self._pace.prefill_s(min(row.length, last), last)
        return PlaceWork(prompt_s, self._tokens(row))
