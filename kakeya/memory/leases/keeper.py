"""The lease keeper of a node: grants leases of other processes through the memory arbiter.

    waiting in the book  -> takes its named resources, then a request to the arbiter, which makes
                            room as for a model: idle residents go, never one in use
    granted              -> a resident that is pinned until its holder is gone
    refused              -> the arbiter's own words, in the book, for the command that waits
    ended, or died       -> unloaded: the memory is free at once

The book is the truth; the arbiter follows it (`jobs`). So a node that starts counts the leases that
are held already, and one that stops leaves them as they are. Of two nodes that share a book one
grants; both count.

A store that is out of order stops grants and nothing else: held leases stay, and dead holders are
noticed all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, TaskHealth, shared_pause_s
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.leases import rules
from kakeya.memory.leases.jobs import Jobs
from kakeya.memory.leases.lease import Book, ProcessLease, describe_lease
from kakeya.memory.leases.place import open_lease_store, remember_url
from kakeya.memory.leases.processes import Census
from kakeya.memory.leases.rules import MachineSight
from kakeya.memory.leases.store import LeaseStore

_log = logging.getLogger(__name__)
POLL_S = 0.5
_REST = 8
"""A store without a lease is read so many times more seldom."""
MEASURE_S = 2.0
_PAUSE_S = 1.0
_LEAVE_S = 2.0


class LeaseKeeper:
    """Runs within `async with`, after the arbiter's start and before any load."""

    def __init__(
        self,
        store: LeaseStore,
        arbiter: MemoryArbiter,
        *,
        clock: Clock,
        node_id: str,
        poll_s: float = POLL_S,
        measure_s: float = MEASURE_S,
        when_open: Callable[[], None] = lambda: None,
        make_census: Callable[[], Census] = Census,
    ) -> None:
        """`when_open` is called once at the start; like `make_census`, off the event loop."""
        self._store = store
        self._arbiter = arbiter
        self._clock = clock
        self._node_id = node_id
        self._poll_s = poll_s
        self._measure_s = measure_s
        self._when_open = when_open
        self._make_census = make_census
        self._book = Book()
        self._problem = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._census = await asyncio.to_thread(self._make_census)
        self._jobs = Jobs(self._arbiter, clock=self._clock, write=self._write)
        async with AsyncExitStack() as stack:
            await asyncio.to_thread(self._when_open)
            await stack.enter_async_context(self._store)
            stack.push_async_callback(self._leave)
            await self._round()
            self._tasks = await stack.enter_async_context(Supervisor(self._clock))
            self._tasks.start("leases", self._follow)
            self._tasks.start("lease sizes", self._measure_all)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def is_granter(self) -> bool:
        """Whether this node grants; if not, another one that shares the store does."""
        return self._is_mine(self._book)

    def health(self) -> tuple[TaskHealth, ...]:
        """The background tasks."""
        return self._tasks.health()

    def status(self) -> dict[str, object]:
        """All leases as JSON, with the last measured bytes."""
        now = self._clock.mono()
        leases = sorted(self._book.leases.values(), key=lambda one: one.number)
        return {
            "store": self._store.place,
            "is_granter": self.is_granter,
            "is_drained": self._book.drain is not None,
            "problem": self._problem,
            "leases": [self._shown(lease, now) for lease in leases],
        }

    async def _leave(self) -> None:
        """Let another node grant."""
        await self._jobs.aclose()
        own = self._census.own
        with contextlib.suppress(errors.StoreFailed, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._store.change(lambda book: (rules.leave_granter(book, own), None))

    async def _follow(self) -> None:
        while True:
            pause_s = self._poll_s
            if not self._book.leases:
                pause_s = shared_pause_s(_REST * pause_s, self._clock.mono())
            await self._clock.sleep(pause_s)
            await self._round()

    async def _measure_all(self) -> None:
        while True:
            await self._clock.sleep(shared_pause_s(self._measure_s, self._clock.mono()))
            self._jobs.tell_waiting(self._book)
            held = [job.lease for job in self._jobs.granted()]
            if held:
                trees = await asyncio.to_thread(self._census.process_trees, held)
                self._jobs.measured(trees)

    async def _round(self) -> None:
        """Read the book, write the changes that follow, and have the arbiter follow."""
        book, is_read = await self._read()
        sight = await self._look(self._jobs.as_seen(book))
        decided, dead = self._decide(book, sight)
        if is_read and decided is not book:
            try:
                decided, dead = await self._store.change(lambda book: self._decided(book, sight))
            except errors.StoreFailed as problem:
                self._tell_problem(problem.message)
            else:
                self._tell_problem("")
        for lease in dead:
            event(_log, "lease ended with its holder", lease=lease.lease_id, pid=lease.pid)
        self._book = decided
        self._jobs.follow(decided, is_granter=self.is_granter)

    async def _read(self) -> tuple[Book, bool]:
        """The book, and True; without the store the last one, to look for dead holders, and
        False."""
        try:
            book = await self._store.read()
        except errors.StoreFailed as problem:
            self._tell_problem(problem.message)
            return self._book, False
        return book, True

    async def _look(self, book: Book) -> MachineSight:
        """See which holders live; for a book that names no other process, without a look."""
        now = self._clock.mono()
        if not book.leases and self._is_mine(book):
            return MachineSight(boot=self._census.boot, now_mono=now, living={}, granter_lives=True)
        return await asyncio.to_thread(self._census.look, book, now)

    def _decided(
        self, book: Book, sight: MachineSight
    ) -> tuple[Book, tuple[Book, tuple[ProcessLease, ...]]]:
        """The decision as a change of the store; its result has the dead leases, too."""
        decided = self._decide(book, sight)
        return decided[0], decided

    def _decide(self, book: Book, sight: MachineSight) -> tuple[Book, tuple[ProcessLease, ...]]:
        """The book after this node's changes, and the dead leases. Pure."""
        book, dead = rules.expire(self._restored(book, sight), sight)
        budget = self._arbiter.budget_bytes
        granter = book.granter
        beat_s = sight.now_mono - granter.beat_mono if granter is not None else rules.BEAT_S
        is_late = beat_s >= rules.BEAT_S and (granter is None or bool(book.leases))
        is_due = is_late or book.budget_bytes != budget
        if is_due or not self._is_mine(book):
            book = rules.become_granter(book, self._node_id, self._census.own, budget, sight)
        if self._is_mine(book):
            book = rules.take_resources(book)
            for job in self._jobs.granted():
                lease = book.leases.get(job.lease.lease_id)
                if lease is not None and not lease.missing:
                    # Granted already, unless the store was lost before that was written or read.
                    book = rules.grant(book, lease.lease_id, sight.now_mono)
            for lease_id, note in self._jobs.notes().items():
                book = rules.note(book, lease_id, note)
        return book, dead

    def _restored(self, book: Book, sight: MachineSight) -> Book:
        """The book with the granted leases of this node, where the store was lost and begun
        anew: their holders hold them still."""
        if not self._is_mine(self._book) or self._is_mine(book):
            return book
        for job in self._jobs.granted():
            lease = self._book.leases.get(job.lease.lease_id)
            if lease is not None and lease.lease_id not in book.leases:
                book, _ = rules.beat(
                    book,
                    lease,
                    sight.now_mono,
                    processes=lease.processes,
                    used_bytes=lease.used_bytes,
                )
        return replace(book, next_number=max(book.next_number, self._book.next_number))

    async def _write(self, decide: Callable[[Book], Book], until: asyncio.Event) -> None:
        """Write a change, again and again while the store is out of order."""
        while not until.is_set():
            try:
                await self._store.change(lambda book: (decide(book), None))
            except errors.StoreFailed as problem:
                self._tell_problem(problem.message)
                await self._clock.sleep(_PAUSE_S)
            else:
                return

    def _is_mine(self, book: Book) -> bool:
        return book.granter is not None and book.granter.process == self._census.own

    def _tell_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            event(_log, "leases are not granted", level=logging.WARNING, problem=problem)
        self._problem = problem

    def _shown(self, lease: ProcessLease, now: float) -> dict[str, object]:
        job = self._jobs.find(lease.lease_id)
        used = job.tree.used_bytes if job and job.tree else None
        return describe_lease(lease, used, now)


def lease_keeper(
    folder: Path, url: str, arbiter: MemoryArbiter, *, clock: Clock, node_id: str
) -> LeaseKeeper:
    """The keeper of a data directory's leases, or of those in the store that `url` names.

    Raises ConfigError.
    """

    def tell_command_line() -> None:
        try:
            remember_url(folder, url)
        except OSError as problem:
            event(
                _log,
                "lease store not saved; the command line has to be told by KAKEYA_LEASES_STORE",
                level=logging.WARNING,
                problem=problem,
            )

    return LeaseKeeper(
        open_lease_store(folder, url),
        arbiter,
        clock=clock,
        node_id=node_id,
        when_open=tell_command_line,
    )
