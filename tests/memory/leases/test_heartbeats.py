"""Heartbeats of who holds a lease, while the system does not say now and then who lives."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from kakeya.core import errors
from kakeya.memory.leases.desk import LeaseDesk
from kakeya.memory.leases.guard import LeaseGuard
from kakeya.memory.leases.lease import ProcessLease
from kakeya.memory.leases.processes import Census, ProcessTree
from tests.fakes import FakeClock, set_by
from tests.memory.leases.world import borrower, sqlite_stores, wish
from tests.waiting import eventually


class Faltering(Census):
    """Every second look fails, as where `ps` is too slow or no file can be opened."""

    looks = 0

    def process_trees(
        self, leases: Iterable[ProcessLease], apart: Collection[int] = ()
    ) -> dict[str, ProcessTree]:
        self.looks += 1
        if self.looks % 2 == 0:
            raise errors.PeerUnavailable("ps failed: timed out")
        return super().process_trees(leases, apart)


async def test_a_program_that_holds_a_lease_beats_on(tmp_path: Path) -> None:
    async with LeaseDesk(tmp_path, "") as desk:
        desk._clock = FakeClock()  # type: ignore[assignment]
        census = await asyncio.to_thread(Faltering)
        desk._borrower = borrower(desk._store, census)
        async with desk.hold(wish()):
            await eventually("it beats after a failure", lambda: census.looks > 3)


async def test_a_guard_guards_on_until_its_holder_is_gone(tmp_path: Path) -> None:
    census = await asyncio.to_thread(Faltering)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        async with sqlite_stores(tmp_path)() as store:
            other = borrower(store, await asyncio.to_thread(Census, pid=child.pid))
            lease = await other.acquire(wish(), "a")
            ready = asyncio.Event()
            guard = LeaseGuard(store, census, lease, clock=FakeClock())
            running = asyncio.ensure_future(guard.run(ready.set))
            await set_by(running, ready)
            await eventually("it looks on", lambda: running.done() or census.looks > 3)
            assert "a" in (await store.read()).leases
            os.kill(child.pid, 9)
            await running
            assert "a" not in (await store.read()).leases
