"""One contract for every store of leases: SQLite and a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core import errors
from kakeya.memory.arbiter.resident import RequestPriority
from kakeya.memory.leases import rules
from kakeya.memory.leases.codec import decode_book, decode_lease, encode_head, encode_lease
from kakeya.memory.leases.lease import (
    MAX_BYTES,
    Book,
    Drain,
    Granter,
    LeaseDenial,
    LeaseState,
    Process,
    ProcessLease,
    Wish,
)
from kakeya.memory.leases.place import open_lease_store
from kakeya.memory.leases.processes import Census
from kakeya.memory.leases.redis import RedisLeaseStore
from kakeya.memory.leases.rules import MachineSight
from kakeya.memory.leases.sqlite import SqliteLeaseStore
from kakeya.memory.leases.store import LeaseStore
from tests.memory.leases.world import (
    NO_REDIS,
    REDIS,
    MakeStore,
    Redis,
    borrower,
    borrowing,
    real_redis,
    redis_stores,
    sqlite_stores,
    wish,
)

ME = Process(5, "1", "here")
SIGHT = MachineSight(boot="b", now_mono=1.0)
CHILD = [sys.executable, "-m", "tests.memory.leases.child"]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    if REDIS is None:
        pytest.skip(NO_REDIS)
    with real_redis() as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Where a store lies, and for which machine."""
    if request.param == "sqlite":
        return str(tmp_path), ""
    return request.getfixturevalue("redis").url, tmp_path.name


@pytest.fixture
def make(place: tuple[str, str]) -> MakeStore:
    where, machine = place
    return redis_stores(where, machine) if machine else sqlite_stores(Path(where))


def asking(lease_id: str, *resources: str) -> object:
    return lambda book: rules.ask(book, wish(lease_id, 10, *resources), lease_id, ME, SIGHT)


async def ask(store: LeaseStore, lease_id: str) -> ProcessLease:
    return await store.change(lambda book: rules.ask(book, wish(lease_id), lease_id, ME, SIGHT))


# The contract.


async def test_a_store_begins_with_an_empty_book(make: MakeStore) -> None:
    async with make() as store:
        assert await store.read() == Book()


async def test_what_one_writes_all_read(make: MakeStore) -> None:
    async with make() as first, make() as second:
        lease = await ask(first, "a")
        book = await second.read()
        assert book.leases == {"a": lease}
        assert book.next_number == 2
        await second.change(lambda book: (book.without("a"), None))
        assert (await first.read()).leases == {}


async def test_the_whole_book_comes_back_as_it_was(make: MakeStore) -> None:
    def fill(book: Book) -> tuple[Book, Book]:
        book, _ = rules.ask(book, wish("a", 7, "gpu:0", "gpu:1"), "a", ME, SIGHT)
        book, _ = rules.ask(book, wish("b", 7, "gpu:1"), "b", ME, SIGHT)
        book = rules.grant(rules.take_resources(book), "a", 2.0)
        book = rules.refuse(
            book, "b", LeaseDenial(code="memory_refused", message="né", retry_after_s=1.5)
        )
        book = rules.become_granter(book, "node-1", ME, 99, SIGHT)
        book = rules.begin_drain(book, SIGHT, 3, 4.0)
        return book, book

    async with make() as store:
        written = await store.change(fill)
    async with make() as store:
        assert await store.read() == written


async def test_a_decision_that_raises_leaves_the_book_as_it_was(make: MakeStore) -> None:
    def fail(book: Book) -> tuple[Book, None]:
        rules.ask(book, wish("b"), "b", ME, SIGHT)
        raise errors.LeaseRefused("no")

    async with make() as store:
        await ask(store, "a")
        with pytest.raises(errors.LeaseRefused):
            await store.change(fail)
        assert set((await store.read()).leases) == {"a"}
        await ask(store, "c")


async def test_a_decision_that_changes_nothing_writes_nothing(make: MakeStore) -> None:
    async with make() as store:
        assert await store.change(lambda book: (book, "seen")) == "seen"
        assert await store.read() == Book()


async def test_changes_of_many_do_not_overwrite_each_other(make: MakeStore) -> None:
    async def several(store: LeaseStore, who: int) -> None:
        for number in range(5):
            await ask(store, f"l{who}-{number}")

    async with make() as a, make() as b, make() as c, make() as d:
        await asyncio.gather(*(several(store, who) for who, store in enumerate((a, b, c, d))))
        book = await a.read()
    assert len(book.leases) == 20
    assert {one.number for one in book.leases.values()} == set(range(1, 21))


async def test_a_cancelled_change_happens_whole_or_not(make: MakeStore) -> None:
    async with make() as store:
        for number in range(10):
            task = asyncio.ensure_future(ask(store, f"l{number}"))
            await asyncio.sleep(0.0005 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await ask(store, "last")
        book = await store.read()
    assert book.next_number == len(book.leases) + 1


async def test_a_store_is_used_only_while_it_is_open(make: MakeStore) -> None:
    store = make()
    with pytest.raises(errors.Conflict, match="not open"):
        await store.read()


@pytest.mark.slow
def test_fifty_contenders_in_five_processes(place: tuple[str, str], tmp_path: Path) -> None:
    """Each takes up to three named things and memory; witnesses see that nothing is had twice."""
    witnesses = tmp_path / "witnesses"
    witnesses.mkdir()
    children = [
        subprocess.Popen(
            [*CHILD, "crowd", *place, str(witnesses), "10", str(seed)],
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        for seed in range(5)
    ]
    for child in children:
        _, said = child.communicate(timeout=240)
        assert child.returncode == 0, said.decode()[-2000:]
    assert list(witnesses.iterdir()) == []


async def test_who_waits_is_served_when_the_holder_has_ended(make: MakeStore) -> None:
    async with borrowing(make) as first, borrowing(make) as second:
        held = await first.acquire(wish("a", 900, "gpu:0"), "a")
        told: list[str] = []
        waiting = asyncio.ensure_future(
            second.acquire(wish("b", 900, "gpu:0"), "b", tell=told.append)
        )
        while not told:
            await asyncio.sleep(0.01)
        assert "gpu:0, which a (pid" in told[-1]
        await first.release(held.lease_id)
        assert (await waiting).state is LeaseState.GRANTED


async def test_who_gives_up_leaves_the_line(make: MakeStore) -> None:
    async with borrowing(make) as mine, make() as store:
        await mine.acquire(wish("a", 900), "a")
        with pytest.raises(errors.DeadlineExceeded, match=r"a \(pid \d+\) holds 900\.0 MiB"):
            await mine.acquire(wish("b", 900), "b", wait_s=0.1)
        waiting = asyncio.ensure_future(mine.acquire(wish("c", 900), "c"))
        while "c" not in (await store.read()).leases:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert set((await store.read()).leases) == {"a"}


async def test_who_is_cancelled_at_any_moment_leaves_nothing(make: MakeStore) -> None:
    async with borrowing(make) as mine, make() as store:
        for number in range(20):
            asked = asyncio.ensure_future(mine.acquire(wish(mb=1), f"l{number}"))
            for _ in range(number):
                await asyncio.sleep(0)
            asked.cancel()
            (came,) = await asyncio.gather(asked, return_exceptions=True)
            if isinstance(came, ProcessLease):  # it was granted before that
                await mine.release(came.lease_id)
            else:
                assert isinstance(came, asyncio.CancelledError)
        assert not (await store.read()).leases


async def test_who_waits_goes_on_waiting_while_nobody_says_who_lives(make: MakeStore) -> None:
    class Silent(Census):
        silences = 3

        def look(self, book: Book, now_mono: float) -> MachineSight:
            self.silences -= 1
            if self.silences >= 0:
                raise errors.PeerUnavailable("ps failed")
            return super().look(book, now_mono)

    census = await asyncio.to_thread(Silent)
    told: list[str] = []
    async with make() as store:
        lease = await borrower(store, census).acquire(wish("a"), "a", tell=told.append)
    assert lease.state is LeaseState.GRANTED
    assert "ps failed" in told
    assert census.silences < 0


async def test_a_refusal_reaches_who_waits_as_a_typed_error(make: MakeStore) -> None:
    async with borrowing(make) as mine, make() as store:
        with pytest.raises(errors.MemoryRefused, match=r"the budget is 1\.0 GiB"):
            await mine.acquire(wish("a", 2000), "a")
        await store.change(lambda book: (rules.begin_drain(book, SIGHT, 3, 0.0), None))
        assert (await store.read()).leases == {}


async def test_a_waiting_line_is_written_again_when_the_store_lost_it(make: MakeStore) -> None:
    async with borrowing(make) as mine, make() as store:
        await mine.acquire(wish("a", 900), "a")
        waiting = asyncio.ensure_future(mine.acquire(wish("b", 900), "b"))
        while "b" not in (await store.read()).leases:
            await asyncio.sleep(0.01)
        await store.change(lambda book: (Book(), None))
        assert (await waiting).state is LeaseState.GRANTED


# The codec.

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
TIMES = st.floats(0, 1e9)
PROCESSES = st.builds(Process, pid=st.integers(1, 1 << 30), started=TEXT, space=TEXT)
LEASES = st.builds(
    ProcessLease,
    lease_id=st.just("x"),
    number=st.integers(0, 1 << 40),
    wish=st.builds(
        Wish,
        name=st.from_regex(r"[a-z]{1,20}", fullmatch=True),
        size_bytes=st.integers(1, MAX_BYTES),
        priority=st.sampled_from(RequestPriority),
        resources=st.just(("gpu:0", "gpu:1")),
    ),
    boot=TEXT,
    processes=st.lists(PROCESSES, min_size=1, max_size=3).map(tuple),
    asked_mono=TIMES,
    beat_mono=TIMES,
    state=st.sampled_from(LeaseState),
    taken=st.sampled_from([(), ("gpu:0",), ("gpu:0", "gpu:1")]),
    granted_mono=st.none() | TIMES,
    used_bytes=st.integers(0, MAX_BYTES),
    note=TEXT,
    no=st.none() | st.builds(LeaseDenial, code=TEXT, message=TEXT, retry_after_s=st.none() | TIMES),
)


@given(LEASES)
def test_a_lease_reads_back_as_it_was_written(lease: ProcessLease) -> None:
    assert decode_lease("x", encode_lease(lease)) == lease


@given(
    st.builds(
        Book,
        leases=st.just({}),
        granter=st.none()
        | st.builds(Granter, node_id=TEXT, process=PROCESSES, boot=TEXT, beat_mono=TIMES),
        budget_bytes=st.none() | st.integers(0, MAX_BYTES),
        drain=st.none() | st.builds(Drain, boot=TEXT, pid=st.integers(1, 99), began_at=TIMES),
        next_number=st.integers(1, 1 << 40),
    )
)
def test_the_head_of_a_book_reads_back_as_it_was_written(book: Book) -> None:
    assert decode_book(encode_head(book), {}) == (book, {})


@given(st.text(max_size=50) | st.recursive(st.none(), st.lists).map(str))
def test_anything_else_is_named_as_damaged(text: str) -> None:
    with pytest.raises(errors.PeerProtocol, match="lease 'x'"):
        decode_lease("x", text)
    with pytest.raises((errors.PeerProtocol, errors.StoreFailed)):
        decode_book(text, {})


def test_the_book_of_a_newer_program_is_not_misread() -> None:
    with pytest.raises(errors.StoreFailed, match="format 2"):
        decode_book('{"format": 2}', {})


# What only SQLite has to stand.


def test_a_writer_that_is_killed_leaves_all_that_it_wrote(tmp_path: Path) -> None:
    chance = random.Random(7)
    for round_ in range(5):
        with subprocess.Popen([*CHILD, "write", str(tmp_path)], stdout=-1, cwd=ROOT) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"writing\n"
            written = int(child.stdout.readline())
            try:
                child.wait(chance.uniform(0.02, 0.1) * (round_ + 1))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
            whole = child.stdout.read().rpartition(b"\n")[0].split()
            written = max([written, *map(int, whole)])
        assert child.returncode == -signal.SIGKILL

    async def look() -> Book:
        async with SqliteLeaseStore(tmp_path / "leases.db") as store:
            return await store.read()

    book = asyncio.run(look())
    assert book.next_number > written
    assert len(book.leases) <= 5
    assert not (tmp_path / "leases.db.corrupt").exists()


def test_a_full_disk_is_a_typed_error_and_passes(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CHILD, "full", str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert done.returncode == 0, done.stderr
    problem, state = done.stdout.splitlines()
    assert "leases.db cannot be used" in problem
    assert "free some space" in problem
    assert state == "granted"


@pytest.mark.parametrize("damage", ["no database", "torn page", "a line", "the head"])
async def test_a_damaged_file_is_set_aside_and_named(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "leases.db"
    async with SqliteLeaseStore(path) as store:
        for number in range(50):
            await ask(store, f"l{number}")
    match damage:
        case "no database":
            path.write_bytes(b"nothing" * 1000)
        case "torn page":
            data = bytearray(path.read_bytes())
            data[4096:] = b"\xff" * (len(data) - 4096)
            path.write_bytes(data)
        case "a line" | "the head":
            table = "lease" if damage == "a line" else "head"
            with sqlite3.connect(path) as db:
                db.execute(f"UPDATE {table} SET data = '{{}}'")
            db.close()
    async with SqliteLeaseStore(path) as first, SqliteLeaseStore(path) as second:
        await asyncio.gather(ask(first, "a"), ask(second, "b"))
        assert set((await first.read()).leases) == {"a", "b"}
    assert (tmp_path / "leases.db.corrupt").exists()
    assert [r.message for r in caplog.records].count(
        "lease store was damaged and is set aside; holders that live write themselves again"
    ) == 1


async def test_a_store_follows_when_another_process_sets_the_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "leases.db"
    async with SqliteLeaseStore(path) as store:
        await ask(store, "a")
        for part in tmp_path.glob("leases.db*"):
            part.rename(tmp_path / f"old-{part.name}")
        assert await store.read() == Book()
        await ask(store, "b")
        async with SqliteLeaseStore(path) as other:
            assert set((await other.read()).leases) == {"b"}


async def test_a_stopped_process_that_has_the_lock_hangs_nobody(tmp_path: Path) -> None:
    with (tmp_path / "leases.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with SqliteLeaseStore(tmp_path / "leases.db", busy_s=0.1) as store:
            with pytest.raises(errors.StoreFailed, match=r"leases\.db\.lock for 0\.1 s"):
                await store.read()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert await store.read() == Book()


async def test_who_waits_for_a_lease_does_not_wait_longer_for_the_store(tmp_path: Path) -> None:
    """A process that writes, and is stopped meanwhile, keeps all others out."""
    path = tmp_path / "leases.db"
    async with SqliteLeaseStore(path, busy_s=0.1) as store:
        asking = borrower(store, await asyncio.to_thread(Census), budget=10 << 20)
        await asking.acquire(wish("all", 10), "all")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            async with asyncio.timeout(60):
                with pytest.raises(errors.StoreFailed, match="locked"):
                    await asking.acquire(wish("b", 10), "b", wait_s=0.1)
            other.execute("ROLLBACK")
            waiting = asyncio.create_task(asking.acquire(wish("c", 10), "c", wait_s=0.5))
            while "c" not in (await store.read()).leases:
                await asyncio.sleep(0.01)
            path.rename(tmp_path / "gone.db")
            path.mkdir()
            async with asyncio.timeout(60):
                with pytest.raises(errors.StoreFailed):
                    await waiting


def test_half_of_a_short_wait_is_for_other_processes_that_write(tmp_path: Path) -> None:
    """It is waited twice: to ask, and to take that back."""
    for wait_s, busy_s in ((math.inf, 10.0), (60.0, 10.0), (3.0, 1.5), (0.0, 1.0)):
        store = open_lease_store(tmp_path, wait_s=wait_s)
        assert isinstance(store, SqliteLeaseStore)
        assert store.busy_s == busy_s


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with SqliteLeaseStore(tmp_path / "no" / "leases.db") as store:
        with pytest.raises(errors.StoreFailed, match="No such file"):
            await store.read()


async def test_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    async with SqliteLeaseStore(tmp_path / "leases.db") as store:
        await ask(store, "a")
        assert (tmp_path / "leases.db").stat().st_mode & 0o077 == 0


# What only Redis has to stand.


async def test_machines_that_share_a_redis_have_books_of_their_own(redis: Redis) -> None:
    async with redis_stores(redis.url, "m1")() as one, redis_stores(redis.url, "m2")() as two:
        await ask(one, "a")
        assert (await two.read()).leases == {}


async def test_a_redis_that_ends_is_named_and_one_that_comes_back_is_used() -> None:
    if REDIS is None:
        pytest.skip(NO_REDIS)
    with real_redis() as server:
        async with redis_stores(server.url, "m")() as store:
            await ask(store, "a")
            await asyncio.to_thread(server.stop)
            with pytest.raises(errors.StoreFailed, match="start that Redis"):
                await store.read()
            await asyncio.to_thread(server.start)
            assert await store.read() == Book()
            await ask(store, "b")


@pytest.mark.parametrize("field", ["head", "lease:b"])
async def test_lines_that_cannot_be_read_are_taken_out_and_named(
    redis: Redis, field: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from redis.asyncio import Redis as Client

    machine = f"{tmp_path.name}-{field}"
    async with redis_stores(redis.url, machine)() as store:
        await ask(store, "a")
        async with Client.from_url(redis.url) as client:
            await client.hset(f"kakeya:leases:{machine}", field, "{")
        assert set((await store.read()).leases) == {"a"}
        assert (await ask(store, "c")).number == 2
    assert "lines of the lease store were damaged" in caplog.text


@pytest.mark.parametrize("url", ["", "http://host", "redis://", "leases.db"])
def test_what_is_no_address_of_a_redis_is_refused(url: str) -> None:
    with pytest.raises(errors.ConfigError, match="is no address of a Redis"):
        RedisLeaseStore(url, machine=lambda: "m")


def test_a_password_is_not_shown() -> None:
    store = RedisLeaseStore("redis://user:secret@127.0.0.1:6379/0?password=secret", machine=str)
    assert store.place == "redis://127.0.0.1:6379/0"
