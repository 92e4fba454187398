"""The node as the granter of leases: real stores, real processes, the real arbiter."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kakeya.core import errors
from kakeya.core.clock import SystemClock
from kakeya.core.units import MIB
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.events import Event, RequestRefused
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import EMBEDDING, RequestPriority
from kakeya.memory.figures import MemoryCounters
from kakeya.memory.leases import rules
from kakeya.memory.leases.borrower import Borrower
from kakeya.memory.leases.keeper import LeaseKeeper
from kakeya.memory.leases.lease import Book, LeaseState, ProcessLease
from kakeya.memory.leases.processes import Census
from kakeya.memory.leases.rules import MachineSight
from kakeya.memory.leases.sqlite import SqliteLeaseStore
from kakeya.memory.leases.store import LeaseStore
from kakeya.memory.machine.pressure import Reading
from tests.fakes import SettableClock
from tests.memory.leases.world import (
    NO_REDIS,
    REDIS,
    MakeStore,
    borrower,
    real_redis,
    redis_stores,
    sqlite_stores,
    wish,
)
from tests.memory.toy import Toy, capability
from tests.waiting import eventually

BUDGET = 1000 * MIB
HOG = """
import sys, time
held = []
for line in sys.stdin:
    held.append(b"x" * (int(line) << 20))
    print("up", flush=True)
"""


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    if request.param == "sqlite":
        yield sqlite_stores(tmp_path)
    elif REDIS is None:
        pytest.skip(NO_REDIS)
    else:
        with real_redis() as redis:
            yield redis_stores(redis.url, "m")


@dataclass
class World:
    """One node's arbiter with a model, its keeper, and somebody who asks."""

    arbiter: MemoryArbiter
    keeper: LeaseKeeper
    store: LeaseStore
    census: Census
    asker: Borrower
    holder_pid: int
    toy: Toy

    def residents(self) -> dict[str, int]:
        return {str(one.key): one.bytes for one in self.arbiter.status().residents}

    def shown(self, lease_id: str) -> dict[str, object]:
        leases = self.keeper.status()["leases"]
        assert isinstance(leases, list)
        return next((one for one in leases if one["id"] == lease_id), {})

    async def lend_to(self, child: subprocess.Popen[bytes], lease_id: str, mb: int) -> ProcessLease:
        """A lease in the name of another process, as `kakeya lease run` gets one."""
        other = borrower(self.store, await asyncio.to_thread(Census, pid=child.pid))
        return await other.acquire(wish(lease_id, mb), lease_id, wait_s=20)


@asynccontextmanager
async def node(
    make: MakeStore, *, name: str = "n1", pid: int | None = None
) -> AsyncIterator[World]:
    toy = Toy()
    arbiter = MemoryArbiter(budget=BUDGET, clock=SystemClock(), grace_s=0.0)
    arbiter.register(capability("embed", EMBEDDING, toy, size=600 * MIB))
    keeper = LeaseKeeper(
        make(),
        arbiter,
        clock=SystemClock(),
        node_id=name,
        poll_s=0.1,
        measure_s=0.2,
        make_census=lambda: Census(pid=pid),
    )
    # A holder of its own: what this process has taken after a thousand tests is no measure.
    with process() as holder:
        census = await asyncio.to_thread(Census, pid=holder.pid)
        async with arbiter, keeper, make() as store:
            asker = borrower(store, census)
            yield World(arbiter, keeper, store, census, asker, holder.pid, toy)


@contextmanager
def process(code: str = HOG) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            yield child
        finally:
            child.kill()


async def until_read(store: LeaseStore, lease_ids: set[str]) -> Book:
    """Wait until the book has these leases."""
    for _ in range(1000):
        book = await store.read()
        if set(book.leases) == lease_ids:
            return book
        await asyncio.sleep(0.02)
    raise AssertionError(f"the book has {set(book.leases)}, not {lease_ids}")


def grow(child: subprocess.Popen[bytes], mb: int) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{mb}\n".encode())
    child.stdin.flush()
    assert child.stdout.readline() == b"up\n"


async def test_an_idle_model_makes_room_and_comes_back_after(make: MakeStore) -> None:
    async with node(make) as world:
        assert await world.arbiter.request("embed", "m", "x") == "m did x"
        lease = await world.asker.acquire(wish("train", 700), "train", wait_s=20)
        assert lease.state is LeaseState.GRANTED
        assert world.residents() == {"job:train": 700 * MIB}
        with pytest.raises(errors.MemoryRefused, match="are lent to job:train; ask again"):
            await world.arbiter.request("embed", "m", "x")
        await world.asker.release("train")
        await eventually("the memory is back", lambda: not world.residents())
        assert await world.arbiter.request("embed", "m", "y") == "m did y"
        assert world.arbiter.status().free_bytes == 400 * MIB


async def test_a_model_in_use_is_never_taken_and_the_command_hears_why_it_waits(
    make: MakeStore,
) -> None:
    async with node(make) as world:
        told: list[str] = []
        async with world.arbiter.acquire("embed", "m"):
            asking = asyncio.ensure_future(
                world.asker.acquire(wish("train", 700), "train", tell=told.append)
            )
            await eventually("it is told", lambda: any("embed:m in use" in one for one in told))
            assert world.toy.live == {"m"}
        assert (await asking).state is LeaseState.GRANTED
        assert world.toy.live == set()


async def test_what_never_fits_is_refused_at_once_in_the_arbiters_words(make: MakeStore) -> None:
    async with node(make) as world:
        with pytest.raises(
            errors.MemoryRefused, match=r"needs 1\.5 GiB; the budget is 1000\.0 MiB"
        ):
            await world.asker.acquire(wish("train", 1500), "train")
        assert (await world.store.read()).leases == {}
        assert world.arbiter.status().waiting == ()


async def test_critical_pressure_keeps_a_lease_waiting_until_it_has_passed(
    make: MakeStore,
) -> None:
    async with node(make) as world:
        critical = Reading(level=PressureLevel.CRITICAL, source="test", available_bytes=None)
        world.arbiter.observe(critical)
        told: list[str] = []
        asking = asyncio.ensure_future(
            world.asker.acquire(wish("train", 100), "train", tell=told.append)
        )
        await eventually("it is told", lambda: any("critical" in one for one in told))
        world.arbiter.observe(replace(critical, level=PressureLevel.NOMINAL))
        assert (await asking).state is LeaseState.GRANTED


async def test_a_holder_that_is_killed_gives_its_memory_and_resources_back(
    make: MakeStore,
) -> None:
    async with node(make) as world:
        with process() as child:
            await world.lend_to(child, "train", 900)
            child.send_signal(signal.SIGKILL)
            await eventually("the memory is back", lambda: not world.residents())
            assert (await world.store.read()).leases == {}
        assert world.arbiter.status().free_bytes == BUDGET


async def test_a_lease_that_waits_leaves_the_line_with_its_process(make: MakeStore) -> None:
    async with node(make) as world:
        await world.asker.acquire(wish("first", 900), "first")
        with process() as child:
            asking = asyncio.ensure_future(world.lend_to(child, "second", 900))
            await eventually("it waits", lambda: world.shown("second").get("state") == "waiting")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await eventually("it is gone", lambda: not world.shown("second"))
        assert world.arbiter.status().waiting == ()
        assert world.residents() == {"job:first": 900 * MIB}


async def test_leases_queue_for_each_other_and_nobody_is_overtaken(make: MakeStore) -> None:
    async with node(make) as world:
        counters, told, happened = MemoryCounters(), list[str](), list[Event]()
        world.arbiter.on_event(counters.take)
        world.arbiter.on_event(happened.append)
        await world.asker.acquire(wish("first", 600), "first")
        asking = world.asker.acquire(wish("big", 900), "big", tell=told.append)
        big = asyncio.ensure_future(asking)
        await eventually("it waits", lambda: world.shown("big"))
        small = asyncio.ensure_future(world.asker.acquire(wish("small", 200), "small"))
        await eventually("it waits too", lambda: world.shown("small"))
        await eventually("it is told", lambda: "first (pid" in str(world.shown("big").get("note")))
        assert world.shown("small")["state"] == "waiting"
        await eventually(
            "it was asked for again",
            lambda: sum(isinstance(one, RequestRefused) for one in happened) >= 3,
        )
        assert len(set(told)) == len(told) <= 3, "it hears what is new, not how often it is asked"
        assert not counters.refusals, "who waits on was not refused"
        await world.asker.release("first")
        await big
        await world.asker.release("big")
        await small


async def test_named_resources_are_taken_before_memory_and_given_back_with_it(
    make: MakeStore,
) -> None:
    async with node(make) as world:
        await world.asker.acquire(wish("first", 100, "gpu:0"), "first")
        asking = asyncio.ensure_future(
            world.asker.acquire(wish("second", 100, "gpu:0", "gpu:1"), "second")
        )
        await eventually(
            "it is told", lambda: "gpu:0, which first" in str(world.shown("second").get("note"))
        )
        assert "job:second" not in world.residents()
        await world.asker.release("first")
        assert (await asking).taken == ("gpu:0", "gpu:1")


async def test_the_ledger_counts_what_a_holder_really_uses(
    make: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with node(make) as world:
        with process() as child:
            await world.lend_to(child, "train", 100)
            assert world.residents() == {"job:train": 100 * MIB}
            await asyncio.to_thread(grow, child, 200)
            await eventually("it is measured", lambda: world.residents()["job:train"] > 200 * MIB)
            assert world.shown("train")["is_over"]
            assert "a holder uses more than it leased" in caplog.text
        await eventually("the memory is back", lambda: not world.residents())
        assert world.arbiter.status().free_bytes == BUDGET


async def test_what_a_holder_does_not_use_yet_is_not_lent_to_others(make: MakeStore) -> None:
    async with node(make) as world:
        with process() as child:
            await world.lend_to(child, "train", 500)
            calm = Reading(level=PressureLevel.NOMINAL, source="test", available_bytes=600 * MIB)
            world.arbiter.observe(calm)
            await eventually("it is measured", lambda: world.shown("train")["used_bytes"])
            free = world.arbiter.status().free_bytes
            assert 100 * MIB <= free < 200 * MIB


async def test_a_node_that_starts_counts_who_holds_a_lease(make: MakeStore) -> None:
    with process() as child:
        async with node(make) as world:
            await world.lend_to(child, "train", 700)
        async with make() as store:
            book = await store.read()
            assert book.leases["train"].state is LeaseState.GRANTED
            assert book.granter is None
            assert book.budget_bytes == BUDGET
        async with node(make) as world:
            assert world.arbiter.status().foreign == {"job:train": 700 * MIB}
            little = Reading(level=PressureLevel.NOMINAL, source="test", available_bytes=800 * MIB)
            world.arbiter.observe(little)
            assert world.arbiter.status().free_bytes < 200 * MIB, "what it may still use is its own"
            assert not world.arbiter.would_grant("embed", "m")
            child.send_signal(signal.SIGKILL)
            await eventually("it is seen", lambda: not world.arbiter.status().foreign)
            assert await world.arbiter.request("embed", "m", "x") == "m did x"


async def test_who_waits_while_the_node_dies_is_served_without_it(make: MakeStore) -> None:
    census = await asyncio.to_thread(Census)
    async with make() as store:
        with process() as ghost:
            granter = await asyncio.to_thread(census.identify, ghost.pid)
            sight = MachineSight(boot=census.boot, now_mono=SystemClock().mono())
            await store.change(
                lambda book: (rules.become_granter(book, "ghost", granter, BUDGET, sight), None)
            )
            told: list[str] = []
            asking = asyncio.ensure_future(
                borrower(store, census).acquire(wish("train", 100), "train", tell=told.append)
            )
            await eventually("it waits for the node", lambda: "node ghost to make room" in told)
        assert (await asking).state is LeaseState.GRANTED
        assert (await store.read()).granter is None


async def test_of_two_nodes_that_share_a_store_one_grants_and_both_count(make: MakeStore) -> None:
    with process() as other:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(node(make, name="first"))
            async with node(make, name="second", pid=other.pid) as second:
                await first.asker.acquire(wish("train", 300), "train")
                held = 300 * MIB
                await eventually(
                    "both count it",
                    lambda: (
                        first.arbiter.status().committed_bytes == held
                        and second.arbiter.status().committed_bytes == held
                    ),
                )
                assert first.keeper.is_granter
                assert not second.keeper.is_granter
                await stack.aclose()
                await eventually("the other grants", lambda: second.keeper.is_granter)
                await second.asker.acquire(wish("next", 700), "next")


async def test_a_drain_refuses_who_waits_and_lets_holders_end(make: MakeStore) -> None:
    async with node(make) as world:
        await world.asker.acquire(wish("holder", 900), "holder")
        asking = asyncio.ensure_future(world.asker.acquire(wish("waits", 900), "waits"))
        await eventually("it waits", lambda: world.shown("waits"))
        sight = MachineSight(boot=world.census.boot, now_mono=0.0)
        await world.store.change(lambda book: (rules.begin_drain(book, sight, 7, 0.0), None))
        with pytest.raises(errors.LeaseRefused, match="drained"):
            await asking
        with pytest.raises(errors.LeaseRefused, match="--off"):
            await world.asker.acquire(wish("late", 1), "late")
        assert world.residents() == {"job:holder": 900 * MIB}
        await eventually("it is seen", lambda: world.keeper.status()["is_drained"])


async def test_a_store_that_was_lost_loses_no_lease(make: MakeStore) -> None:
    async with node(make) as world:
        await world.asker.acquire(wish("train", 700, "gpu:0"), "train")
        await eventually("it is seen", lambda: world.shown("train").get("state") == "granted")
        await world.store.change(lambda book: (Book(), None))
        book = await until_read(world.store, {"train"})
        assert book.leases["train"].taken == ("gpu:0",)
        assert book.leases["train"].state is LeaseState.GRANTED
        assert world.residents() == {"job:train": 700 * MIB}


async def test_a_file_that_is_damaged_under_a_node_is_set_aside_and_goes_on(tmp_path: Path) -> None:
    make = sqlite_stores(tmp_path)
    async with node(make) as world:
        await world.asker.acquire(wish("train", 700), "train")
        await eventually("it is seen", lambda: world.shown("train").get("state") == "granted")
        (tmp_path / "leases.db").write_bytes(b"no database" * 1000)
        for part in ("-wal", "-shm"):
            (tmp_path / f"leases.db{part}").unlink(missing_ok=True)
        async with make() as store:  # another process, which reads the file itself
            await borrower(store, world.census).acquire(wish("next", 100), "next")
            await until_read(store, {"train", "next"})
        await eventually(
            "both are counted", lambda: world.arbiter.status().committed_bytes == 800 * MIB
        )
        assert (tmp_path / "leases.db.corrupt").exists()


async def test_a_redis_that_ends_stops_grants_and_nothing_else() -> None:
    if REDIS is None:
        pytest.skip(NO_REDIS)
    with real_redis() as redis:
        async with node(redis_stores(redis.url, "m")) as world:
            with process() as child:
                await world.lend_to(child, "train", 300)
                await world.asker.acquire(wish("kept", 300), "kept")
                await asyncio.to_thread(redis.stop)
                await eventually("it is told", lambda: world.keeper.status()["problem"])
                assert set(world.residents()) == {"job:train", "job:kept"}
                child.send_signal(signal.SIGKILL)
                await eventually("death is seen", lambda: "job:train" not in world.residents())
            await asyncio.to_thread(redis.start)
            await eventually("it is used again", lambda: not world.keeper.status()["problem"])
            assert set(world.residents()) == {"job:kept"}
            await world.asker.acquire(wish("next", 600), "next")


async def test_a_node_starts_and_stops_though_its_store_is_out_of_order(tmp_path: Path) -> None:
    async with node(redis_stores(f"unix://{tmp_path}/none.sock", "m")) as world:
        assert "cannot be used" in str(world.keeper.status()["problem"])
        assert await world.arbiter.request("embed", "m", "x") == "m did x"


async def test_a_wall_clock_that_is_set_ends_no_lease(tmp_path: Path) -> None:
    """Stamps are monotonic: the book holds no wall time but what people are shown."""
    clock = SettableClock()
    arbiter = MemoryArbiter(budget=BUDGET, clock=clock, grace_s=0.0)
    make = sqlite_stores(tmp_path)
    keeper = LeaseKeeper(make(), arbiter, clock=clock, node_id="n", poll_s=0.01, measure_s=0.01)
    census = await asyncio.to_thread(Census)
    async with arbiter, keeper, make() as store:
        lease = await borrower(store, census).acquire(wish("train", 700), "train")
        for jump_s in (-1e9, 1e9):
            clock.shift_wall(jump_s)
            await asyncio.sleep(0.1)
        clock.advance(1e6)  # as if nobody beat for days: the process is seen to live
        await asyncio.sleep(0.1)
        assert lease.lease_id in (await store.read()).leases
        assert arbiter.status().committed_bytes == 700 * MIB


async def test_a_node_without_a_lease_writes_nothing_as_time_passes(tmp_path: Path) -> None:
    class Counted(SqliteLeaseStore):
        reads = 0

        async def read(self) -> Book:
            self.reads += 1
            return await super().read()

    clock, store = SettableClock(), Counted(tmp_path / "leases.db")
    arbiter = MemoryArbiter(budget=BUDGET, clock=clock, grace_s=0.0)
    keeper = LeaseKeeper(store, arbiter, clock=clock, node_id="n", poll_s=0.01)
    async with arbiter, keeper:
        assert keeper.is_granter
        log = tmp_path / "leases.db-wal"
        before, seen = log.read_bytes(), store.reads
        clock.advance(3600)
        await eventually("it looks on", lambda: store.reads > seen + 3)
        assert log.read_bytes() == before


async def test_status_says_who_holds_and_who_waits(make: MakeStore) -> None:
    async with node(make) as world:
        await world.asker.acquire(wish("train", 700, "gpu:0"), "train")
        await eventually("it is seen", lambda: world.shown("train").get("state") == "granted")
        shown = world.shown("train")
        assert (
            shown.items()
            >= {
                "name": "train",
                "bytes": 700 * MIB,
                "priority": "normal",
                "resources": ["gpu:0"],
                "pid": world.holder_pid,
                "is_over": False,
            }.items()
        )
        status = world.keeper.status()
        assert status["is_granter"]
        assert not status["problem"]
        assert [task.failures for task in world.keeper.health()] == [0, 0]


async def test_an_urgent_lease_goes_before_one_that_can_wait(make: MakeStore) -> None:
    async with node(make) as world:
        await world.asker.acquire(wish("holder", 900), "holder")
        batch, urgent = (
            wish(name, 900, priority=RequestPriority[name.upper()]) for name in ("batch", "urgent")
        )
        later = asyncio.ensure_future(world.asker.acquire(batch, "batch"))
        await eventually("it waits", lambda: world.shown("batch"))
        sooner = asyncio.ensure_future(world.asker.acquire(urgent, "urgent"))
        await eventually("it waits too", lambda: world.shown("urgent"))
        await world.asker.release("holder")
        await sooner
        assert not later.done()
        await world.asker.release("urgent")
        await later
