"""Leases as the memory arbiter knows them: one job each, which follows the book.

waiting, first in the queue   a request to the arbiter, so that no lease overtakes another,
                              not even while the arbiter refuses for a while
granted by this node          a pinned resident until it is over
granted elsewhere             a foreign holder: by an earlier node, or while no node ran
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.core.units import MIB, format_bytes
from kakeya.memory.api import MemoryArbiter, Terms
from kakeya.memory.arbiter.capability import Capability, Loaded
from kakeya.memory.arbiter.plan import Snapshot
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.memory.arbiter.resident import Warmth
from kakeya.memory.leases import rules
from kakeya.memory.leases.lease import Book, LeaseDenial, LeaseState, ProcessLease
from kakeya.memory.leases.processes import ProcessTree
from kakeya.memory.leases.rules import CAPABILITY, JOB

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0
_STEP_BYTES = MIB
_COARSE_BYTES = 16 * MIB
_PINNED = Warmth(is_pinned=True)

Write = Callable[[Callable[[Book], Book], asyncio.Event], Awaitable[None]]
"""Writes a change to the book, with retries, until it succeeds or the event is set."""


@dataclass(slots=True)
class LeaseJob:
    """A lease that the arbiter knows of. `task` holds the request; None = counted as foreign.

    `told` are the bytes that the arbiter was told last, and how many of them are not used yet.
    """

    lease: ProcessLease
    task: asyncio.Task[None] | None = None
    is_granted: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    tree: ProcessTree | None = None
    told: tuple[int, int] = (0, 0)
    note: str = ""

    @property
    def is_failed(self) -> bool:
        """Whether the request has ended, by a fault or because the arbiter stops."""
        return self.task is not None and self.task.done()

    @property
    def label(self) -> str:
        """The name of the foreign holder."""
        return f"{CAPABILITY}:{self.lease.lease_id}"


class Jobs:
    """The jobs of one node."""

    def __init__(self, arbiter: MemoryArbiter, *, clock: Clock, write: Write) -> None:
        self._arbiter = arbiter
        self._clock = clock
        self._write = write
        self._by_id: dict[str, LeaseJob] = {}
        self._left: set[str] = set()
        arbiter.register(
            Capability(
                name=CAPABILITY,
                role=JOB,
                handler=_LeaseHandler(self._estimate),
                estimate=self._estimate,
                warmth=_PINNED,
            )
        )

    def find(self, lease_id: str) -> LeaseJob | None:
        """The job of a lease; None = the arbiter does not know it."""
        return self._by_id.get(lease_id)

    def granted(self) -> tuple[LeaseJob, ...]:
        """The jobs that hold memory."""
        return tuple(job for job in self._by_id.values() if job.is_granted)

    def notes(self) -> dict[str, str]:
        """The reasons for which leases wait, by lease."""
        return {key: job.note for key, job in self._by_id.items() if job.note}

    def as_seen(self, book: Book) -> Book:
        """The book with the processes that were seen here: the book may not know them yet."""
        for key, job in self._by_id.items():
            lease = book.leases.get(key)
            if lease is not None and job.tree is not None:
                processes = dict.fromkeys((*lease.processes, *job.tree.processes))
                book = book.put(replace(lease, processes=tuple(processes)))
        return book

    def follow(self, book: Book, *, is_granter: bool) -> None:
        """Start and end jobs as the book has it."""
        for lease_id in self._left:
            self._arbiter.unlearn(CAPABILITY, lease_id)
        self._left.clear()
        ready = [one.lease_id for one in rules.queue(book) if not one.missing]
        asked = ready[0] if is_granter and ready else ""
        for lease_id, job in tuple(self._by_id.items()):
            lease = book.leases.get(lease_id)
            if lease is None or lease.state is LeaseState.REFUSED:
                self._end(job)
            elif not job.is_granted and (lease_id != asked or job.is_failed):
                self._end(job)  # its turn comes again
            else:
                job.lease = lease
        for lease in book.of(LeaseState.GRANTED):
            if lease.lease_id not in self._by_id:
                self._adopt(lease)
        if asked and asked not in self._by_id:
            self._ask(book.leases[asked])

    def measured(self, trees: Mapping[str, ProcessTree]) -> None:
        """Tell the arbiter the used bytes of holders; leased bytes that are not used stay
        theirs."""
        for lease_id, tree in trees.items():
            job = self._by_id.get(lease_id)
            if job is not None and job.is_granted:
                self._measured(job, tree)

    def tell_waiting(self, book: Book) -> None:
        """Note for waiting leases why the arbiter does not lend yet."""
        waiting = [job for job in self._by_id.values() if not job.is_granted]
        if waiting:
            seen = self._arbiter.status()
            for job in waiting:
                job.note = _waits_for(job.lease, seen, book)

    async def aclose(self) -> None:
        """Withdraw waiting requests. Granted leases stay in the book."""
        tasks = [job.task for job in self._by_id.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _estimate(self, lease_id: str) -> int:
        if lease_id not in self._by_id:
            raise errors.NotFound(f"no lease {lease_id!r}; `kakeya lease list` shows them")
        return self._by_id[lease_id].lease.wish.size_bytes

    def _adopt(self, lease: ProcessLease) -> None:
        told = lease.held_bytes, lease.unfilled_bytes
        job = LeaseJob(lease, is_granted=True, told=told)
        self._by_id[lease.lease_id] = job
        self._arbiter.hold(job.label, *told)
        event(_log, "lease taken over", lease=lease.lease_id, pid=lease.pid)

    def _ask(self, lease: ProcessLease) -> None:
        job = LeaseJob(lease)
        self._by_id[lease.lease_id] = job
        job.task = asyncio.get_running_loop().create_task(self._serve(job))
        job.task.add_done_callback(_log_fault)

    def _end(self, job: LeaseJob) -> None:
        del self._by_id[job.lease.lease_id]
        job.over.set()
        if job.task is None:
            self._arbiter.hold(job.label, 0)
        elif not job.is_granted:
            job.task.cancel()

    # The life of one lease.

    async def _serve(self, job: LeaseJob) -> None:
        """Ask the arbiter until it lends or refuses for good; hold until the lease is over."""
        lease_id, priority = job.lease.lease_id, job.lease.wish.priority
        terms = Terms(priority=priority, warmth=_PINNED, may_displace_text=True)
        while not job.over.is_set():
            try:
                async with self._arbiter.acquire(CAPABILITY, lease_id, terms):
                    await self._hold(job)
            except errors.MemoryRefused as no:
                if no.retry_after_s is None:
                    await self._refuse(job, no)
                    return
                await self._clock.sleep(_PAUSE_S)
            finally:
                with contextlib.suppress(errors.NotFound, errors.Conflict):
                    self._arbiter.unload(CAPABILITY, lease_id)
                self._left.add(lease_id)

    async def _hold(self, job: LeaseJob) -> None:
        lease_id = job.lease.lease_id
        job.is_granted, job.note = True, ""
        size = job.lease.wish.size_bytes
        job.told = size, size
        try:
            await self._write(
                lambda book: rules.grant(book, lease_id, self._clock.mono()), job.over
            )
            event(
                _log,
                "lease granted",
                lease=lease_id,
                pid=job.lease.pid,
                bytes=format_bytes(size),
            )
            await job.over.wait()
        finally:
            job.is_granted = False
        event(_log, "lease is over", lease=lease_id)

    async def _refuse(self, job: LeaseJob, error: errors.MemoryRefused) -> None:
        no = LeaseDenial(code=error.code, message=error.message, retry_after_s=error.retry_after_s)
        lease_id = job.lease.lease_id
        event(_log, "lease refused", lease=lease_id, reason=error.message)
        await self._write(lambda book: rules.refuse(book, lease_id, no), job.over)

    def _measured(self, job: LeaseJob, tree: ProcessTree) -> None:
        was_over = job.tree is not None and job.lease.is_exceeded_by(job.tree.used_bytes)
        job.tree = tree
        lease_id, leased = job.lease.lease_id, job.lease.wish.size_bytes
        size = max(leased, tree.used_bytes)
        unfilled = size - tree.used_bytes
        if abs(size - job.told[0]) + abs(unfilled - job.told[1]) >= _STEP_BYTES:
            job.told = size, unfilled
            if job.task is None:
                self._arbiter.hold(job.label, size, unfilled)
            else:
                self._arbiter.measure(CAPABILITY, lease_id, size, unfilled)
        if job.lease.is_exceeded_by(tree.used_bytes) and not was_over:
            event(
                _log,
                "a holder uses more than it leased",
                level=logging.WARNING,
                lease=lease_id,
                pid=job.lease.pid,
                leased=format_bytes(leased),
                used=format_bytes(tree.used_bytes),
            )


class _LeaseHandler:
    """The handler of the capability: a lease is loaded by being granted; nothing is run."""

    def __init__(self, size: Callable[[str], int]) -> None:
        self._size = size

    async def load(self, model_key: str) -> Loaded:
        # All bytes are the holder's, and none is used yet.
        size = self._size(model_key)
        return Loaded(backend=model_key, measured_bytes=size, unfilled_bytes=size)

    async def unload(self, model_key: str, backend: object) -> None:
        del model_key, backend

    async def run(self, backend: object, payload: object) -> object:
        raise errors.Unsupported(f"lease {backend} runs nothing; {payload!r} was asked of it")


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        event(_log, "lease not served", level=logging.WARNING, error=repr(fault))


def _waits_for(lease: ProcessLease, seen: Snapshot, book: Book) -> str:
    """The reason of a wait, in words; sizes are coarse, so that it is not rewritten all the
    time."""
    wanted = format_bytes(lease.wish.size_bytes)
    if seen.level is PressureLevel.CRITICAL:
        return f"{wanted} of memory: memory pressure is critical"
    free = max(0, seen.free_bytes) // _COARSE_BYTES * _COARSE_BYTES
    used = [str(one.key) for one in seen.residents if one.leases and one.role.name != JOB.name]
    parts = [f"{', '.join(used)} in use"] if used else []
    held = rules.holders(book)
    parts += [held] if held else []
    rest = "; ".join(parts) or "models make room"
    return (
        f"{wanted} of memory: about {format_bytes(free)} of {format_bytes(seen.budget_bytes)} "
        f"are free; {rest}"
    )
