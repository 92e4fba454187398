"""The model thread: sequences take turns on one model, and share the forwards that they can share.

Everything that touches the model runs here, on one thread: sequences, drafts for peers and
questions (between steps, first come first served). In a round each sequence has one turn: a chunk
of its prompt, or a block with drafts, in a forward of its own; those that are to take a plain step
take it together at the end of the round. Who joins or leaves changes nothing for the others.

Other threads hand in work through a queue and get frames through a callback. A cancelled sequence
ends before its next step, also during prefill. A fault ends the sequence that it happened in,
never the thread. Sequences enter as far as their KV fits the bound; when those that run outgrow
it, or the memory limit, the youngest ends (see `room` and `limits`).
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

from kakeya.core.errors import InvariantBroken, KakeyaError, MemoryRefused
from kakeya.core.log import event
from kakeya.engine.job import DecodeJob, EngineFrame
from kakeya.engine.limits import Limits
from kakeya.engine.model import Model
from kakeya.engine.sequence import Launch, SequenceRun, SequenceTools, Step

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_TIDY_EVERY_UNITS = 512


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
    """How busy the thread is. `batch_rows` were in the last shared forward, 0 = none was yet."""

    running: int
    waiting: int
    batch_rows: int = 0


@dataclass(slots=True, eq=False)
class _Row:
    """A running sequence; `launch` is a plain step that is due and waits for the others'."""

    ticket: Ticket
    run: SequenceRun
    steps: Iterator[Step]
    launch: Launch | None = None
    is_over: bool = False


class Scheduler:
    """Owns the running sequences. Construct anywhere; `run` is the thread's body."""

    def __init__(
        self,
        model: Model,
        tools: SequenceTools,
        *,
        max_running: int,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits(model, tools.slots)
        self._room = self.limits.room
        self._model = model
        self._tools = tools
        self._max_running = max_running
        self._inbox: queue.SimpleQueue[Ticket | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._running: list[_Row] = []
        self._turns: deque[_Row] = deque()
        self._batch_rows = max(1, model.facts.batch_rows)
        self._last_rows = 0
        self._units = 0
        self._alone = 0
        self._round_rows = 0
        self._round_began_s = 0.0
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
        return Load(
            running=len(self._running), waiting=len(self._waiting), batch_rows=self._last_rows
        )

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
        for row in list(self._running):
            self._end(row)

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
            ticket = self._waiting[0]
            try:
                # Nobody overtakes who waits for room: a long prompt would never get its turn.
                if not ticket.cancelled and not self._room.admits(ticket.job):
                    return
            except MemoryRefused as refusal:
                self._waiting.popleft()
                ticket.on_error(refusal)
                continue
            self._waiting.popleft()
            if not ticket.cancelled:
                self._begin(ticket)

    def _begin(self, ticket: Ticket) -> None:
        try:
            run = SequenceRun(self._model, self._tools, ticket.job)
        except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
            ticket.on_error(_as_kakeya_error(failure))
            return
        self._room.enter(ticket, ticket.job)
        self._running.append(_Row(ticket, run, run.steps()))

    def _turn(self) -> None:
        """One unit of work: the step of the row whose turn it is, or the forward that all share.

        Each row has one turn a round. A plain step that is due waits for the end of the round.
        """
        self._units += 1
        if self._units % _TIDY_EVERY_UNITS == 0:
            self._model.tidy()
        if not self._turns:
            self._turns.extend(self._running)
            self._tools.controller.share(self._sharers())
        row = self._turns.popleft()
        if row.launch is None:
            self._advance(row)
            self._alone += row.launch is None
        if not self._turns:
            self._launch([row for row in self._running if row.launch is not None])
        # Once a unit: what an ended row held is free when nothing here refers to the row any more.
        if not self.limits.holds():
            self._end_youngest()

    def _advance(self, row: _Row) -> None:
        """Go on with a row up to its next frame, or to the plain step that it wants launched."""
        if row.ticket.cancelled:
            self._end(row)
            return
        try:
            step = next(row.steps, None)
        except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
            self._abandon(row, _as_kakeya_error(failure))
            return
        if step is None:
            self._end(row)
        elif isinstance(step, Launch):
            row.launch = step
        else:
            row.ticket.on_frame(step)
            if not self._room.grown(row.ticket, row.run.length):
                self._end_youngest()

    def _launch(self, rows: list[_Row]) -> None:
        """Launch the plain steps that are due, together where that can be, and go on with each."""
        size = self._batch_rows
        for start in range(0, len(rows), size):
            group = rows[start : start + size]
            for row in [row for row in group if row.ticket.cancelled]:
                self._end(row)
                group.remove(row)
            if len(group) < 2 or not self._launch_together(group):
                self._launch_each(group)
        for row in rows:
            if not row.is_over:
                row.launch = None
                self._advance(row)
        self._observe(len(rows))

    def _launch_together(self, rows: list[_Row]) -> bool:
        """One forward for all; False, and each as it was, where that failed."""
        launches = [row.launch for row in rows if row.launch is not None]
        states = [launch.state for launch in launches]
        try:
            self._model.launch_together(states, [launch.token for launch in launches])
        except Exception as failure:  # noqa: BLE001 - each may still be able to go on alone
            self._batch_rows = 1
            event(
                _log,
                "sequences take turns from now on: a forward of several failed",
                level=logging.WARNING,
                rows=len(rows),
                error=repr(failure),
            )
            return False
        for launch in launches:
            launch.is_shared = True
        self._last_rows = len(rows)
        return True

    def _launch_each(self, rows: list[_Row]) -> None:
        for row in rows:
            try:
                if row.launch is not None:
                    row.launch.alone()
            except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
                self._abandon(row, _as_kakeya_error(failure))

    def _sharers(self) -> int:
        """How many rows would share a plain step now."""
        if self._batch_rows == 1 or len(self._running) == 1:
            return 1
        return min(self._batch_rows, sum(row.run.is_decoding for row in self._running))

    def _observe(self, rows: int) -> None:
        """Learn what a round took in which nothing but a shared forward was done."""
        if rows < 2:
            self._round_rows = self._alone = 0
            return
        now = self._tools.timer()
        if self._alone == 0 and rows == self._round_rows and rows <= self._batch_rows:
            self._tools.controller.observe_shared(rows, now - self._round_began_s)
        self._round_rows, self._round_began_s, self._alone = rows, now, 0

    def _end_youngest(self) -> None:
        """Take back what the sequence that entered last holds; the others go on."""
        youngest = self._room.youngest()
        for row in self._running:
            if row.ticket is youngest:
                has_company = len(self._running) > 1
                self._abandon(row, self.limits.refusal(has_company=has_company))
                return

    def _abandon(self, row: _Row, failure: KakeyaError) -> None:
        """End a sequence without keeping its KV: nobody knows what it holds, or its room is due."""
        self._leave(row)
        row.run.abandon()
        row.ticket.on_error(failure)

    def _end(self, row: _Row) -> None:
        self._leave(row)
        try:
            row.run.finish()
        except Exception as failure:  # noqa: BLE001 - KV that cannot be kept is only speed
            event(_log, "kv dropped", level=logging.WARNING, error=repr(failure))

    def _leave(self, row: _Row) -> None:
        row.is_over, row.launch = True, None
        if row in self._running:
            self._running.remove(row)
        if row in self._turns:
            self._turns.remove(row)
        self._room.leave(row.ticket)


def _as_kakeya_error(failure: Exception) -> KakeyaError:
    if isinstance(failure, KakeyaError):
        return failure
    _log.error("a step failed", exc_info=failure)
    return InvariantBroken("engine_step", repr(failure))
