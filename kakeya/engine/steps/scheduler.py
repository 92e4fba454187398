"""The model thread: sequences take turns on one model, and share the forwards that they can share.

Everything that touches the model runs here, on one thread: sequences, drafts for peers and
questions (between steps, first come first served). In a round each decoding sequence has one turn:
a block with drafts, in a forward of its own, or a plain step; all plain steps are launched together
at the end. Then a chunk of prompts is computed, a few layers of a piece, or as many chunks as fit
the time that decoding sequences can wait; while none decodes, one after the other. A sequence that
joins or leaves changes no token of the others.

`policy` says which sequence gets a place, which chunk is next and which sequence is parked for
another; `queue` holds those that wait. A sequence is parked between two of its steps: its KV stays
as long as there is room, then lies in pages (see `parking`), and it goes on from there.

Other threads hand in work through an inbox and get frames through a callback. A cancelled sequence
ends before its next step. A fault ends the sequence that it happened in, never the thread. When
running sequences outgrow the KV bound, or the memory limit, none computes until the weakest is
parked (see `room`, `limits`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kakeya.core.errors import InvariantBroken, KakeyaError
from kakeya.core.log import event
from kakeya.engine.inbox import Inbox
from kakeya.engine.kv.parking import Parking
from kakeya.engine.limits import EngineLimits
from kakeya.engine.model import Model
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import OUTPUT_WEIGHT, ROUND_S, weakest
from kakeya.engine.queue.queue import EngineQueue
from kakeya.engine.queue.rows import Admitted, EngineLoad, QueueRow, QueueTicket
from kakeya.engine.queue.waits import QueueWaits
from kakeya.engine.steps.chores import Chores
from kakeya.engine.steps.prefilling import Prefilling
from kakeya.engine.steps.prompt import PromptPiece
from kakeya.engine.steps.sequence import Launch, SequenceRun, SequenceTools
from kakeya.engine.steps.shared_forwards import SharedForwards, paying_rows
from kakeya.generation.frames import Done, EngineFrame, KvExported, KvImported, Progress, Tokens

__all__ = ["EngineLoad", "QueueTicket", "Scheduler"]
_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_TIDY_EVERY_UNITS = 512
_ASIDES = (KvImported, KvExported, Progress)
"""Frames between which nothing is computed that counts as a turn."""


class Scheduler:
    """Owns the running sequences. Construct anywhere; `run` is the thread's body."""

    def __init__(
        self,
        model: Model,
        tools: SequenceTools,
        *,
        max_running: int,
        limits: EngineLimits | None = None,
    ) -> None:
        self.limits = limits or EngineLimits(model, tools.slots)
        self._room = self.limits.room
        self._model = model
        self._tools = tools
        self._max_running = self._most_running = max_running
        self._inbox = Inbox(tools.timer)
        self._pace = Pace(model.facts)
        self._queue = EngineQueue(
            self._room,
            tools.slots,
            model.facts,
            self._pace,
            places=paying_rows(model.facts.forward_costs_s, max_running),
            memory_bytes=self.limits.room_bytes,
        )
        self._parking = Parking(self._queue, model.facts, tools.timer, lost=self._lose)
        self.limits.drop_parked = self._parking.drop_until
        self.limits.wants_answered = lambda: self._queue.growth.answered(tools.timer())
        self.lend = self._parking.lend
        self._running: list[QueueRow] = []
        self._prefilling = Prefilling(model, self._queue, self._pace, tools.timer)
        self._turns: deque[QueueRow] = deque()
        self._waits = QueueWaits(self._pace, lambda: self._prefilling.spent_s)
        self._forwards = SharedForwards(model, tools.controller, tools.timer)
        self._chores = Chores(model.chores(), tools.timer)
        self._latest: QueueRow | None = None
        self._is_device_idle = True
        self._keeps_limit = True
        self._units = 0

    def submit(self, ticket: QueueTicket) -> None:
        """Queue a generation; thread-safe."""
        self._inbox.submit(ticket)

    def call(self, work: Callable[[], _Answer]) -> Future[_Answer]:
        """Run `work` on the model thread between two steps; thread-safe."""
        return self._inbox.call(work)

    def settled(self) -> Future[None]:
        """Resolve once no KV waits for pages to go to; thread-safe."""
        future: Future[None] = Future()
        self._inbox.call(lambda: self._parking.when_settled(lambda: _finish(future)))
        return future

    def limit_running(self, most: int) -> None:
        """Run at most so many sequences at once, and no more than at the start; on the model
        thread. Those that run already go on."""
        self._max_running = min(most, self._most_running)
        costs_s = self._model.facts.forward_costs_s
        self._queue.places = paying_rows(costs_s, self._max_running)

    def stop(self) -> None:
        """Make `run` return after the current step; thread-safe."""
        self._inbox.stop()

    def load(self) -> EngineLoad:
        """The load of the thread; read on the model thread."""
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._queue.waiting),
            batch_rows=self._forwards.last_rows,
        )

    def silent_s(self) -> float:
        """How long the thread has been at one piece of work; 0 while it has none. Thread-safe."""
        return self._inbox.silent_s()

    def run(self) -> None:
        """Work until `stop`."""
        while (now_s := self._accept()) is not None:
            if self._parking.settle(now_s):
                self._keeps_limit = self.limits.holds()
            if self._running and not (self._keeps_limit and self._room.holds):
                if self._keeps_limit and self._queue.growth.is_pending(now_s):
                    self._parking.wait()
                else:
                    self._relieve(now_s)
                continue
            if self._queue.is_due(now_s):
                self._admit(now_s)
                if self._waits.is_due(self._queue.waiting, now_s):
                    self._waits.tell(self._queue.waiting, self._running, now_s, self._tools.timer)
            if self._running:
                self._turn()
            else:
                self._parking.wait()
        for row in [*self._running, *self._queue.parked]:
            self._end(row)

    def _accept(self) -> float | None:
        """Take everything from the inbox; wait for it only when there is nothing to run.

        Returns the time, None once it is to stop.
        """
        is_idle, is_alone = not self._running and not self._queue.waiting, True
        for item in self._inbox.items(
            is_idle=is_idle, most_s=self._chores.wait_s(self._tools.timer())
        ):
            is_alone = False
            if item is None:
                return None
            if isinstance(item, QueueTicket):
                self._arrive(item, self._inbox.read_s)
            else:
                self._do(item)
        if not is_idle:
            self._chores.busy(self._inbox.read_s)
        elif is_alone:
            self._do_chore()
        return self._inbox.read_s

    def _do_chore(self) -> None:
        """Do a slice of checks and measurements, and go by its findings."""
        before = self._model.facts
        self._chores.work()
        facts = self._model.facts
        if facts is not before:
            self._pace.learn(facts)
            self.limit_running(self._max_running)
            if facts.forward_costs_s:
                self._tools.controller.seed_costs(facts.forward_costs_s)
        self._keeps_limit = self.limits.holds()

    def _do(self, work: Callable[[], None]) -> None:
        work()
        # It may have changed the bounds.
        self._queue.recheck()

    def _arrive(self, ticket: QueueTicket, now_s: float) -> None:
        try:
            self._queue.arrive(ticket, self._running, now_s)
        except KakeyaError as refusal:
            ticket.on_error(refusal)

    def _admit(self, now_s: float) -> None:
        """End queued sequences that have to leave, and give places to those that can enter."""
        for row, failure in self._queue.departures(self._running, now_s):
            if failure is None:
                self._end(row)
            else:
                self._abandon(row, failure)
        while (entry := self._queue.next_entry(self._running, now_s)) is not None:
            if self._grows_for(entry, now_s):
                return
            for row in entry.parks:
                self._park(row)
            if self._parking.are_coming(entry, now_s):
                return
            for row in entry.drops:
                self._parking.drop(row)
            self._place(entry.row, now_s)
            if self._prefilling.round_s > ROUND_S and len(self._running) > len(
                self._prefilling.rows
            ):
                # Beginning a sequence copies KV from pages: decoding ones have waited for that.
                return

    def _grows_for(self, entry: Admitted, now_s: float) -> bool:
        """Whether a larger bound for a row is on its way, without which it does not begin."""
        row, room = entry.row, self._room
        crowds = room.crowds(row, row.ticket.job, row.length)
        if not (entry.needs_bytes or crowds):
            return False
        wished = entry.needs_bytes + crowds + room.step_bytes()
        is_coming = self._queue.growth.is_coming(row, entry.needs_bytes, wished, now_s)
        return is_coming or entry.needs_bytes > 0

    def _place(self, row: QueueRow, now_s: float) -> None:
        """Begin a sequence, or go on with a parked one."""
        began_s = self._tools.timer()
        self._queue.enter(row)
        row.placed_s, row.headroom, row.served = now_s, 0, self._prefilling.chunks
        row.lacks_since_s = None
        self._running.append(row)
        ticket, job = row.ticket, row.ticket.job
        if row.run is not None and not self._parking.resume(row):
            return
        try:
            if row.run is None:
                row.run = SequenceRun(self._model, self._tools, job, ticket.grammar)
                row.steps = row.run.steps()
                if job.offer.blocks:
                    # The agent, which pinned the blocks, waits for this count to unpin them.
                    imported = next(row.steps)
                    if isinstance(imported, KvImported):
                        ticket.on_frame(imported)
        except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
            self._abandon(row, _as_kakeya_error(failure))
            return
        # Of one that was parked, the time since its last step measures nothing.
        row.run.resumed(None)
        self._waits.placed(row, now_s)
        self._room.enter(row, job, row.length)
        self._queue.charge(row)
        self._prefilling.enter(row)
        if row.is_prefilling and row.piece is None:
            self._advance(row)
        self._prefilling.round_s += self._tools.timer() - began_s

    def _park(self, row: QueueRow) -> None:
        """Take its place from a running sequence, between two of its steps."""
        self._forget(row)
        self._room.park(row, row.length)
        self._queue.park(row)

    def _turn(self) -> None:
        """One unit of work: the block of a row, the shared step after the last row, or a chunk."""
        self._units += 1
        if self._units % _TIDY_EVERY_UNITS == 0:
            self._model.tidy()
        row = self._due_prompt() if self._prefilling.rows and not self._turns else None
        if row is not None:
            self._prefill(row)
        elif self._running:
            self._step()
        # Once a unit: memory of an ended row is free when nothing here refers to the row.
        self._keeps_limit = self.limits.holds()

    def _step(self) -> None:
        """Turns of decoding rows, up to one that computes something.

        The last turn of a round launches all plain steps that are due; they wait for that.
        """
        if not self._turns:
            self._turns.extend(row for row in self._running if not row.is_prefilling)
            self._forwards.share(len(self._turns))
            self._prefilling.begin_round()
        while self._turns and self._only_waits(self._turns.popleft()):
            pass
        if not self._turns:
            self._launch([row for row in self._running if row.launch is not None])

    def _only_waits(self, row: QueueRow) -> bool:
        """The turn of one row; whether it only waits for its plain step to be launched."""
        if row.launch is not None:
            return True
        # A plain step that has company is not measured anyway.
        is_measured = row.has_drafts or len(self._running) == 1
        if is_measured and row is not self._latest and row.run is not None:
            row.run.resumed(self._tools.timer() if self._is_device_idle else None)
            self._latest = row
        self._advance(row)
        if row.launch is None:
            self._forwards.worked_apart()
            self._is_device_idle = True
        return row.launch is not None

    def _due_prompt(self) -> QueueRow | None:
        """The row that gets a chunk before the next round; None = none does."""
        for one in [one for one in self._prefilling.rows if one.ticket.cancelled]:
            self._end(one)
        return self._prefilling.due(self._running)

    def _prefill(self, row: QueueRow) -> None:
        """Compute the next chunk of a row's prompt; go on with rows whose pieces are done then."""
        self._forwards.worked_apart()
        self._latest, self._is_device_idle = row, True
        done: list[QueueRow] = []
        try:
            done = self._prefilling.compute(row)
        except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
            if self._prefilling.failed(row, failure):
                self._abandon(row, _as_kakeya_error(failure))
        for one in done:
            self._advance(one)
        self._prefilling.end(row, done)

    def _advance(self, row: QueueRow) -> None:
        """Go on with a row up to its next tokens, or a piece or plain step that is due."""
        if row.ticket.cancelled:
            self._end(row)
            return
        try:
            step = next(row.steps, None)
            while isinstance(step, _ASIDES):
                row.ticket.on_frame(step)
                step = next(row.steps, None)
        except Exception as failure:  # noqa: BLE001 - ends this generation, not the thread
            self._abandon(row, _as_kakeya_error(failure))
            return
        if isinstance(step, PromptPiece):
            row.piece = step
        elif isinstance(step, Launch):
            row.launch = step
        elif step is None:
            self._end(row)
        else:
            self._tell(row, step)

    def _tell(self, row: QueueRow, frame: EngineFrame) -> None:
        """Hand a frame on, and note its effects on the row."""
        row.ticket.on_frame(frame)
        if isinstance(frame, Tokens):
            made = len(frame.token_ids)
            if not row.has_first_token:
                row.has_first_token, row.expires_s = True, math.inf
                self._waits.begun(row, self._tools.timer())
            row.account.pay(OUTPUT_WEIGHT * made)
            row.headroom -= made
            if row.headroom < 0:
                self._grow(row)
        elif isinstance(frame, Done):
            self._pace.ended(self._tools.timer() - row.placed_s)
            self._waits.ended(row, frame)
            self._end(row)

    def _grow(self, row: QueueRow) -> None:
        """Set more room aside for a row that has filled its own; ask for more ahead of need."""
        room = self._room
        room.grown(row, row.length)
        row.headroom = room.headroom_tokens(row, row.length)
        to_come = row.whole_bytes - room.held_bytes(row)
        if room.left_bytes < min(to_come, room.step_bytes() // 2):
            needed, now_s = max(0, -room.left_bytes), self._tools.timer()
            self._queue.growth.is_coming(row, needed, needed + room.step_bytes(), now_s)

    def _launch(self, rows: list[QueueRow]) -> None:
        """Launch the plain steps that are due, together where possible, and go on with each row."""
        for row in [row for row in rows if row.ticket.cancelled]:
            self._end(row)
            rows.remove(row)
        has_company = len(self._running) > 1
        if rows:
            self._is_device_idle = False
        if has_company:
            self._latest = None
        # Last those that wait for the very step: the others tell of the one before meanwhile.
        rows.sort(key=lambda row: row.launch is not None and row.launch.is_needed)
        for row, failure in self._forwards.launch(rows, has_company=has_company):
            self._abandon(row, _as_kakeya_error(failure))
        for row in rows:
            if not row.is_over:
                row.launch = None
                self._advance(row)
        self._forwards.observe(len(rows))
        self._prefilling.end_round()
        if len(rows) > 1 and self._chores.is_urgent:
            self._forwards.worked_apart()
            self._do_chore()

    def _relieve(self, now_s: float) -> None:
        """Bring the running rows one step closer to their bounds: KV of parked rows goes first."""
        if self._parking.is_due:
            self._parking.wait()
            return
        self._make_place(now_s)
        self._keeps_limit = self.limits.holds()

    def _make_place(self, now_s: float) -> None:
        if held := self._queue.parked_with_kv:
            self._parking.drop_soon(held[-1], now_s)
        elif len(self._running) > 1:
            self._park(weakest(self._running))
        elif self._room.growth_bytes and not self._room.holds:
            self._running[0].lacks_since_s = now_s
            self._park(self._running[0])
        else:
            self._abandon(self._running[0], self.limits.refusal())

    def _lose(self, row: QueueRow) -> None:
        self._abandon(row, self.limits.parked_refusal())

    def _abandon(self, row: QueueRow, failure: KakeyaError) -> None:
        """End a sequence without keeping its KV, which may be wrong, or is in the way."""
        self._leave(row)
        if row.run is not None:
            row.run.abandon()
        row.ticket.on_error(failure)

    def _end(self, row: QueueRow) -> None:
        self._leave(row)
        try:
            if row.run is not None:
                if row.is_stowed:
                    row.run.abandon()
                else:
                    row.run.finish()
        except Exception as failure:  # noqa: BLE001 - KV that cannot be kept is only speed
            event(_log, "kv dropped", level=logging.WARNING, error=repr(failure))

    def _leave(self, row: QueueRow) -> None:
        row.is_over, row.launch, row.piece = True, None, None
        if row in self._running:
            self._forget(row)
            self._queue.ended(row)
        elif row in self._queue.waiting:
            self._queue.leave(row)
        self._room.leave(row)
        self._queue.growth.left(row)

    def _forget(self, row: QueueRow) -> None:
        """Take a row out of everything that belongs to a place."""
        self._queue.refund(row)
        self._running.remove(row)
        self._prefilling.leave(row)
        if row in self._turns:
            self._turns.remove(row)
        if row is self._latest:
            self._latest = None


def _finish(future: Future[None]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(None)


def _as_kakeya_error(failure: Exception) -> KakeyaError:
    """The error itself, or that a step failed, with its traceback in the log."""
    if isinstance(failure, KakeyaError):
        return failure
    _log.error("a step failed", exc_info=failure)
    return InvariantBroken("engine_step", repr(failure))
