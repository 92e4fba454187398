"""Engines that run away, and the guard that ends them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.client import EngineMemoryLimits
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engine.escalation import EngineSight
from kakeya.backends.engine.guard import (
    CLOSE_S,
    IDLE_S,
    LOOK_S,
    TELL_S,
    EngineAllowance,
    Growth,
    GuardedEngine,
)
from kakeya.backends.engine.lease import EngineLease
from kakeya.backends.engine.restart import RestartPolicy
from kakeya.backends.engine.watch import POLL_S, EngineWatch, tenant_name
from kakeya.core.clock import SystemClock
from kakeya.core.errors import PeerUnavailable
from kakeya.generation.facts import Footprint, ModelState
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.events import EngineKilled
from kakeya.memory.arbiter.resident import ResidentKey
from tests.fakes import FakeClock

MIB = 1 << 20
WAIT_S = 60.0


class Guarded:
    """The guard over an engine of which a test says all: what it occupies, whether it answers."""

    def __init__(self, lease: int, budget: int) -> None:
        self.clock, self.occupied, self.is_alive = FakeClock(), 0, True
        self.killed: list[str] = []
        self.signalled: list[int] = []
        self.pid, self.running, self.waiting, self.state = 7, 0, 0, ModelState.READY
        self.limits = EngineMemoryLimits()
        self.on_work: Callable[[], None] = print
        self.arbiter = MemoryArbiter(budget=budget, clock=self.clock)
        self.watch = EngineWatch(
            self.arbiter,
            self.clock,
            resident=lambda _: self.occupied,
            kill=self.signalled.append,
        )
        self.watch.attach("toy", self, lease)  # type: ignore[arg-type]
        self.watched = self.watch._watched["toy"]

    def kill(self, cause: str) -> None:
        self.killed.append(cause)

    def resume(self) -> None:
        pass

    async def answers(self, timeout_s: float) -> bool:
        return self.is_alive

    async def grow(self, *sizes: int, every_s: float = TELL_S) -> list[str]:
        """What it was killed for once it has had these sizes."""
        told: list[Callable[[], None]] = []
        for size in sizes:
            self.occupied = size
            self.watch.guard.tell(self.watched)
            self.watch.guard.look(told.append)
            self.clock.advance(every_s)
        for call in told:
            call()
        return self.killed

    async def ask(self) -> list[str]:
        await self.watch.guard.check_silence(self.watched)
        return self.killed


async def test_an_engine_that_only_is_large_is_left_to_the_escalation() -> None:
    """Its lease was too small; an end would help nothing. Growth within the budget is no danger."""
    here = Guarded(500, 1000)
    assert not await here.grow(600, 900, 940)
    assert len(await here.grow(1400)) == 1
    assert len(await here.grow(1500, 1600)) == 1, "it ends already"
    large = Guarded(500, 1000)
    large.arbiter.set_budget(4000)
    await large.grow(1400)
    large.clock.advance(60)
    large.arbiter.set_budget(1000)
    assert not await large.grow(1400, 1400, 1401)


@pytest.mark.parametrize(("resident", "is_seldom"), [(900, True), (1050, True), (1200, False)])
def test_an_engine_at_rest_is_measured_seldom_unless_a_step_is_near(
    resident: int, is_seldom: bool
) -> None:
    here = Guarded(1000, 4000)
    sight = EngineSight(child=here.pid, resident_bytes=resident, lease_bytes=1000, running=0)
    here.watched.way.see(sight, here.clock.mono())
    here.watched.resident_bytes = here.watched.guarded_bytes = resident
    measured = 0
    for _ in range(100):
        here.clock.advance(POLL_S)
        measured += here.watch._is_due(here.watched)
    assert measured in range(1, 10) if is_seldom else measured == 100


async def test_memory_that_comes_and_goes_beyond_the_budget_is_no_growth() -> None:
    here = Guarded(500, 2000)
    await here.grow(*(1100, 1300) * 10)
    here.arbiter.set_budget(1000)
    assert not await here.grow(*(1100, 1300) * 10)


async def test_slow_growth_beyond_the_budget_ends_it_before_a_twentieth_is_passed() -> None:
    here = Guarded(500, 1000)
    size = 900
    while not await here.grow(size):
        size += 2  # 4 % of its lease a second
    assert size <= 1050


async def test_idle_kv_that_counts_for_its_own_counts_once() -> None:
    here = Guarded(500, 1000)
    watched = here.watched
    watched.footprint = Footprint(resident_bytes=500, idle_kv_bytes=300)
    here.limits, watched.parted_bytes = EngineMemoryLimits(kv_bytes=300), 300
    here.arbiter.grown(tenant_name("toy"))
    assert here.arbiter.status().committed_bytes == 300
    assert not await here.grow(600, 900, 990), "300 of these are the tenant's"
    assert len(await here.grow(1010)) == 1


async def test_an_engine_that_hangs_is_killed_beyond_the_budget_and_probed_within_it() -> None:
    here = Guarded(500, 2000)
    here.is_alive = False
    await here.grow(1100, every_s=60)
    assert not await here.ask()
    here.arbiter.set_budget(1000)
    assert not await here.grow(1100)
    here.is_alive = True
    assert not await here.ask()
    here.is_alive = False
    (why,) = await here.ask()
    assert "answered nothing for 0.8 s" in why


async def test_the_process_is_signalled_at_once_and_only_once() -> None:
    here = Guarded(500, 1000)
    (why,) = await here.grow(600, 1400, 1500, 1600)
    assert here.signalled == [7]
    assert why.startswith("grew to 1.4 KiB")


async def test_a_killed_engine_is_not_ended_again_for_its_silence() -> None:
    here = Guarded(500, 1000)
    here.is_alive = False
    (why,) = await here.grow(600, 1400)
    assert await here.ask() == [why]


async def test_a_larger_lease_counts_before_the_engine_learns_of_it() -> None:
    here = Guarded(500, 1000)
    here.watched.lease.count(800)
    here.watch._measure(here.watched)
    here.occupied = here.watched.lease.bytes
    here.watch.guard.look(lambda call: call())
    assert not here.signalled
    assert here.watched.lease.bytes > 1000


async def test_an_engine_is_ended_while_the_event_loop_is_blocked() -> None:
    here = Guarded(500, 1000)
    here.running = 1
    async with here.watch:
        while not here.watched.growth.peaks:  # until the thread has looked
            await asyncio.sleep(0.001)
        here.occupied = 1400
        until = time.monotonic() + WAIT_S
        while not here.signalled and time.monotonic() < until:
            pass  # no turn of the loop
        assert here.signalled == [7]
        assert not here.killed, "the loop had no turn to hear of it"
        await asyncio.sleep(0.01)
        assert len(here.killed) == 1


@given(pace=st.integers(100, 10_000), room=st.integers(1, 100_000))
def test_steady_growth_is_seen_close_to_the_bound(pace: int, room: int) -> None:
    """It passes the bound by what comes in CLOSE_S at most, or in the first pause without growth.
    `pace` bytes come in LOOK_S, whole ones, so that fewer would have no steady pace."""
    growth, now, most = Growth(), 0.0, 1_000_000 + room
    growth.see(1_000_000, now)
    now += growth.pause_s(most, is_at_work=True)
    while growth.last_bytes <= most:
        growth.see(1_000_000 + round(pace * now / LOOK_S), now)
        pause_s = growth.pause_s(most, is_at_work=True)
        assert CLOSE_S <= pause_s <= LOOK_S
        now += pause_s
    assert growth.last_bytes - most <= max(pace * CLOSE_S / LOOK_S, pace - room) + 2


async def test_the_loop_of_an_idle_guard_wakes_seldom_and_at_once_for_work() -> None:
    here = Guarded(500, 1000)
    running = asyncio.ensure_future(here.watch.guard.run())
    await here.clock.sleep(100 * IDLE_S)
    assert here.clock.sleeps <= 102
    here.running, idle = 1, here.clock.sleeps
    here.on_work()
    await here.clock.sleep(100 * TELL_S)
    assert here.clock.sleeps - idle >= 95
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_guard_without_work_looks_seldom() -> None:
    growth = Growth()
    for at in range(3):
        growth.see(500, float(at))
    assert growth.pause_s(1000, is_at_work=False) == IDLE_S
    assert growth.pause_s(1000, is_at_work=True) == LOOK_S


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=200), st.floats(0.001, 0.5))
def test_memory_that_never_rises_above_its_height_is_no_growth(
    sizes: list[int], every_s: float
) -> None:
    growth = Growth()
    growth.see(max(sizes), 0.0)
    grown = [growth.see(size, (at + 1) * every_s) for at, size in enumerate(sizes)]
    assert max(grown) <= 0


def test_an_allowance_says_what_is_too_much() -> None:
    allowance = EngineAllowance(lease_bytes=300, most_bytes=700, budget_bytes=1000)
    assert not allowance.excess(700)
    assert allowance.excess(701) == (
        "grew to 701 B, beyond its lease of 300 B and the budget of 1000 B"
    )


RUNAWAY = """
import mmap, time
kept = []
while True:
    kept.append(mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    kept[-1].write(b"x" * (8 << 20))
    time.sleep(0.005)
"""


async def test_an_engine_that_runs_away_while_it_loads_is_ended() -> None:
    budget, clock, told = 200 * MIB, SystemClock(), []
    options = EngineOptions(restart=RestartPolicy(max_deaths=2))

    def command(socket: Path) -> tuple[str, ...]:
        return (sys.executable, "-c", RUNAWAY)

    backend = EngineBackend("toy", command, options=options)
    async with MemoryArbiter(budget=budget, clock=clock) as arbiter:
        arbiter.on_event(told.append)
        async with EngineWatch(arbiter, clock) as watch:
            engine = GuardedEngine(ResidentKey("text", "toy"), EngineLease(backend, 100 * MIB))
            with watch.guard.loading(engine):
                async with backend:
                    with pytest.raises(PeerUnavailable, match="beyond its lease"):
                        await backend.ready(WAIT_S)
    ends = [one for one in told if isinstance(one, EngineKilled)]
    assert len(ends) == 2
    assert all(one.bytes > budget for one in ends)
