"""Laws of the queue: conservation, room, urgency and promises, over whatever may happen to it."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kakeya.core.errors import DeadlineExceeded, KakeyaError, KvRefused, MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.engine.kv.slots import KvSlots
from kakeya.engine.queue.pace import Pace
from kakeya.engine.queue.policy import (
    AGED_S,
    EQUAL_TOKENS,
    FLOOR_TURNS,
    HELD_S,
    OUTPUT_WEIGHT,
    Account,
)
from kakeya.engine.queue.queue import LOOK_S, EngineQueue
from kakeya.engine.queue.room import KvRoom
from kakeya.engine.queue.rows import Admitted, QueueRow, QueueTicket
from kakeya.generation.request import DecodeJob
from tests.engine.virtual_rig import Told, VirtualRig, expected

FACTS = VirtualRig(
    prefill_tokens_per_second=512.0, kv_bytes_per_token=1, context_tokens=4096
).model.facts
PLACES = 3


class World:
    """A queue, and a scheduler that does nothing but perform its decisions."""

    def __init__(self, kv_bytes: int = 4096) -> None:
        self.slots = KvSlots(kv_bytes)
        self.room = KvRoom(self.slots, FACTS)
        self.pace = Pace(FACTS)
        self.queue = EngineQueue(self.room, self.slots, FACTS, self.pace, places=PLACES)
        self.running: list[QueueRow] = []
        self.now_s = 0.0
        self.arrived = self.over = 0

    def arrive(self, prompt: int, max_tokens: int = 1, **job: object) -> QueueRow | KakeyaError:
        """The row that waits now, or the refusal."""
        wanted = DecodeJob(token_ids=range(prompt), max_tokens=max_tokens, **job)  # type: ignore[arg-type]
        ticket = QueueTicket(wanted, lambda frame: None, lambda error: None)
        try:
            self.queue.arrive(ticket, self.running, self.now_s)
        except KakeyaError as refusal:
            return refusal
        self.arrived += 1
        return self.queue.waiting[-1]

    def look(self) -> tuple[list[KakeyaError | None], list[Admitted]]:
        """Perform one look at the queue: errors of rows that left, and entries, in order."""
        left = self.queue.departures(self.running, self.now_s)
        for row, _ in left:
            self.leave(row)
        entries = []
        while (entry := self.queue.next_entry(self.running, self.now_s)) is not None:
            entries.append(entry)
            for row in entry.parks:
                self.park(row)
            for row in entry.drops:
                self.leave(row)
            self.place(entry.row)
        return [error for _, error in left], entries

    def place(self, row: QueueRow) -> None:
        self.queue.enter(row)
        self.running.append(row)
        if row.run is None:
            row.run = SimpleNamespace(length=0)  # type: ignore[assignment]
        self.room.enter(row, row.ticket.job, row.length)
        self.queue.charge(row)
        row.is_prefilling = row.prompt_left > 0

    def park(self, row: QueueRow) -> None:
        self.queue.refund(row)
        self.running.remove(row)
        self.room.park(row, row.length)
        self.queue.park(row)

    def leave(self, row: QueueRow) -> None:
        self.over += 1
        if row in self.running:
            self.queue.refund(row)
            self.running.remove(row)
            self.queue.ended(row)
        else:
            self.queue.leave(row)
        self.room.leave(row)

    def step(self, row: QueueRow, tokens: int) -> None:
        made = min(tokens, row.prompt_left) or tokens
        if not row.prompt_left:
            row.account.pay(OUTPUT_WEIGHT * made)
            row.expires_s = math.inf
        row.run.length += made  # type: ignore[union-attr, misc]
        row.work_s = self.queue.prompt_s(row)
        row.is_prefilling = row.prompt_left > 0
        self.room.grown(row, row.length)


class QueueLaws(RuleBasedStateMachine):
    """Everything that may happen to a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(
        client=st.sampled_from("abcdefg"),
        user=st.sampled_from(["", "", "x", "y", "z"]),
        priority=st.sampled_from([2, 2, 2, 0, 1, 3, 4, 5, 9]),
        prompt=st.integers(1, 2500),
        max_tokens=st.sampled_from([1, 200, 2000]),
        deadline_s=st.sampled_from([None, None, None, 0.25, 4.0, 30.0]),
        count=st.sampled_from([1, 1, 1, 12]),
    )
    def arrive(self, count, **job):
        for _ in range(count):
            refusal = self.world.arrive(**job)
            if isinstance(refusal, MemoryRefused):
                assert job["prompt"] + job["max_tokens"] > self.world.room.longest_tokens
            elif isinstance(refusal, DeadlineExceeded):
                assert job["deadline_s"] is not None

    @rule()
    def look(self):
        """Entries have room, and park nothing that is more urgent."""
        world = self.world
        fitted = world.room.holds
        waiting = list(world.queue.waiting)
        errors, entries = world.look()
        assert errors.count(None) == sum(row.ticket.cancelled for row in waiting)
        for entry in entries:
            assert all(row.priority >= entry.row.priority for row in entry.parks)
        assert len(world.running) <= PLACES
        if fitted:
            assert world.room.holds
        assert world.queue.next_entry(world.running, world.now_s) is None
        assert not world.queue.is_due(world.now_s)
        assert world.queue.is_due(world.now_s + LOOK_S) == bool(world.queue.waiting)

    @rule(eighths=st.sampled_from([1, 8, 17, 81, 600]))
    def wait(self, eighths):
        self.world.now_s += eighths / 8
        self.look()

    @precondition(lambda self: bool(self.world.running))
    @rule(at=st.integers(0, 9), tokens=st.sampled_from([1, 256, EQUAL_TOKENS]))
    def step(self, at, tokens):
        self.world.step(self.world.running[at % len(self.world.running)], tokens)

    @precondition(lambda self: bool(self.world.running))
    @rule(at=st.integers(0, 9))
    def end(self, at):
        self.world.pace.ended(2.0)
        self.world.leave(self.world.running[at % len(self.world.running)])
        self.look()

    @precondition(lambda self: bool(self.world.queue.waiting))
    @rule(at=st.integers(0, 99))
    def cancel(self, at):
        waiting = self.world.queue.waiting
        waiting[at % len(waiting)].ticket.cancel()
        assert self.world.queue.is_due(self.world.now_s)

    @precondition(lambda self: bool(self.world.queue.parked))
    @rule()
    def drop_parked(self):
        self.world.leave(self.world.queue.parked[-1])

    @rule(kv_bytes=st.sampled_from([1024, 4096, 4096, 8192]))
    def bound(self, kv_bytes):
        self.world.slots.set_budget(kv_bytes)

    @invariant()
    def each_generation_waits_runs_or_is_over(self):
        world = self.world
        waiting, running = world.queue.waiting, world.running
        assert not set(waiting) & set(running)
        assert world.arrived == len(waiting) + len(running) + world.over
        assert [row for row in waiting if row.run is not None] == world.queue.parked

    @invariant()
    def accounts_count_the_generations_that_are_here(self):
        def count(rows: list[QueueRow]) -> Counter[Account]:
            accounts = [one for row in rows for one in (row.account, row.account.owner)]
            return Counter(one for one in accounts if one is not None)

        waiting, running = count(self.world.queue.waiting), count(self.world.running)
        for account in {*waiting, *running}:
            assert account.used >= 0
            assert account.waiting == waiting[account]
            assert account.running == running[account]


QueueLaws.TestCase.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)
TestQueueLaws = QueueLaws.TestCase


def waiting_row(row: QueueRow | KakeyaError) -> QueueRow:
    assert isinstance(row, QueueRow)
    return row


def test_each_eighth_place_goes_by_age_to_the_oldest_that_fits() -> None:
    world = World()
    large = waiting_row(world.arrive(3500, client="large", priority=4))
    old = waiting_row(world.arrive(10, client="old", priority=4))
    world.now_s = AGED_S
    for at in range(2 * FLOOR_TURNS):
        world.arrive(600, 400, client=f"{at}", priority=2)
    order = []
    while old in world.queue.waiting:
        order += [entry.row for entry in world.look()[1]]
        world.leave(world.running[0])
    assert order.index(old) == FLOOR_TURNS - 1
    assert large in world.queue.waiting


def test_a_place_by_age_is_kept_from_those_that_were_overtaken() -> None:
    world = World()
    old = waiting_row(world.arrive(10, client="old", priority=4))
    world.now_s = AGED_S
    for at in range(3 * FLOOR_TURNS):
        world.arrive(10, client=f"{at}", priority=2)
    while old in world.queue.waiting:
        world.look()
        world.leave(next(row for row in world.running if row is not old))
    world.look()
    assert old in world.running
    world.now_s += AGED_S
    world.look()
    assert old in world.queue.parked


def test_kv_of_the_row_that_was_parked_last_goes_first() -> None:
    world = World(4096)
    rows = [waiting_row(world.arrive(1000, 24)) for _ in range(2)]
    world.look()
    for row in rows:
        world.step(row, 999)
        world.park(row)
    urgent = waiting_row(world.arrive(2500, priority=0))
    entry = world.queue.next_entry(world.running, 0.0)
    assert entry == Admitted(row=urgent, drops=(rows[1],))


def test_a_request_that_only_fitted_a_larger_bound_is_refused_when_that_is_gone() -> None:
    """Even when no look came in between."""
    world = World(2048)
    world.slots.set_budget(8192)
    world.arrive(4000, 96)
    world.slots.set_budget(2048)
    errors, entries = world.look()
    assert [type(error) for error in errors] == [KvRefused]
    assert entries == []


def test_a_row_that_began_within_a_larger_bound_is_refused_when_it_is_parked() -> None:
    """It would go before others for ever, and never fit."""
    world = World(4096)
    row = waiting_row(world.arrive(10, 2000))
    assert [entry.row for entry in world.look()[1]] == [row]
    world.slots.set_budget(1024)
    assert world.look() == ([], [])
    world.park(row)
    assert [type(error) for error in world.look()[0]] == [KvRefused]


def test_a_row_that_was_promised_the_next_place_gets_it_before_the_first_one() -> None:
    """Rows that were parked for it wait too, and would take the place back."""
    world = World(4096)
    queue = world.queue
    second, first, _ = (waiting_row(world.arrive(prompt)) for prompt in (200, 10, 100))

    def next_row() -> QueueRow | None:
        entry = queue.next_entry(world.running, 0.0)
        return None if entry is None else entry.row

    assert next_row() is first
    queue.promise(second)
    assert next_row() is second
    assert next_row() is first  # it is promised anew each time
    queue.promise(second)
    world.leave(second)
    assert next_row() is first


# --- a holder of the queue beside urgent requests, in virtual time

BLOCK = KV_BLOCK_TOKENS
LARGE = 10 * BLOCK
"""Of a prompt: with its answer it takes 11 of 12 blocks."""


def prompt(length: int, start: int = 3) -> list[int]:
    return [(start + 7 * at) % 100 for at in range(length)]


def waits_s(told: list[Told], every_s: float) -> list[float]:
    return [one.at_s[0] - (1.0 + every_s * at) for at, one in enumerate(told)]


@pytest.mark.parametrize("priority", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_an_urgent_request_does_not_wait_for_a_less_urgent_holder(priority: int) -> None:
    rig = VirtualRig(places=8, kv_bytes=12 * BLOCK)
    for at in range(18):
        rig.submit(4.0 * at + 0.1, token_ids=prompt(100, at), max_tokens=1900, client=f"{at % 3}")
    large = rig.submit(
        0.5,
        token_ids=prompt(LARGE, 50),
        max_tokens=4 if priority < 5 else 0,
        priority=priority,
        client="large",
    )
    urgent = [
        rig.submit(1.0 + 0.5 * at, token_ids=prompt(20, at), max_tokens=2, priority=0, client="u")
        for at in range(160)
    ]
    rig.run()
    assert max(waits_s(urgent, 0.5)) < 0.5
    assert large.done is not None
    if priority < 5:
        # It holds the queue for as long as running ones go on, each for less than ten seconds.
        assert HELD_S < large.at_s[0] < HELD_S + 20.0
    assert all(one.tokens == expected(one.job.token_ids, 2) for one in urgent)


@pytest.mark.parametrize("priority", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_holder_gets_its_turn_though_urgent_requests_never_end(priority: int) -> None:
    """Together they always take more than it leaves them, and none of them waits for long."""
    rig = VirtualRig(places=8, kv_bytes=12 * BLOCK)
    rig.submit(0.2, token_ids=prompt(100), max_tokens=2900, client="load")
    large = rig.submit(0.5, token_ids=prompt(LARGE, 50), max_tokens=4, priority=priority)
    urgent = [
        rig.submit(1.0 + 0.2 * at, token_ids=prompt(20, at), max_tokens=200, priority=0, client="u")
        for at in range(360)
    ]
    rig.run()
    assert large.tokens == expected(large.job.token_ids, 4)
    assert large.at_s[0] < HELD_S + 10.0
    assert max(waits_s(urgent, 0.2)) < 5.0
