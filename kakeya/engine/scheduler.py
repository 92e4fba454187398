"""The model thread: sequences take turns on one model, a step each.

Everything that touches the model runs here, on one thread: sequences (round robin), drafts for
peers and questions (between steps, first come first served). Other threads hand in work through
a queue and get frames through a callback. A cancelled sequence ends before its next step, also
during prefill. A fault ends the sequence that it happened in, never the thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from kakeya.core.errors import InvariantBroken, KakeyaError
from kakeya.core.log import event
from kakeya.engine.job import DecodeJob, EngineFrame
from kakeya.engine.model import Model
from kakeya.engine.sequence import SequenceRun, SequenceTools

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_TIDY_EVERY_STEPS = 512


@dataclass(slots=True, eq=False)
class Ticket:
    """One submitted generation. `cancel` may be called from any thread."""

    job: DecodeJob
    on_frame: Callable[[EngineFrame], None]
    on_error: Callable[[KakeyaError], None]
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """End it before its next step; what it committed stays in its KV."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether somebody gave it up."""
        return self._cancelled.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the thread is."""

    running: int
    waiting: int


class Scheduler:
    """Owns the running sequences. Construct anywhere; `run` is the thread's body."""

    def __init__(self, model: Model, tools: SequenceTools, *, max_running: int) -> None:
        self._model = model
        self._tools = tools
        self._max_running = max_running
        self._inbox: queue.SimpleQueue[Ticket | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._running: deque[tuple[Ticket, SequenceRun, Iterator[EngineFrame]]] = deque()
        self._steps = 0
        self._began_s: float | None = None

    def submit(self, ticket: Ticket) -> None:
        """Queue a generation; thread-safe."""
        self._inbox.put(ticket)

    def call(self, work: Callable[[], _Answer]) -> Future[_Answer]:
        """Run `work` on the model thread between two steps; thread-safe."""
        answer: Future[_Answer] = Future()

        def perform() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except Exception as failure:  # noqa: BLE001 - handed to the caller
                answer.set_exception(failure)

        self._inbox.put(perform)
        return answer

    def stop(self) -> None:
        """Make `run` return after the current step; thread-safe."""
        self._inbox.put(None)

    def load(self) -> Load:
        """How many sequences run and wait; read on the model thread."""
        return Load(running=len(self._running), waiting=len(self._waiting))

    def silent_s(self) -> float:
        """How long the thread has been at one piece of work; 0 while it has none. Thread-safe."""
        began_s = self._began_s
        return 0.0 if began_s is None else max(0.0, self._tools.timer() - began_s)

    def run(self) -> None:
        """Work until `stop`."""
        while self._accept():
            self._admit()
            if self._running:
                self._turn()
        for ticket, run, _ in self._running:
            self._end(ticket, run)

    def _accept(self) -> bool:
        """Take everything from the inbox; wait for it only when there is nothing to run."""
        idle = not self._running and not self._waiting
        while True:
            self._began_s = None if idle else self._tools.timer()
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            self._began_s = self._tools.timer()
            idle = False
            if item is None:
                return False
            if isinstance(item, Ticket):
                self._waiting.append(item)
            else:
                item()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            ticket = self._waiting.popleft()
            if ticket.cancelled:
                continue
            try:
                run = SequenceRun(self._model, self._tools, ticket.job)
            except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
                ticket.on_error(_as_kakeya_error(failure))
                continue
            self._running.append((ticket, run, run.frames()))

    def _turn(self) -> None:
        """One unit of work for the sequence whose turn it is."""
        ticket, run, frames = self._running.popleft()
        if ticket.cancelled:
            self._end(ticket, run)
            return
        try:
            frame = next(frames, None)
        except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
            # After a fault nobody knows what the KV holds, so it is not kept.
            run.abandon()
            ticket.on_error(_as_kakeya_error(failure))
            return
        self._steps += 1
        if self._steps % _TIDY_EVERY_STEPS == 0:
            self._model.tidy()
        if frame is None:
            self._end(ticket, run)
            return
        self._running.append((ticket, run, frames))
        ticket.on_frame(frame)

    def _end(self, ticket: Ticket, run: SequenceRun) -> None:
        try:
            run.finish()
        except Exception as failure:  # noqa: BLE001 - KV that cannot be kept is only speed
            event(_log, "kv dropped", level=logging.WARNING, error=repr(failure))


def _as_kakeya_error(failure: Exception) -> KakeyaError:
    if isinstance(failure, KakeyaError):
        return failure
    _log.error("a step failed", exc_info=failure)
    return InvariantBroken("engine_step", repr(failure))
