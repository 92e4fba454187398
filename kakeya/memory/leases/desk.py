"""Leases for a program beside the node: opens the store, and measures the machine itself.

async with open_desk(folder, os.environ) as desk:
    async with desk.hold(Wish(name="train", size_bytes=4 * GIB)) as lease:
        ...                                   # heartbeats meanwhile; released at the end
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kakeya.core import errors
from kakeya.core.clock import SystemClock
from kakeya.core.host import unified_memory_bytes
from kakeya.memory.arbiter.policy import budget_bytes
from kakeya.memory.leases import rules
from kakeya.memory.leases.borrower import Borrower, Room
from kakeya.memory.leases.lease import Book, LeaseState, ProcessLease, Wish, describe_lease
from kakeya.memory.leases.place import chosen_url, open_lease_store
from kakeya.memory.leases.processes import Census, ProcessTree
from kakeya.memory.leases.rules import MachineSight
from kakeya.memory.leases.store import LeaseStore
from kakeya.memory.machine.machine import machine_sources
from kakeya.memory.machine.pressure import PressureSource, Reading, worst


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOverview:
    """The book, with the processes of living holders and the bytes that they use."""

    book: Book
    sight: MachineSight
    trees: Mapping[str, ProcessTree]

    @property
    def leases(self) -> tuple[ProcessLease, ...]:
        """Leases of living holders, in the order of asking."""
        living = (one for one in self.book.leases.values() if not rules.is_dead(one, self.sight))
        return tuple(sorted(living, key=lambda one: one.number))

    @property
    def granted(self) -> tuple[ProcessLease, ...]:
        """The leases that hold memory."""
        return tuple(one for one in self.leases if one.state is LeaseState.GRANTED)

    def shown(self, lease: ProcessLease) -> dict[str, object]:
        """Describe one lease as JSON."""
        tree = self.trees.get(lease.lease_id)
        return describe_lease(lease, tree.used_bytes if tree else None, self.sight.now_mono)


class LeaseDesk:
    """A store of leases, open within `async with`."""

    def __init__(self, folder: Path, url: str, *, wait_s: float = float("inf")) -> None:
        self.folder = folder
        self.url = url
        self._store: LeaseStore = open_lease_store(folder, url, wait_s=wait_s)
        self._clock = SystemClock()

    async def __aenter__(self) -> Self:
        self._census = await asyncio.to_thread(Census)
        await self._store.__aenter__()
        room = Room(budget=_machine_budget, available=_available)
        self._borrower = Borrower(self._store, self._census, clock=self._clock, room=room)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._store.__aexit__(kind, value, trace)

    async def acquire(
        self,
        wish: Wish,
        *,
        wait_s: float = float("inf"),
        tell: Callable[[str], None] = lambda _: None,
    ) -> ProcessLease:
        """Wait for a lease of this process; see `Borrower.acquire`."""
        lease_id = f"{_slug(wish.name)}-{secrets.token_hex(4)}"
        return await self._borrower.acquire(wish, lease_id, wait_s=wait_s, tell=tell)

    async def release(self, lease_id: str) -> None:
        """End a lease."""
        await self._borrower.release(lease_id)

    @contextlib.asynccontextmanager
    async def hold(
        self, wish: Wish, *, wait_s: float = float("inf")
    ) -> AsyncIterator[ProcessLease]:
        """Hold a lease of this process for a block, with heartbeats. Raises the errors of
        `acquire`."""
        lease = await self.acquire(wish, wait_s=wait_s)
        beating = asyncio.ensure_future(self._beat(lease))
        try:
            yield lease
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await asyncio.shield(self.release(lease.lease_id))

    async def look(self) -> LeaseOverview:
        """Read all leases as they are now; settles the queue where no node does."""
        with contextlib.suppress(errors.StoreFailed):  # a full disk can still be read
            await self._borrower.settle()
        book = await self._store.read()
        now = self._clock.mono()
        sight = await asyncio.to_thread(self._census.look, book, now)
        granted = book.of(LeaseState.GRANTED)
        trees = await asyncio.to_thread(self._census.process_trees, granted)
        return LeaseOverview(book=book, sight=sight, trees=trees)

    async def clean_up(self) -> tuple[ProcessLease, ...]:
        """Remove the leases of dead holders, and return them."""
        book = await self._store.read()
        sight = await asyncio.to_thread(self._census.look, book, self._clock.mono())
        return await self._store.change(lambda book: rules.expire(book, sight))

    async def begin_drain(self) -> None:
        """Give no more leases."""
        sight = MachineSight(boot=self._census.boot, now_mono=self._clock.mono())
        pid, now_at = os.getpid(), self._clock.wall()
        await self._store.change(lambda book: (rules.begin_drain(book, sight, pid, now_at), None))

    async def end_drain(self) -> None:
        """Give leases again."""
        await self._store.change(lambda book: (rules.end_drain(book), None))

    async def stop_holders(self) -> tuple[ProcessLease, ...]:
        """Send SIGTERM to each process of all holders; returns the leases of those that got it:
        processes of other users do not."""
        seen = await self.look()
        told = []
        for lease in seen.leases:
            tree = seen.trees.get(lease.lease_id)
            if lease.state is LeaseState.GRANTED and tree is not None:
                heard = await asyncio.to_thread(self._told_to_end, tree)
                told += [lease] if heard else []
        return tuple(told)

    def _told_to_end(self, tree: ProcessTree) -> int:
        """Send SIGTERM to all living processes of a holder; returns how many got it."""
        told = 0
        for process in filter(self._census.lives, tree.processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGTERM)
                told += 1
        return told

    async def _beat(self, lease: ProcessLease) -> None:
        while True:
            await self._clock.sleep(rules.BEAT_S)
            with contextlib.suppress(*rules.OUT_OF_ORDER):
                lease = await self._borrower.beat(lease)


def open_desk(
    folder: Path, environ: Mapping[str, str], *, wait_s: float = float("inf")
) -> LeaseDesk:
    """Open the desk of a data directory. The environment names its store, or the last node did.
    `wait_s` is the longest wait for a lease that is intended.

    Raises ConfigError.
    """
    return LeaseDesk(folder, chosen_url(folder, environ), wait_s=wait_s)


def _machine_budget() -> int:
    return budget_bytes(total_bytes=unified_memory_bytes())


def _available() -> int | None:
    """The least of the available bytes that the sources of the machine give. Raises
    PeerUnavailable where none can be read: such a machine may have nothing to give."""
    return asyncio.run(read_available(machine_sources()))


async def read_available(sources: Sequence[PressureSource]) -> int:
    """See `_available`; a source that cannot be read hides no other."""
    answers = await asyncio.gather(*(one.read() for one in sources), return_exceptions=True)
    available = worst([one for one in answers if isinstance(one, Reading)]).available_bytes
    if available is None:
        faults = "; ".join(str(one) for one in answers if isinstance(one, BaseException))
        raise errors.PeerUnavailable(f"the machine does not tell its free memory: {faults}")
    return available


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] or "lease"
