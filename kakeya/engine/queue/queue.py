"""The queue of an engine: generations that wait for a place, new ones and parked ones.

The queue decides, the scheduler performs. A generation is refused when it arrives if its KV can
never fit, or if its first token is not expected by its deadline. A waiting generation ends when its
deadline passes; one that was parked before its first token ends as soon as it cannot keep its
deadline.

Places go in the order of `policy`. Each question looks through all that wait: the gate in front of
an engine admits 256 generations, 768 at most when many clients and users share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kakeya.core.errors import DeadlineExceeded, KakeyaError, MemoryRefused
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.model import LoadedFacts
from kakeya.engine.queue.fair_shares import FairShares
from kakeya.engine.queue.growth import KvGrowth
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import (
    AGED_S,
    INPUT_WEIGHT,
    SPECULATIVE,
    first,
    first_token_s,
    has_rested,
    is_turn_of_age,
    may_hold,
    may_pass,
    next_chunk,
    next_place,
    parking_order,
)
from kakeya.engine.queue.room import RETRY_S, KvRoom
from kakeya.engine.queue.rows import Admitted, QueueRow, QueueTicket
from kakeya.generation.request import DecodeJob

LACK_RETRY_S = 10.0
"""A client that was refused for want of memory comes back after so long."""
LACK_S = 60.0
"""A generation that lacks memory in the middle keeps its KV for so long."""
LOOK_S = 0.1
"""Interval of looks at the queue for changes that time alone brings."""


class EngineQueue:
    """Belongs to the model thread.

    `waiting` are all rows that wait, `parked` those of them that have begun, in the order of
    parking. At most `places` run; where it becomes less, those that run go on.
    """

    def __init__(
        self,
        room: KvRoom,
        slots: KvSlots,
        facts: LoadedFacts,
        pace: Pace,
        *,
        places: int,
        memory_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`memory_bytes` returns the bytes that the model may still take, None without a bound."""
        self.room = room
        self.growth = KvGrowth(room)
        self._slots = slots
        self._facts = facts
        self._pace = pace
        self.places = places
        self._memory_bytes = memory_bytes
        self._shares = FairShares()
        self.waiting: list[QueueRow] = []
        self.parked: list[QueueRow] = []
        self._arrivals = 0
        self._entries = 0
        self._look_s: float | None = None
        self._has_cancelled = False
        self._held: QueueRow | None = None
        self._promised: QueueRow | None = None
        self._aged: QueueRow | None = None
        self._aged_until_s = 0.0

    # --- arrival and departure

    def arrive(self, ticket: QueueTicket, running: Sequence[QueueRow], now_s: float) -> None:
        """Put a generation in the queue.

        Raises KvRefused when its KV can never fit, DeadlineExceeded when its first token would
        come too late.
        """
        job = ticket.job
        self.room.free_bytes = job.offer.free_bytes
        self.room.check_fits(job)
        self._arrivals += 1
        row = QueueRow(
            ticket=ticket,
            account=self._shares.arrive(job.client, job.priority, job.user),
            number=self._arrivals,
            arrived_s=now_s,
            work_s=self._pace.prefill_s(self._known_tokens(job), len(job.token_ids) - 1),
            expires_s=math.inf if job.deadline_s is None else now_s + job.deadline_s,
            whole_bytes=self.room.whole_bytes(job),
            has_drafts=bool(job.draft_sources),
        )
        try:
            self._check_deadline(row, running, now_s)
        except DeadlineExceeded:
            self._shares.leave(row.account, was_running=False)
            raise
        self.waiting.append(row)
        ticket.when_cancelled(self._note_cancelled)
        self.recheck()

    def departures(
        self, running: Sequence[QueueRow], now_s: float
    ) -> list[tuple[QueueRow, KakeyaError | None]]:
        """Rows that are to leave the queue, each with its error, None for a cancelled one."""
        self._has_cancelled = False
        found: list[tuple[QueueRow, KakeyaError | None]] = []
        for row in self.waiting:
            if row.ticket.cancelled:
                found.append((row, None))
                continue
            try:
                self._check_waiting(row, running, now_s)
            except (DeadlineExceeded, MemoryRefused) as refusal:
                found.append((row, refusal))
        return found

    def leave(self, row: QueueRow) -> None:
        """Take out a waiting row that is over."""
        self._remove(row)
        self._shares.leave(row.account, was_running=False)
        self.recheck()

    def ended(self, row: QueueRow) -> None:
        """Count a running row as over."""
        if row is self._aged:
            self._aged = None
        self._shares.leave(row.account, was_running=True)
        self.recheck()

    # --- places

    def recheck(self) -> None:
        """Make the next look due at once: something changed, a row may be able to enter."""
        self._look_s = None

    def is_due(self, now_s: float) -> bool:
        """Whether a row may have become able to enter, or may have to leave."""
        if not self.waiting:
            return False
        return self._has_cancelled or self._look_s is None or now_s >= self._look_s

    def next_entry(self, running: Sequence[QueueRow], now_s: float) -> Admitted | None:
        """The row that gets a place now; None = none does until something changes."""
        self._look_s = now_s + LOOK_S
        promised, self._promised = self._promised, None
        if promised is not None and promised in self.waiting:
            entry = self._plan(promised, running, now_s)
            if entry is not None:
                return entry
        if not self.waiting:
            return None
        urgent = first(self.waiting)
        chosen = self._held or next_place(
            self.waiting,
            self._entries,
            now_s,
            lambda row: self._plan(row, running, now_s) is not None,
        )
        entry = self._plan(chosen, running, now_s)
        if is_turn_of_age(self._entries) and may_hold(chosen, now_s):
            self._held = chosen
        if entry is None and chosen is self._held and may_pass(urgent, chosen, running):
            return self._plan(urgent, running, now_s)
        if entry is not None and chosen is not urgent and chosen.priority != SPECULATIVE:
            self._aged, self._aged_until_s = chosen, now_s + AGED_S
        return entry

    def promise(self, row: QueueRow) -> None:
        """Let a row be the next to enter: rows that were parked for it may not come back first."""
        self._promised = row

    def enter(self, row: QueueRow) -> None:
        """Give a waiting row its place."""
        self._entries += 1
        self._remove(row)
        self._shares.begin(row.account)
        self.recheck()

    def charge(self, row: QueueRow) -> None:
        """Let the account of a row that runs pay ahead for the rest of its prompt."""
        row.charged = row.prompt_left
        row.account.pay(INPUT_WEIGHT * row.charged)

    def refund(self, row: QueueRow) -> None:
        """Pay back tokens of the prompt that were charged and not computed."""
        row.account.pay(-INPUT_WEIGHT * min(row.charged, row.prompt_left))
        row.charged = 0

    def park(self, row: QueueRow) -> None:
        """Put a running row back into the queue; it keeps the KV that it has."""
        self._shares.park(row.account)
        self.waiting.append(row)
        self.parked.append(row)

    @property
    def parked_with_kv(self) -> list[QueueRow]:
        """Parked rows with KV that takes room here, in the order of parking."""
        return [row for row in self.parked if row.length and not row.is_stowed]

    # --- chunks of prompts

    def next_chunk(
        self, prefilling: Sequence[QueueRow], passed_s: float, now_s: float, *, others_decode: bool
    ) -> tuple[QueueRow | None, bool]:
        """The row that gets the next chunk, and whether it waited longest for one; None = none
        does, the running batch goes on. `passed_s`: see `policy`."""
        wanted = [
            row
            for row in prefilling
            if row.priority != SPECULATIVE
            or has_rested(self.chunk_s(row), now_s - max(row.placed_s, row.chunk_ended_s))
        ]
        if not wanted and not others_decode:
            wanted = list(prefilling)
        return next_chunk(wanted, passed_s, self.chunk_s) if wanted else (None, False)

    def prompt_s(self, row: QueueRow) -> float:
        """Seconds that the rest of its prompt takes."""
        last = len(row.ticket.job.token_ids) - 1
        return self._pace.prefill_s(min(row.length, last), last)

    def chunk_s(self, row: QueueRow) -> float:
        """Seconds that its next chunk takes: a part of its next piece, or of one that is begun."""
        if row.work is not None:
            return row.work.part_s
        piece = min(self._facts.prefill_chunk_at(row.length), row.prompt_left)
        seconds = self._pace.prefill_s(row.length, row.length + piece)
        return seconds / self._facts.parts_of(seconds)

    # --- inside

    def _note_cancelled(self) -> None:
        """Called on any thread."""
        self._has_cancelled = True

    def _remove(self, row: QueueRow) -> None:
        self.waiting.remove(row)
        if row in self.parked:
            self.parked.remove(row)
        if row is self._held:
            self._held = None

    def _plan(self, row: QueueRow, running: Sequence[QueueRow], now_s: float) -> Admitted | None:
        """Plan a place and room for a row; None = there is none."""
        job = row.ticket.job
        lacks_bytes = self.room.lacks(row, job, row.length)
        lacks_place = len(running) >= self.places
        if lacks_bytes > 0 and not lacks_place and self.growth.may_ask(lacks_bytes, now_s):
            return Admitted(row=row, needs_bytes=lacks_bytes)
        if (
            row.is_stowed
            and running
            and not self._has_memory(self.room.need_bytes(job, row.length))
        ):
            return None
        if lacks_bytes <= 0 and not lacks_place:
            return Admitted(row=row)
        held = self.room.held_bytes
        droppable = self._droppable(row, running)
        parks: list[QueueRow] = []
        gain = sum(map(held, droppable))
        kept = self._aged if now_s < self._aged_until_s else None
        for victim in parking_order(row, running, now_s, kept):
            if lacks_bytes <= gain and (parks or not lacks_place):
                break
            parks.append(victim)
            gain += held(victim)
        if lacks_place and not parks:
            return None
        if lacks_bytes > gain:
            needs = lacks_bytes - gain
            return (
                Admitted(row=row, needs_bytes=needs) if self.growth.may_ask(needs, now_s) else None
            )
        drops: list[QueueRow] = []
        # A parked row gives back its unfilled room; its KV keeps the rest until it is dropped.
        lacks_bytes -= sum(held(one) - self.room.kv_bytes(one.length) for one in parks)
        for one in (*reversed(parks), *droppable):
            if lacks_bytes <= 0:
                break
            drops.append(one)
            lacks_bytes -= self.room.kv_bytes(one.length)
        return Admitted(row=row, parks=tuple(parks), drops=tuple(drops))

    def _droppable(self, row: QueueRow, running: Sequence[QueueRow]) -> list[QueueRow]:
        """Parked rows that may lose their KV for a row, in this order."""
        return [
            one
            for one in reversed(self.parked_with_kv)
            if one is not row and (one.priority >= row.priority or not running)
        ]

    def _has_memory(self, size: int) -> bool:
        """Whether KV can be restored at once; if it outgrew memory, it would be parked again."""
        left = self._memory_bytes()
        return left is None or left >= size

    def _check_waiting(self, row: QueueRow, running: Sequence[QueueRow], now_s: float) -> None:
        if row.run is not None:
            self._check_deadline(row, running, now_s)
        elif now_s >= row.expires_s:
            raise DeadlineExceeded(
                f"the deadline passed after {now_s - row.arrived_s:.1f} s in the queue, before the "
                "first token; allow more time or come back later"
            )
        # The bound may have become smaller since it arrived.
        if row.whole_bytes > self.room.budget_bytes:
            self.room.check_fits(row.ticket.job)
        self._check_lent(row, running, now_s)

    def _check_lent(self, row: QueueRow, running: Sequence[QueueRow], now_s: float) -> None:
        """Raise KvRefused for a row that nothing makes room for, since there is no memory now.

        One that has begun waits for LACK_S, then ends with an error that says it can go on.
        """
        if row.lacks_since_s is not None and now_s >= row.lacks_since_s + LACK_S:
            raise MemoryRefused(
                f"there was no memory for more than {row.length} tokens for {LACK_S:g} s; "
                "the generation can go on from its history",
                retry_after_s=RETRY_S,
            )
        if running or row.run is not None or not self.growth.is_refused(row, now_s):
            return
        parked = sum(map(self.room.held_bytes, self._droppable(row, running)))
        if self.room.lacks(row, row.ticket.job) > parked:
            raise self.room.refusal(row.ticket.job, LACK_RETRY_S)

    def _check_deadline(self, row: QueueRow, running: Sequence[QueueRow], now_s: float) -> None:
        if row.expires_s == math.inf:
            return
        stretch = self._pace.stretch if any(not one.is_prefilling for one in running) else 1.0
        expected_s = first_token_s(
            row,
            self.waiting,
            running,
            places=self.places,
            place_every_s=self._pace.place_every_s(self.places),
            stretch=stretch,
        )
        expected_s += self._pace.step_s
        if now_s + expected_s > row.expires_s:
            others = len(self.waiting) - (row in self.waiting)
            raise DeadlineExceeded(
                f"the first token is expected in {expected_s:.3g} s, behind {len(running)} running "
                f"and {others} waiting requests, and the deadline is in "
                f"{max(0.0, row.expires_s - now_s):.3g} s; allow more time or come back later",
                retry_after_s=max(RETRY_S, expected_s - row.work_s * stretch - self._pace.step_s),
            )

    def _known_tokens(self, job: DecodeJob) -> int:
        """Tokens of a prompt that need not be computed, as far as is known before it begins."""
        blocks = sum(one.tokens or self._facts.kv_block_tokens for one in job.offer.blocks)
        kept = self._slots.kept_tokens(job.kv_key) if job.kv_key else 0
        return min(max(blocks, kept), len(job.token_ids) - 1)
