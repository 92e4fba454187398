"""The asking side of leases: waits in the queue, and settles it where no node grants.

    async with store:
        borrower = Borrower(store, census, clock=clock, room=machine_room)
        lease = await borrower.acquire(wish, "train-3f9a", wait_s=60, tell=print)
        ...
        await borrower.release(lease.lease_id)

A process that dies while it waits or holds needs no farewell: the others see that it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.core.units import format_bytes
from kakeya.memory.leases import rules
from kakeya.memory.leases.lease import Book, LeaseDenial, LeaseState, ProcessLease, Wish
from kakeya.memory.leases.processes import Census
from kakeya.memory.leases.rules import MachineSight
from kakeya.memory.leases.store import LeaseStore

POLL_S = 0.25
LOOK_S = 1.0
"""The time between two looks of a waiting process for dead holders."""
_ANSWER_S = 3.0
"""The least time that a node has for its answer, if the caller's wait is shorter."""
_PATIENCE_S = 30.0
"""The time for which a waiting process puts up with a store or system out of order."""
_BY_CODE: dict[str, type[errors.Refused]] = {
    kind.code: kind for kind in (errors.MemoryRefused, errors.DrainTimeout, errors.LeaseRefused)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A machine's bytes for leases where no node tells them. Both functions may block.

    `budget` is the most that all leases may hold, `available` the free memory of the machine, None
    = unknown.
    """

    budget: Callable[[], int]
    available: Callable[[], int | None]


class Borrower:
    """Asks for leases on behalf of its process, within `async with store`."""

    def __init__(
        self, store: LeaseStore, census: Census, *, clock: Clock, room: Room, poll_s: float = POLL_S
    ) -> None:
        self._store = store
        self._census = census
        self._clock = clock
        self._room = room
        self._poll_s = poll_s

    async def acquire(
        self,
        wish: Wish,
        lease_id: str,
        *,
        wait_s: float = float("inf"),
        tell: Callable[[str], None] = lambda _: None,
    ) -> ProcessLease:
        """Wait for a lease; `tell` is called with the reason of the wait whenever it changes.

        A call that ends without a lease leaves the queue.

        Raises DeadlineExceeded, MemoryRefused, LeaseRefused, StoreFailed, and PeerUnavailable where
        the system does not list its processes.
        """
        sight = MachineSight(boot=self._census.boot, now_mono=self._clock.mono())
        try:
            lease = await self._store.change(
                lambda book: rules.ask(book, wish, lease_id, self._census.own, sight)
            )
            return await self._wait(lease, self._clock.mono() + wait_s, tell)
        except BaseException:  # the change may be written although the caller left
            await asyncio.shield(self._give_up(lease_id))
            raise

    async def release(self, lease_id: str) -> None:
        """End a lease or its wait; a second call does nothing."""
        await self._store.change(lambda book: (book.without(lease_id), None))

    async def beat(self, lease: ProcessLease) -> ProcessLease:
        """Send a heartbeat. It is needed each `BEAT_S`, since other containers cannot see the
        process."""
        found = await asyncio.to_thread(self._census.process_trees, (lease,))
        tree = found[lease.lease_id]
        return await self._store.change(
            lambda book: rules.beat(
                book,
                lease,
                self._clock.mono(),
                processes=tree.processes,
                used_bytes=tree.used_bytes,
            )
        )

    async def settle(self) -> Book:
        """Serve the queue if no node does; returns the book after it."""
        book = await self._store.read()
        sight = await asyncio.to_thread(self._census.look, book, self._clock.mono())
        available = await asyncio.to_thread(self._room.available)
        own_budget = await asyncio.to_thread(self._room.budget)

        def settled(book: Book) -> tuple[Book, Book]:
            after = rules.settle_alone(
                book,
                sight,
                budget_bytes=own_budget if book.budget_bytes is None else book.budget_bytes,
                available_bytes=available,
            )
            return after, after

        if settled(book)[0] is book:
            return book
        return await self._store.change(settled)

    async def _give_up(self, lease_id: str) -> None:
        try:
            await self.release(lease_id)
        except errors.KakeyaError:
            return  # the store is out of order; the other processes see that this one is gone

    async def _wait(
        self, lease: ProcessLease, until_mono: float, tell: Callable[[str], None]
    ) -> ProcessLease:
        asked_mono = looked_mono = beat_mono = broken_mono = self._clock.mono()
        looked_mono -= LOOK_S
        told = ""
        while True:
            now = self._clock.mono()
            try:
                if now - looked_mono >= LOOK_S:
                    looked_mono, book = now, await self.settle()
                else:
                    book = await self._store.read()
                mine = book.leases.get(lease.lease_id)
                if mine is None or now - beat_mono >= rules.BEAT_S:
                    beat_mono, mine = now, await self.beat(mine or lease)
                broken_mono = now
            except rules.OUT_OF_ORDER as problem:
                now = self._clock.mono()
                if now >= min(until_mono, broken_mono + _PATIENCE_S):
                    raise
                text = problem.message
            else:
                if mine.state is LeaseState.GRANTED:
                    return mine
                if mine.no is not None:
                    raise error_of(mine.no)
                text = mine.note or _usual_wait(book)
                answer_s = _ANSWER_S if book.granter is not None else 0.0
                if now >= max(until_mono, asked_mono + answer_s):
                    raise _too_late(mine, now - asked_mono, text)
            if text != told:
                told = text
                tell(text)
            await self._clock.sleep(self._poll_s)


def error_of(no: LeaseDenial) -> errors.Refused:
    """The error that a refusal in the book stands for."""
    kind = _BY_CODE.get(no.code, errors.LeaseRefused)
    return kind(no.message, retry_after_s=no.retry_after_s)


def _usual_wait(book: Book) -> str:
    return f"node {book.granter.node_id} to make room" if book.granter else "its turn"


def _too_late(lease: ProcessLease, waited_s: float, text: str) -> errors.DeadlineExceeded:
    return errors.DeadlineExceeded(
        f"no lease of {format_bytes(lease.wish.size_bytes)} within {waited_s:.0f} s; it still "
        f"waits for {text}; allow more time, or ask for less"
    )
