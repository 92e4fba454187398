"""The line decides what its definition says, whatever comes: heaps and sums lose nobody."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kakeya.core.errors import KakeyaError
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.queue import fair_shares as shares
from kakeya.engine.queue import waiting
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import EQUAL_TOKENS, OUTPUT_WEIGHT
from kakeya.engine.queue.queue import Line
from kakeya.engine.queue.room import KvRoom
from kakeya.engine.queue.rows import QueueRow, QueueTicket
from kakeya.generation.request import DecodeJob
from tests.engine.linear_line import LinearLine
from tests.engine.virtual_rig import VirtualRig

FACTS = VirtualRig(
    prefill_tokens_per_second=512.0, kv_bytes_per_token=1, context_tokens=4096
).model.facts
"""A token of a prompt takes a whole number of nanoseconds: sums are exact in any order."""
PLACES = 3


class Side:
    """One of the two lines, and a scheduler that does nothing but what the line says."""

    def __init__(self, kind: str, pace: Pace, kv_bytes: int) -> None:
        self.slots = KvSlots(kv_bytes)
        self.room = KvRoom(self.slots, FACTS)
        self.line: Line | LinearLine
        if kind == "line":
            self.line = Line(self.room, self.slots, FACTS, pace, places=PLACES)
        else:
            self.line = LinearLine(self.room, pace, places=PLACES)
        self.running: list[QueueRow] = []

    def waiting(self) -> list[QueueRow]:
        held = self.line.waiting
        rows = list(held.values()) if isinstance(held, dict) else held
        return sorted(rows, key=lambda row: row.number)

    def arrive(self, job: DecodeJob, now_s: float) -> str:
        ticket = QueueTicket(job, lambda frame: None, lambda error: None)
        try:
            self.line.arrive(ticket, self.running, now_s)
        except KakeyaError as refusal:
            return f"{type(refusal).__name__} {refusal.message.split(', behind')[0]}"
        return ""

    def look(self, now_s: float) -> list[object]:
        """What a look at the line comes to, done as said."""
        said: list[object] = []
        for row, error in sorted(
            self.line.gone(self.running, now_s), key=lambda pair: pair[0].number
        ):
            said.append(("gone", row.number, type(error).__name__))
            self.leave(row)
        while (entry := self.line.next_entry(self.running, now_s)) is not None:
            said.append(
                (entry.row.number, [r.number for r in entry.parks], [r.number for r in entry.drops])
            )
            for row in entry.parks:
                self.park(row)
            for row in entry.drops:
                self.leave(row)
            self.place(entry.row)
        return said

    def place(self, row: QueueRow) -> None:
        self.line.enter(row)
        self.running.append(row)
        if row.run is None:
            row.run = SimpleNamespace(length=0)  # type: ignore[assignment]
        self.room.enter(row, row.ticket.job, row.length)
        self.line.charge(row)
        row.is_prefilling = row.prompt_left > 0

    def park(self, row: QueueRow) -> None:
        self.line.refund(row)
        self.running.remove(row)
        self.room.park(row, row.length)
        self.line.park(row)

    def leave(self, row: QueueRow) -> None:
        if row in self.running:
            self.line.refund(row)
            self.running.remove(row)
            self.line.ended(row)
        else:
            self.line.leave(row)
        self.room.leave(row)

    def step(self, at: int, tokens: int) -> None:
        row = self.running[at % len(self.running)]
        made = min(tokens, row.prompt_left) or tokens
        if not row.prompt_left:
            row.account.pay(OUTPUT_WEIGHT * made)
            row.expires_s = math.inf
        row.run.length += made  # type: ignore[union-attr, misc]
        last = len(row.ticket.job.token_ids) - 1
        row.work_s = max(0, last - row.length) / 512
        row.is_prefilling = row.prompt_left > 0
        self.room.grown(row, row.length)

    def facts(self) -> list[object]:
        return [
            (row.number, one.used, one.waiting, one.running)
            for row in [*self.waiting(), *self.running]
            for one in (row.account, row.account.owner)
            if one is not None
        ] + [row.number for row in self.line.parked]


class Both(RuleBasedStateMachine):
    """All that may happen to a line, to both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.pace = Pace(FACTS)
        self.sides = [Side(kind, self.pace, 4096) for kind in ("line", "linear")]

    def both(self, act):
        ours, linear = (act(side) for side in self.sides)
        assert ours == linear
        return ours

    @rule(
        client=st.sampled_from("abcdefg"),
        user=st.sampled_from(["", "", "x", "y", "z"]),
        priority=st.sampled_from([1, 1, 1, 0, 2, 3, 9]),
        prompt=st.integers(1, 2500),
        max_tokens=st.sampled_from([1, 200, 2000]),
        deadline_s=st.sampled_from([None, None, None, 0.25, 4.0, 30.0]),
        count=st.sampled_from([1, 1, 1, 12]),
    )
    def arrive(self, client, user, priority, prompt, max_tokens, deadline_s, count):
        for _ in range(count):
            job = DecodeJob(
                token_ids=range(prompt),
                max_tokens=max_tokens,
                client=client,
                user=user,
                priority=priority,
                deadline_s=deadline_s,
            )
            self.both(lambda side, job=job: side.arrive(job, self.now_s))

    @rule()
    def look(self):
        self.both(lambda side: side.look(self.now_s))

    @rule(eighths=st.sampled_from([1, 8, 17, 81, 600]))
    def wait(self, eighths):
        self.now_s += eighths / 8
        self.look()

    def runs(self) -> bool:
        return bool(self.sides[0].running)

    @precondition(runs)
    @rule(at=st.integers(0, 9), tokens=st.sampled_from([1, 256, EQUAL_TOKENS]))
    def step(self, at, tokens):
        self.both(lambda side: side.step(at, tokens))

    @precondition(runs)
    @rule(at=st.integers(0, 9))
    def end(self, at):
        self.pace.ended(2.0)
        self.both(lambda side: side.leave(side.running[at % len(side.running)]))
        self.look()

    @precondition(lambda self: bool(self.sides[0].waiting()))
    @rule(at=st.integers(0, 99))
    def give_up(self, at):
        def act(side):
            rows = side.waiting()
            rows[at % len(rows)].ticket.cancel()

        self.both(act)

    @precondition(lambda self: bool(self.sides[0].line.parked))
    @rule()
    def drop_parked(self):
        self.both(lambda side: side.leave(side.line.parked[-1]))

    @rule(kv_bytes=st.sampled_from([1024, 4096, 4096, 8192]))
    def bound(self, kv_bytes):
        self.both(lambda side: side.slots.set_budget(kv_bytes))

    @invariant()
    def they_agree(self):
        self.both(Side.facts)


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made anew and split at sizes that are reached here."""
    monkeypatch.setattr(waiting, "_RUN", 4)
    monkeypatch.setattr(waiting, "_FEW", 3)
    monkeypatch.setattr(shares, "_SPARE", 4)
    monkeypatch.setattr(shares, "_STALE_ENTRIES", 2)
    monkeypatch.setattr(shares, "_KEPT_CLIENTS", 2)


def test_the_line_decides_as_one_that_looks_through_all() -> None:
    run_state_machine_as_test(
        Both, settings=settings(deadline=None, max_examples=8, stateful_step_count=30)
    )


def test_so_it_does_behind_very_many() -> None:
    rng = random.Random(7)
    both = Both()
    for at in range(400):
        client, user = f"client {rng.randrange(90)}", rng.choice("xyz")
        both.arrive(client, user, rng.choice([0, 1, 1, 2]), 1 + at, 200, None, 1)
    for at in range(400):
        both.now_s += rng.choice([0.0, 0.125, 2.0])
        client, user = f"client {rng.randrange(90)}", rng.choice("xyz")
        both.arrive(client, user, 1, 1 + rng.randrange(900), 200, None, 1)
        if both.runs():
            both.step(at, 100)
            both.end(rng.randrange(9))
        if rng.random() < 0.2:
            both.give_up(rng.randrange(999))
        both.they_agree()
    assert len(both.sides[0].waiting()) > 200


def test_who_came_while_there_was_more_room_is_refused_when_it_is_gone_again() -> None:
    """Even when nobody looked at the line in between."""
    side = Side("line", Pace(FACTS), 2048)
    assert side.look(0.0) == []
    side.slots.set_budget(8192)
    side.arrive(DecodeJob(token_ids=range(4000), max_tokens=96), 0.0)
    side.slots.set_budget(2048)
    assert side.look(0.0) == [("gone", 1, "MemoryRefused")]


def test_who_began_while_there_was_more_room_is_refused_when_it_is_parked_without() -> None:
    """It would go before others for ever, and never fit."""
    side = Side("line", Pace(FACTS), 4096)
    side.arrive(DecodeJob(token_ids=range(10), max_tokens=2000), 0.0)
    assert side.look(0.0) == [(1, [], [])]
    side.slots.set_budget(1024)
    assert side.look(0.0) == []
    side.park(side.running[0])
    assert side.look(0.0) == [("gone", 1, "MemoryRefused")]


def test_who_was_promised_the_next_place_gets_it_before_those_that_go_first() -> None:
    """Those that made place for it wait too, and would take it back."""
    side = Side("line", Pace(FACTS), 4096)
    line = side.line
    assert isinstance(line, Line)
    for prompt in (200, 10, 100):
        side.arrive(DecodeJob(token_ids=range(prompt), max_tokens=1), 0.0)
    first, second = side.waiting()[1], side.waiting()[0]

    def next_row() -> QueueRow | None:
        entry = line.next_entry(side.running, 0.0)
        return None if entry is None else entry.row

    assert next_row() is first
    line.promise(second)
    assert next_row() is second
    assert next_row() is first  # it is promised anew each time
    line.promise(second)
    side.leave(second)
    assert next_row() is first
