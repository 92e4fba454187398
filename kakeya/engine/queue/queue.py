"""Generations from their arrival on: those that wait for a place, new ones and parked ones.

What the line says is performed by the scheduler. A generation is refused when it arrives if there
is never room for its KV, or if its first token cannot be there by its deadline as things go; one
whose deadline passes while it waits ends then, and one that was parked before its first token as
soon as it cannot keep it any more. A deadline is for the first token: how long an answer becomes
nobody knows, and who has said something has none.

Places go by class, share and work. Each FLOOR_TURNS-th goes to who waited longest, and at least
AGED_S, of those that fit. Whoever waited for HELD_S holds the line then until there is room for it:
only who may pass (`policy`) gets a place before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kakeya.core.errors import DeadlineExceeded, KakeyaError, MemoryRefused
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.model import LoadedFacts
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import (
    AGED_S,
    CLASSES,
    INPUT_WEIGHT,
    SPECULATIVE,
    first_token_s,
    has_rested,
    is_turn_of_age,
    makes_place,
    may_hold,
    may_pass,
    next_chunk,
    victims,
)
from kakeya.engine.queue.room import RETRY_S, KvRoom
from kakeya.engine.queue.rows import Admitted, QueueRow, QueueTicket
from kakeya.engine.queue.waiting import Waiting
from kakeya.generation.request import DecodeJob

LOOK_S = 0.1
"""How often the line is looked through for what only time changes."""


class Line:
    """Who waits. `waiting` are all of them by number, `parked` those among them that have begun, in
    the order of parking."""

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
        """`memory_bytes` are what the model may still take; None = without a bound."""
        self.room = room
        self._slots = slots
        self._facts = facts
        self._pace = pace
        self._places = places
        self._memory_bytes = memory_bytes
        self._orders: Waiting[QueueRow] = Waiting()
        self._shares = self._orders.shares
        self.waiting = self._orders.claims
        self.parked = self._orders.parked
        self._given_up: deque[int] = deque()
        self._most_bytes = 0  # nobody that waits takes more as a whole
        self._arrivals = 0
        self._entries = 0
        self._look_s: float | None = None
        self._aged: QueueRow | None = None
        self._held: QueueRow | None = None
        self._promised: QueueRow | None = None
        self._aged_until_s = 0.0

    def arrive(self, ticket: QueueTicket, running: Sequence[QueueRow], now_s: float) -> None:
        """Put a generation in the line.

        Raises MemoryRefused when there is never room for it, DeadlineExceeded when it would come
        too late.
        """
        job = ticket.job
        self.room.check_fits(job)
        self._most_bytes = max(self._most_bytes, self.room.budget_bytes)
        self._arrivals += 1
        row = QueueRow(
            ticket=ticket,
            account=self._shares.arrive(job.client, job.priority, job.user),
            number=self._arrivals,
            arrived_s=now_s,
            work_s=self._pace.prefill_s(self._known_tokens(job), len(job.token_ids) - 1),
            expires_s=math.inf if job.deadline_s is None else now_s + job.deadline_s,
            need_bytes=self.room.need_bytes(job),
            has_drafts=bool(job.draft_sources),
        )
        try:
            self._check_deadline(row, running, now_s)
        except DeadlineExceeded:
            self._shares.leave(row.account, was_running=False)
            raise
        self._orders.add(row)
        ticket.tell(partial(self._given_up.append, row.number))
        self.stir()

    def stir(self) -> None:
        """Something changed: look again who can enter."""
        self._look_s = None

    def is_due(self, now_s: float) -> bool:
        """Whether somebody may have become able to enter, or may have to go."""
        if not self.waiting:
            return False
        return self._look_s is None or now_s >= self._look_s or bool(self._given_up)

    def gone(
        self, running: Sequence[QueueRow], now_s: float
    ) -> list[tuple[QueueRow, KakeyaError | None]]:
        """Who is to leave the line, and what to tell it: given up, too late, never to have room."""
        left: dict[QueueRow, KakeyaError | None] = {}
        while self._given_up:
            row = self.waiting.get(self._given_up.popleft())
            if row is not None:
                left[row] = None
        for row in self._orders.expired(now_s):
            left.setdefault(row, DeadlineExceeded(_waited_in_vain(row, now_s)))
        for row in self.parked:
            try:
                self._check_deadline(row, running, now_s)
            except DeadlineExceeded as late:
                left.setdefault(row, late)
        if self._most_bytes > self.room.budget_bytes:
            self._most_bytes = self.room.budget_bytes
            for row in self.waiting.values():
                try:
                    self.room.check_fits(row.ticket.job)
                except MemoryRefused as refusal:
                    left.setdefault(row, refusal)
        return list(left.items())

    def next_entry(self, running: Sequence[QueueRow], now_s: float) -> Admitted | None:
        """Who gets a place now; None = nobody until something changes."""
        self._look_s = now_s + LOOK_S
        promised, self._promised = self._promised, None
        if promised is not None and promised.number in self.waiting:
            entry = self._plan(promised, running, now_s)
            if entry is not None:
                return entry
        first = self._shares.first()
        if first is None:
            return None
        chosen = self._held or first
        if self._held is None and is_turn_of_age(self._entries):
            self._held = self._holder(now_s)
            chosen = self._held or self._oldest(running, now_s) or first
        entry = self._plan(chosen, running, now_s)
        if entry is None and chosen is self._held and may_pass(first, chosen, running):
            return self._plan(first, running, now_s)
        if entry is not None and chosen.priority != SPECULATIVE and chosen is not first:
            self._aged, self._aged_until_s = chosen, now_s + AGED_S
        return entry

    def next_chunk(
        self, prefilling: Sequence[QueueRow], turn: int, now_s: float, *, somebody_decodes: bool
    ) -> QueueRow | None:
        """Whose chunk of a prompt is next; None = of nobody, those that decode go on.

        `turn` counts the chunks computed so far.
        """
        wanted = [
            row
            for row in prefilling
            if row.priority != SPECULATIVE
            or has_rested(self.chunk_s(row), now_s - max(row.placed_s, row.chunk_ended_s))
        ]
        if not wanted and not somebody_decodes:
            wanted = list(prefilling)
        return next_chunk(wanted, turn) if wanted else None

    def promise(self, row: QueueRow) -> None:
        """It is the next one, as soon as what it waits for is there: those that made place for it
        may not come back before."""
        self._promised = row

    def enter(self, row: QueueRow) -> None:
        """It gets a place."""
        self._entries += 1
        self._remove(row)
        self._shares.begin(row.account)
        self.stir()

    def charge(self, row: QueueRow) -> None:
        """It runs: its account pays for what is to be computed of its prompt."""
        row.charged = row.prompt_left
        row.account.pay(INPUT_WEIGHT * row.charged)

    def refund(self, row: QueueRow) -> None:
        """It runs no longer: what was not computed is not paid for."""
        row.account.pay(-INPUT_WEIGHT * min(row.charged, row.prompt_left))
        row.charged = 0

    def park(self, row: QueueRow) -> None:
        """A running one waits from now on, and keeps what it has computed."""
        # What it holds itself is not in its way.
        row.need_bytes = self.room.need_bytes(row.ticket.job, row.length)
        row.need_bytes -= self.room.held_bytes(row)
        # It may have begun while there was more room.
        self._most_bytes = max(self._most_bytes, self.room.whole_bytes(row.ticket.job))
        self._shares.set_aside(row.account)
        self._orders.add(row, is_parked=True)

    def stowed(self, row: QueueRow) -> None:
        """What a parked one held lies elsewhere: it needs room for all of it to go on."""
        self._orders.remove(row)
        row.need_bytes = self.room.need_bytes(row.ticket.job, row.length)
        self._orders.add(row, is_parked=True)
        self.stir()

    @property
    def holding(self) -> list[QueueRow]:
        """Those of the parked that hold KV, in the order of parking."""
        return [row for row in self.parked if row.length and not row.is_stowed]

    def leave(self, row: QueueRow) -> None:
        """One that waits is over."""
        self._remove(row)
        self._shares.leave(row.account, was_running=False)
        self.stir()

    def ended(self, row: QueueRow) -> None:
        """One that runs is over."""
        if row is self._aged:
            self._aged = None
        self._shares.leave(row.account, was_running=True)
        self.stir()

    def prompt_s(self, row: QueueRow) -> float:
        """What is left of its prompt, in seconds."""
        last = len(row.ticket.job.token_ids) - 1
        return self._pace.prefill_s(min(row.length, last), last)

    def chunk_s(self, row: QueueRow) -> float:
        """Its next chunk, in seconds."""
        chunk = self._facts.prefill_chunk_at(row.length)
        return self._pace.prefill_s(row.length, row.length + min(chunk, row.prompt_left))

    def _remove(self, row: QueueRow) -> None:
        """It waits no longer."""
        self._orders.remove(row)
        if row is self._held:
            self._held = None

    def _plan(self, row: QueueRow, running: Sequence[QueueRow], now_s: float) -> Admitted | None:
        """How a place and room come about for it; None where they do not."""
        if row.is_stowed and running and not self._has_memory(row.need_bytes):
            return None
        lacks_bytes = row.need_bytes - self.room.left_bytes
        lacks_place = len(running) >= self._places
        if lacks_bytes <= 0 and not lacks_place:
            return Admitted(row=row)
        held = self.room.held_bytes
        droppable = [one for one in self._droppable(row.priority, running) if one is not row]
        parks: list[QueueRow] = []
        gain = sum(map(held, droppable))
        for victim in makes_place(row, running, now_s, self._kept(now_s)):
            if lacks_bytes <= gain and (parks or not lacks_place):
                break
            parks.append(victim)
            gain += held(victim)
        if lacks_bytes > gain or (lacks_place and not parks):
            return None
        drops: list[QueueRow] = []
        lacks_bytes -= sum(held(one) - self.room.kv_bytes(one.length) for one in parks)
        for one in (*reversed(parks), *droppable):
            if lacks_bytes <= 0:
                break
            drops.append(one)
            lacks_bytes -= self.room.kv_bytes(one.length)
        return Admitted(row=row, parks=tuple(parks), drops=tuple(drops))

    def _has_memory(self, size: int) -> bool:
        """Whether KV can be taken back at once; if memory was outgrown, that would only repeat."""
        left = self._memory_bytes()
        return left is None or left >= size

    def _holder(self, now_s: float) -> QueueRow | None:
        """Who holds the line from now on, if anybody."""
        oldest = self._orders.oldest(without=SPECULATIVE)
        return oldest if oldest is not None and may_hold(oldest, now_s) else None

    def _oldest(self, running: Sequence[QueueRow], now_s: float) -> QueueRow | None:
        """Who gets a place for having waited longest, if anybody."""
        oldest = self._orders.oldest()
        if oldest is None or now_s - oldest.arrived_s < AGED_S:
            return None
        rooms = [self._rooms(priority, running, now_s) for priority in range(CLASSES)]
        clients = {row.account.client for row in running}
        found = self._orders.oldest_within(rooms, clients)
        for row in self.parked:
            is_older = found is None or row.number < found.number
            if is_older and self._plan(row, running, now_s) is not None:
                found = row
        return found if found is not None and now_s - found.arrived_s >= AGED_S else None

    def _rooms(self, priority: int, running: Sequence[QueueRow], now_s: float) -> tuple[int, int]:
        """What one of this class that has waited can get, in bytes, of a client that runs something
        and of another one; -1 = it gets no place. `_plan` says how."""
        left = self.room.left_bytes
        left += sum(map(self.room.held_bytes, self._droppable(priority, running)))

        def room(*, has_none: bool) -> int:
            parks = victims(priority, running, self._kept(now_s), has_none=has_none)
            if len(running) >= self._places and not parks:
                return -1
            return max(-1, left + sum(map(self.room.held_bytes, parks)))

        return room(has_none=False), room(has_none=True)

    def _droppable(self, priority: int, running: Sequence[QueueRow]) -> list[QueueRow]:
        """Who of the parked may lose its KV for one of this class, in this order."""
        held = reversed(self.holding)
        return [one for one in held if one.priority >= priority or not running]

    def _kept(self, now_s: float) -> QueueRow | None:
        """Who makes place for nobody now."""
        return self._aged if now_s < self._aged_until_s else None

    def _check_deadline(self, row: QueueRow, running: Sequence[QueueRow], now_s: float) -> None:
        if row.expires_s == math.inf:
            return
        others = sum(one.priority <= row.priority for one in running)
        stretch = self._pace.stretch if any(not one.is_prefilling for one in running) else 1.0
        expected_s = first_token_s(
            row,
            self._orders.ahead_of(row),
            running,
            free_places=self._places - others,
            place_every_s=self._pace.place_every_s(self._places),
            stretch=stretch,
        )
        expected_s += self._pace.step_s
        if now_s + expected_s > row.expires_s:
            others = len(self.waiting) - (row.number in self.waiting)
            raise DeadlineExceeded(
                f"the first token is expected in {expected_s:.3g} s, behind "
                f"{len(running)} that run and {others} that wait, and the deadline is in "
                f"{max(0.0, row.expires_s - now_s):.3g} s; allow more time or come back later",
                retry_after_s=max(RETRY_S, expected_s - row.work_s * stretch - self._pace.step_s),
            )

    def _known_tokens(self, job: DecodeJob) -> int:
        """How much of a prompt need not be computed, as far as can be told before it is opened."""
        blocks = sum(one.tokens or self._facts.kv_block_tokens for one in job.offer.blocks)
        kept = self._slots.kept_tokens(job.kv_key) if job.kv_key else 0
        return min(max(blocks, kept), len(job.token_ids) - 1)


def _waited_in_vain(row: QueueRow, now_s: float) -> str:
    return (
        f"the deadline passed after {now_s - row.arrived_s:.1f} s in line, before the first token; "
        "allow more time or come back later"
    )
