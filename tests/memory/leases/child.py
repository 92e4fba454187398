"""Child processes of the lease tests: a crowd that competes, a writer that is killed, a full disk.

crowd FOLDER_OR_URL MACHINE WITNESSES COUNT SEED    COUNT tasks take and give back leases
write FOLDER                                        changes the book until it is killed
full FOLDER                                         asks on a disk that is full
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
from pathlib import Path

from kakeya.core import errors
from kakeya.core.units import MIB
from kakeya.memory.leases.processes import Census
from tests.memory.leases.world import (
    MakeStore,
    borrower,
    borrowing,
    redis_stores,
    sqlite_stores,
    wish,
)

BUDGET_MB = 100
NAMES = ("gpu:0", "gpu:1", "gpu:2")


class Witness:
    """Sees by files that only one has a resource, and how much memory is granted at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enter(self, lease_id: str, mb: int, names: tuple[str, ...]) -> None:
        for name in names:
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL))  # raises: two have it
        (self._folder / f"held-{lease_id}-{mb}").touch()
        held = sum(int(one.name.rpartition("-")[2]) for one in self._folder.glob("held-*"))
        assert held <= BUDGET_MB, f"{held} MB are held at once"

    def leave(self, lease_id: str, mb: int, names: tuple[str, ...]) -> None:
        (self._folder / f"held-{lease_id}-{mb}").unlink()
        for name in names:
            (self._folder / name).unlink()


async def one(
    make: MakeStore, witness: Witness, census: Census, name: str, rng: random.Random
) -> None:
    async with make() as store:
        mine = borrower(store, census, budget=BUDGET_MB * MIB, poll_s=0.1)
        mb = rng.randint(1, BUDGET_MB)
        wanted = wish(name, mb, *rng.sample(NAMES, rng.randint(0, 3)))
        lease = await mine.acquire(wanted, name, wait_s=200)
        await asyncio.to_thread(witness.enter, name, mb, wanted.resources)
        await asyncio.sleep(rng.random() * 0.02)
        await asyncio.to_thread(witness.leave, name, mb, wanted.resources)
        await mine.release(lease.lease_id)


async def crowd(place: str, machine: str, folder: str, count: str, seed: str) -> None:
    rng = random.Random(int(seed))
    make = redis_stores(place, machine) if "://" in place else sqlite_stores(Path(place))
    witness = Witness(Path(folder))
    census = await asyncio.to_thread(Census)
    async with asyncio.TaskGroup() as group:
        for number in range(int(count)):
            group.create_task(one(make, witness, census, f"c{seed}-{number}", rng))


async def write(folder: str) -> None:
    async with borrowing(sqlite_stores(Path(folder))) as mine:
        print("writing", flush=True)
        for number in range(1_000_000):
            lease = await mine.acquire(wish(f"w{number}", 1, "disk"), f"w{number}")
            print(lease.number, flush=True)
            await mine.release(lease.lease_id)


async def full(folder: str) -> None:
    async with borrowing(sqlite_stores(Path(folder))) as mine:
        await mine.acquire(wish("first", 1), "first")
        size = max(one.stat().st_size for one in Path(folder).iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        failed = None
        for number in range(2000):  # until the log has no room left
            try:
                await mine.acquire(wish("x" * 60, 1), f"more{number}")
            except errors.StoreFailed as problem:
                failed = problem
                break
        assert failed is not None, "the disk was never full"
        print(failed.message, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        lease = await mine.acquire(wish("after", 1), "after")
        print(lease.state.value, flush=True)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
