"""Plain steps of several sequences in one forward, and the time that such a forward takes.

The scheduler says in each round which sequences share it. Its time is measured over rounds in which
the same number of sequences did nothing else: the draft controller weighs blocks against that.

Where a shared forward fails, each sequence goes on alone at once. A sequence that fails alone too
caused it, and ends; if none does, they take turns for a while, at each failure in a row for twice
as long.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from kakeya.core.log import event
from kakeya.decoding.control.controller import DraftController
from kakeya.engine.model import Model
from kakeya.engine.queue.rows import QueueRow

_log = logging.getLogger(__name__)
TURNS_S = 1.0
"""So long sequences take turns after a forward of several failed."""
MOST_TURNS_S = 64.0
"""The longest such time: a forward that fails costs about as much as one that does not."""

LEAST_ROWS = 8
"""So many sequences run at the same time even where a step of them pays no more: each of a handful
of agents sees its answer come."""
PAYS = 1.1
"""Twice the rows are worth it if they give so many times the tokens per second; each token of an
answer comes later by them."""


def paying_rows(costs_s: Mapping[int, float], most: int) -> int:
    """The rows of a step, at most `most`, up to which more of them give more tokens per second.

    `costs_s` are seconds of a forward by its rows, at least of LEAST_ROWS; otherwise nothing speaks
    against `most`. Beyond the largest of them the last two say what a row adds.
    """
    known = sorted(costs_s)
    if len(known) < 2 or known[-1] < LEAST_ROWS:
        return most
    before, last = known[-2:]
    row_s = max(0.0, costs_s[last] - costs_s[before]) / (last - before)

    def cost_s(rows: int) -> float:
        return costs_s.get(rows, costs_s[last] + (rows - last) * row_s)

    rows = LEAST_ROWS
    while rows < most and cost_s(2 * rows) * PAYS <= 2 * cost_s(rows):
        rows *= 2
    return min(rows, most)


class SharedForwards:
    """Shared forwards of one model; belongs to the model thread.

    `last_rows` shared the last one: 0 = none was yet, 1 = it failed and sequences take turns.
    """

    def __init__(
        self, model: Model, controller: DraftController, timer: Callable[[], float]
    ) -> None:
        self.last_rows = 0
        self._model = model
        self._controller = controller
        self._timer = timer
        self._turns_s = TURNS_S
        self._together_at_s = -math.inf
        self._apart = 0
        self._rows = 0
        self._began_s = 0.0

    def share(self, decoding: int) -> None:
        """Begin a round in which so many sequences decode: as many would share a plain step."""
        rows = self._most_rows()
        self._controller.share(1 if rows == 1 else min(rows, decoding))

    def worked_apart(self) -> None:
        """Note that something else was computed in this round."""
        self._apart += 1

    def launch(
        self, rows: Sequence[QueueRow], *, has_company: bool
    ) -> list[tuple[QueueRow, Exception]]:
        """Launch the plain step of each row; returns those where it failed, with the reason."""
        failed: list[tuple[QueueRow, Exception]] = []
        size = self._most_rows()
        for start in range(0, len(rows), size):
            group = rows[start : start + size]
            problem = self._launch_together(group) if len(group) > 1 else None
            if len(group) > 1 and problem is None:
                continue
            faulty = self._launch_each(group, has_company=has_company)
            if problem is not None and not faulty:
                self._take_turns(len(group), problem)
            failed += faulty
        return failed

    def observe(self, rows: int) -> None:
        """Learn the time of a round in which so many rows shared forwards and did nothing else."""
        if rows < 2:
            self._rows = self._apart = 0
            return
        now_s = self._timer()
        if self._apart == 0 and rows == self._rows and rows <= self._most_rows():
            self._controller.observe_shared(rows, now_s - self._began_s)
        self._rows, self._began_s, self._apart = rows, now_s, 0

    def _most_rows(self) -> int:
        """The most rows that share a forward at this moment."""
        rows = max(1, self._model.facts.batch_rows)
        return rows if self._timer() >= self._together_at_s else 1

    def _take_turns(self, rows: int, problem: Exception) -> None:
        """Let sequences take turns: a forward of several failed, and none failed alone."""
        self.last_rows = 1
        self._together_at_s = self._timer() + self._turns_s
        event(
            _log,
            "sequences take turns for a while: a forward of several failed",
            level=logging.WARNING,
            rows=rows,
            seconds=self._turns_s,
            error=repr(problem),
        )
        self._turns_s = min(2 * self._turns_s, MOST_TURNS_S)

    def _launch_together(self, rows: Sequence[QueueRow]) -> Exception | None:
        """Launch one forward for all; returns its failure, after which each is as it was."""
        launches = [row.launch for row in rows if row.launch is not None]
        states = [launch.state for launch in launches]
        try:
            self._model.launch_together(states, [launch.token for launch in launches])
        except Exception as failure:  # noqa: BLE001 - each may still be able to go on alone
            return failure
        self._turns_s = TURNS_S
        for launch in launches:
            launch.is_shared = True
        self.last_rows = len(rows)
        return None

    def _launch_each(
        self, rows: Sequence[QueueRow], *, has_company: bool
    ) -> list[tuple[QueueRow, Exception]]:
        failed: list[tuple[QueueRow, Exception]] = []
        for row in rows:
            if row.launch is None:
                continue
            try:
                row.launch.alone()
            except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
                failed.append((row, failure))
            # Others take their turns before it is read: that is no measure of a plain step.
            row.launch.is_shared = has_company
        return failed
