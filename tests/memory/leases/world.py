"""What the tests of leases share: both stores, a real Redis, and ways to ask."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kakeya.core.clock import SystemClock
from kakeya.core.units import GIB, MIB
from kakeya.memory.arbiter.resident import RequestPriority
from kakeya.memory.leases.borrower import Borrower, Room
from kakeya.memory.leases.lease import Wish, in_order
from kakeya.memory.leases.processes import Census
from kakeya.memory.leases.redis import RedisLeaseStore
from kakeya.memory.leases.sqlite import SqliteLeaseStore
from kakeya.memory.leases.store import LeaseStore

REDIS = shutil.which("redis-server")
NO_REDIS = "redis-server is not installed here"


@dataclass
class Redis:
    """A real Redis on a socket of its own, which can be stopped and started."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "r.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = [str(REDIS), "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self.folder)], stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 10
        while not self._accepts():
            assert time.monotonic() < until, "redis-server does not start"
            time.sleep(0.01)

    def _accepts(self) -> bool:
        """The socket is there a moment before it listens."""
        with socket.socket(socket.AF_UNIX) as caller:
            return caller.connect_ex(str(self.socket)) == 0

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None


@contextmanager
def real_redis() -> Iterator[Redis]:
    with tempfile.TemporaryDirectory(prefix="kr") as folder:  # short: it is a socket's path
        redis = Redis(Path(folder))
        redis.start()
        try:
            yield redis
        finally:
            redis.stop()


MakeStore = Callable[[], LeaseStore]


def sqlite_stores(folder: Path) -> MakeStore:
    return lambda: SqliteLeaseStore(folder / "leases.db")


def redis_stores(url: str, machine: str) -> MakeStore:
    return lambda: RedisLeaseStore(url, machine=lambda: machine)


def wish(
    name: str = "job",
    mb: int = 10,
    *resources: str,
    priority: RequestPriority = RequestPriority.NORMAL,
) -> Wish:
    return Wish(
        name=name, size_bytes=mb * MIB, priority=priority, resources=tuple(in_order(resources))
    )


def borrower(
    store: LeaseStore, census: Census, *, budget: int = GIB, poll_s: float = 0.02
) -> Borrower:
    room = Room(budget=lambda: budget, available=lambda: None)
    return Borrower(store, census, clock=SystemClock(), room=room, poll_s=poll_s)


@asynccontextmanager
async def borrowing(make: MakeStore, *, budget: int = GIB) -> AsyncIterator[Borrower]:
    census = await asyncio.to_thread(Census)
    async with make() as store:
        yield borrower(store, census, budget=budget)
