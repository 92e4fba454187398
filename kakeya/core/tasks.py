"""Background work that cannot fail unseen: a supervised group and a jittered period.

A task that raises is logged, counted and started again after a backoff; it ends only when it
returns or the group closes. `health()` is what metrics and status show.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from kakeya.core.clock import Clock
from kakeya.core.log import event

_log = logging.getLogger(__name__)
RESTART_BACKOFF_S = (0.1, 0.5, 2.0, 10.0, 30.0)
"""Seconds before the 1st, 2nd, ... restart in a row; the last value repeats. A task that ran for
longer than the last value has recovered: its next failure is the first of a new row."""


@dataclass(slots=True)
class TaskHealth:
    """The history of a supervised task."""

    name: str
    running: bool = True
    failures: int = 0
    last_error: str = ""


def is_cancelled() -> bool:
    """Whether the current task was asked to end.

    An awaited object may raise CancelledError although the task goes on: a gRPC call on a
    closed channel, or another task that was cancelled.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Supervisor:
    """Named background tasks, in an `async with` that cancels them at its end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], TaskHealth] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def start(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work()` until it returns; restart it when it raises."""
        health = TaskHealth(name)
        task = asyncio.get_running_loop().create_task(self._guard(health, work), name=name)
        self._tasks[task] = health
        task.add_done_callback(lambda done: setattr(self._tasks[done], "running", False))

    def health(self) -> tuple[TaskHealth, ...]:
        """List every task that was started, in order."""
        return tuple(self._tasks.values())

    async def aclose(self) -> None:
        """Cancel all tasks and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guard(self, health: TaskHealth, work: Callable[[], Awaitable[None]]) -> None:
        in_a_row = 0
        while True:
            began_mono = self._clock.mono()
            try:
                await work()
            except (Exception, asyncio.CancelledError) as failure:
                if is_cancelled():
                    if not isinstance(failure, asyncio.CancelledError):
                        _note_failure(health, failure, "a background task ended badly")
                    raise
                if self._clock.mono() - began_mono > RESTART_BACKOFF_S[-1]:
                    in_a_row = 0
                backoff = RESTART_BACKOFF_S[min(in_a_row, len(RESTART_BACKOFF_S) - 1)]
                in_a_row += 1
                _note_failure(health, failure, "background task failed", restart_in_s=backoff)
                _log.debug("traceback", exc_info=failure)
                await self._clock.sleep(backoff)
            else:
                return


def _note_failure(health: TaskHealth, failure: BaseException, what: str, **more: float) -> None:
    health.failures += 1
    health.last_error = repr(failure)
    event(_log, what, level=logging.ERROR, task=health.name, error=repr(failure), **more)


async def every(
    interval_s: float,
    work: Callable[[], Awaitable[None]],
    *,
    clock: Clock,
    rng: random.Random,
    jitter: float = 0.1,
    wake: asyncio.Event | None = None,
    is_shared: bool = False,
) -> None:
    """Run `work` at once and then each `interval_s` +- `jitter`; `wake` starts the next run early.

    The interval lies between two starts, so that slow runs are not rarer than quick ones. With
    `is_shared` the runs share their moments with others, in place of the jitter: see
    `shared_pause_s`.
    """
    while True:
        if wake is not None:
            wake.clear()
        began_mono = clock.mono()
        await work()
        now = clock.mono()
        if is_shared:
            pause = shared_pause_s(interval_s, now)
        else:
            drawn_s = interval_s * (1 + jitter * (2 * rng.random() - 1))
            pause = max(0.0, drawn_s - (now - began_mono))
        await clock.sleep(pause, wake)


def shared_pause_s(interval_s: float, mono: float) -> float:
    """The pause until the next look of one that looks each `interval_s`, by the monotonic clock.

    It ends at a multiple of the largest power of two within the interval: half an interval sooner
    or later at most. So looks that need no exact time wake a sleeping processor together.
    """
    if interval_s <= 0:
        return 0.0
    step_s = 2.0 ** math.floor(math.log2(interval_s))
    return round((mono + interval_s) / step_s) * step_s - mono
