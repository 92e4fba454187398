"""The queue for slots of one model: requests wait until their adapters are brought into slots.

A request skips the queue when its adapter is in a slot. When the oldest waiting request is older
than AGE_S, the least requested adapter in a slot yields: new requests for it queue too, so its slot
empties, and the oldest request gets it. An adapter yields no longer than others wait. The order is
`BatchFormer`'s, in which no request starves.

An adapter that is on disk only is laid in pages first; its request then has the place in the queue
of the time when it came. So no other request waits for a disk, or for pages. The mover, which
serves the queue, lays an adapter in pages only if its pages were taken meanwhile.

An engine adds slots while its memory allows. Where it refuses one, its adapters share those there
are, for a while: the one that idles longest leaves its slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext

from kakeya.adapters.batch import AGE_S, AdapterBatch, BatchFormer
from kakeya.adapters.files.store import AdapterReplaced
from kakeya.adapters.places import AdapterEngine, AdapterPlaces
from kakeya.adapters.tiers import Adapter, AdapterTable, Move, Tier
from kakeya.core.clock import Clock
from kakeya.core.errors import (
    CapacityExhausted,
    Conflict,
    InvariantBroken,
    KakeyaError,
    MemoryRefused,
    PeerUnavailable,
    QueueFull,
    Unsupported,
)
from kakeya.core.log import event
from kakeya.generation.config import WAIT_S
from kakeya.generation.place_rate import PlaceRate

_log = logging.getLogger(__name__)
Lend = Callable[[str], AbstractAsyncContextManager[AdapterEngine]]
"""Holds a model's engine, loaded for it if need be; waits as long as any request does."""
MAX_WAITING = 256
_SHORT_S = 30.0
"""How long an engine that refused a slot for want of memory is asked for no more."""
_TRIES = 3
"""The most engines that may end under one request."""


class _Waiter:
    __slots__ = ("adapter", "granted", "is_following", "since", "tries")

    def __init__(self, adapter: Adapter, now: float, *, is_following: bool) -> None:
        self.adapter = adapter
        self.is_following = is_following
        self.since = now
        self.tries = 0
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class SlotQueue:
    """The queue for one model's slots; `run` is its supervised task."""

    def __init__(
        self,
        base: str,
        table: AdapterTable,
        places: AdapterPlaces,
        lend: Lend,
        *,
        clock: Clock,
        on_failure: Callable[[Adapter, KakeyaError], None],
    ) -> None:
        """`on_failure` is called with an adapter that could not be brought in, and the reason."""
        self._base = base
        self._table = table
        self._places = places
        self._lend = lend
        self._clock = clock
        self._on_failure = on_failure
        self._former: BatchFormer[_Waiter] = BatchFormer()
        self._wake = asyncio.Event()
        self._prefetch: tuple[Move, ...] = ()
        self._warming = 0
        self._rate = PlaceRate(clock.mono)
        self._slot_rate = PlaceRate(clock.mono)
        self._short = 0, 0.0  # no more slots than these, until this time
        self.slots = 0
        """The most slots of the engine that was last seen, or those that its memory allows."""

    @property
    def waiting(self) -> int:
        """Requests that wait, in the queue or for pages."""
        return len(self._former) + self._warming

    def take(self, adapter: Adapter, *, is_following: bool = False) -> bool:
        """Lease an adapter that is in a slot and does not yield; False = the request has to wait.

        For a request that `is_following`, an adapter on its way suffices; see `wait`.
        """
        is_there = adapter.is_hot and not (adapter.is_moving or adapter.is_yielding)
        if is_there or (is_following and adapter.is_coming):
            self._table.lease(adapter, self._clock.mono())
            return True
        return False

    async def wait(
        self, adapter: Adapter, patience_s: float, *, is_following: bool = False
    ) -> None:
        """Return once the adapter is in a slot and leased.

        A request that `is_following` is sent to the engine behind the load: for it, a sent load
        suffices. Where the load fails, the engine answers that it knows no such adapter.
        Raises QueueFull, CapacityExhausted when the time is up, and errors of the way to the slot.
        """
        if self.waiting >= MAX_WAITING:
            raise QueueFull(
                f"{self.waiting} requests wait for adapters of {self._base}, which is the limit",
                retry_after_s=self._rate.retry_after_s(),
            )
        if self.waiting == MAX_WAITING - 1:
            self._rate.full()
        waiter = _Waiter(adapter, self._clock.mono(), is_following=is_following)
        adapter.waiting += 1
        self._slot_rate.full()
        is_granted = False
        try:
            async with asyncio.timeout(patience_s):
                if adapter.tier is Tier.COLD:
                    await self._warm(adapter)
                    if self.take(adapter, is_following=is_following):
                        return
                self._former.add(adapter.adapter_id, waiter, waiter.since)
                self._wake.set()
                await waiter.granted
                is_granted = True
        except TimeoutError:
            self._leave(waiter)
            raise CapacityExhausted(
                f"adapter {adapter.adapter_id} got no slot within {patience_s:.3g} s; "
                f"{len(self._table.hot(self._base))} of {self.slots} are taken by others",
                retry_after_s=self._slot_rate.retry_after_s(),
            ) from None
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        finally:
            adapter.waiting -= 1
            self._rate.freed(is_full=self.waiting >= MAX_WAITING - 1)
            if is_granted or not self.waiting:  # a request that gave up frees no slot
                self._slot_rate.freed(is_full=self.waiting > 0)

    def released(self) -> None:
        """Note that a lease ended: a slot may have come free."""
        if self._former:
            self._wake.set()

    def tidy(self, prefetch: tuple[Move, ...]) -> None:
        """Move adapters when no request waits: these ones in, removed ones out."""
        self._prefetch = prefetch
        self._wake.set()

    async def run(self) -> None:
        """Serve the queue for ever; one mover for each model, so that no two want one slot."""
        while True:
            self._stop_yielding()
            if not self._former:
                await self._wake.wait()
            self._wake.clear()
            if not self._former:
                await self._tidy()
            elif not await self._serve():
                self._ask_to_yield()
                await self._clock.sleep(AGE_S / 2, self._wake)

    # --- inside

    async def _warm(self, adapter: Adapter) -> None:
        """Have an adapter laid in pages for a waiting request."""
        self._warming += 1
        try:
            # The engine is held, so that it is not the idle model that goes for these pages.
            async with self._lend(self._base):
                if adapter.is_retired:
                    raise _removed(adapter)
                try:
                    with self._places.wanted(adapter):
                        await self._places.warm(adapter)
                except KakeyaError as problem:
                    raise self._refusal(adapter, problem) from None
        finally:
            self._warming -= 1

    async def _serve(self) -> bool:
        """Serve some requests; False when none could be served."""
        try:
            async with self._lend(self._base) as engine:
                await engine.ready(WAIT_S)  # a dead engine is started again
                has_served = await self._bring(engine)
                await asyncio.sleep(0)  # served requests go on before the engine is given back
                return has_served
        except KakeyaError as problem:
            batch = self._former.form(self._clock.mono(), places=MAX_WAITING)
            self._fail([waiter for _, waiter in batch.rows], problem)
            return True

    async def _bring(self, engine: AdapterEngine) -> bool:
        self._places.engine_changed(self._base, engine.pid)
        self.slots = engine.facts.adapter_slots if engine.facts else 0
        if not self.slots:
            raise Unsupported(
                f"the engine of {self._base} takes no adapters: it is a ring group, or the node "
                "was started with adapters.slots of 0"
            )
        bound, until_mono = self._short
        if self._clock.mono() < until_mono:
            self.slots = min(self.slots, bound)
        hot = self._table.hot(self._base)
        free = max(0, self.slots - len(hot))
        batch = self._former.form(
            self._clock.mono(),
            places=free + sum(adapter.is_idle for adapter in hot),
            resident={a.adapter_id for a in hot if not (a.is_moving or a.is_yielding)},
        )
        try:
            return await self._fill_slots(batch, engine, free)
        except BaseException:
            self._put_back([waiter for _, waiter in batch.rows])
            raise

    async def _fill_slots(
        self, batch: AdapterBatch[_Waiter], engine: AdapterEngine, free: int
    ) -> bool:
        """Bring in the adapters of a batch, at the same time; False when no request got one."""
        done = self._grant_present(batch)
        jobs = []
        for waiters in self._absent(batch):
            adapter = waiters[0].adapter
            out = None if free > 0 else self._table.victim(self._base)
            if free <= 0 and out is None:
                self._put_back(waiters)
                continue
            free -= 1
            jobs.append(self._move(adapter, waiters, engine, out))
        if len(jobs) == 1:
            return await jobs[0] or done  # without a task, which costs a turn of the loop
        return any(await asyncio.gather(*jobs)) or done

    def _move(
        self, adapter: Adapter, waiters: list[_Waiter], engine: AdapterEngine, out: Adapter | None
    ) -> Coroutine[None, None, bool]:
        """Mark both adapters as moving at once; `_bring_one` then moves them."""
        adapter.is_moving = True
        if out is not None:
            out.is_moving = True
        return self._bring_one(adapter, waiters, engine, out)

    async def _bring_one(
        self, adapter: Adapter, waiters: list[_Waiter], engine: AdapterEngine, out: Adapter | None
    ) -> bool:
        """Bring one adapter in, for all requests for it; False when these wait on."""
        following = [waiter for waiter in waiters if waiter.is_following]

        def sent() -> None:
            adapter.is_coming = True
            self._grant(following)

        try:
            with self._places.wanted(adapter) if waiters else nullcontext():
                await self._places.heat(adapter, engine, out, sent if following else None)
        except (PeerUnavailable, Conflict) as problem:
            adapter.is_doubtful = True
            return self._try_again(waiters, problem)
        except KakeyaError as problem:
            if isinstance(problem, MemoryRefused) and out is None and self._is_short():
                self._put_back(waiters)
                return True
            self._fail(waiters, self._refusal(adapter, problem))
            return True
        finally:
            adapter.is_coming = adapter.is_moving = False
            if out is not None:
                out.is_moving = False
        self._grant(waiters)
        return True

    def _is_short(self) -> bool:
        """Note that there is no memory for a further slot; False where there is none at all."""
        there = len(self._table.hot(self._base))
        self._short = there, self._clock.mono() + _SHORT_S
        return there > 0

    async def _tidy(self) -> None:
        """Move adapters ahead of need, while no request waits and the engine is up anyway."""
        moves, self._prefetch = self._prefetch, ()
        gone = [a for a in self._table.hot(self._base) if a.is_retired and a.is_idle]
        if not (moves or gone) or not self._places.is_up(self._base):
            return
        try:
            async with self._lend(self._base) as engine:
                for adapter in gone:
                    await self._unload(adapter, engine)
                for move in moves:
                    if self._former:
                        return
                    await self._carry_out(move, engine)
        except KakeyaError as problem:
            event(_log, "slots not tidied", level=logging.DEBUG, problem=problem.message)

    async def _unload(self, adapter: Adapter, engine: AdapterEngine) -> None:
        """Take out a removed adapter, unless it came back meanwhile."""
        if not (adapter.is_retired and adapter.is_idle):
            return
        adapter.is_moving = True  # new requests for it wait in the queue
        try:
            await engine.unload_adapter(adapter.adapter_id)
            self._table.left_slot(adapter)
        finally:
            adapter.is_moving = False

    async def _carry_out(self, move: Move, engine: AdapterEngine) -> None:
        """Bring in a much used adapter, if it still is out and its place still is free."""
        if move.adapter_id not in self._table:
            return
        adapter = self._table.get(move.adapter_id)
        hot = self._table.hot(self._base)
        out = next((a for a in hot if a.adapter_id == move.instead_of), None)
        is_room = len(hot) < self.slots or (out is not None and out.is_idle)
        if adapter.tier is not Tier.WARM or adapter.is_retired or not is_room:
            return
        await self._move(adapter, [], engine, out if len(hot) >= self.slots else None)

    def _grant_present(self, batch: AdapterBatch[_Waiter]) -> bool:
        """Grant requests for adapters in slots; a yielding one took its turn like others."""
        present = [waiter for _, waiter in batch.rows if _is_present(waiter.adapter)]
        for waiter in present:
            waiter.adapter.is_yielding = False
        self._grant(present)
        return bool(present)

    def _absent(self, batch: AdapterBatch[_Waiter]) -> list[list[_Waiter]]:
        """The other requests, by adapter. Those for a removed adapter fail."""
        groups: dict[Adapter, list[_Waiter]] = {}
        for _, waiter in batch.rows:
            if waiter.adapter.is_retired:
                self._fail([waiter], _removed(waiter.adapter))
            elif not waiter.granted.done():
                groups.setdefault(waiter.adapter, []).append(waiter)
        return list(groups.values())

    def _grant(self, waiters: list[_Waiter]) -> None:
        now = self._clock.mono()
        for waiter in waiters:
            if waiter.granted.done():  # the caller left
                continue
            try:
                self._table.lease(waiter.adapter, now)
            except Conflict as removed:
                waiter.granted.set_exception(removed)
            else:
                waiter.granted.set_result(None)

    def _refusal(self, adapter: Adapter, problem: KakeyaError) -> KakeyaError:
        """Note that an adapter could not be loaded; returns the error for its requests."""
        adapter.is_doubtful = True
        if adapter.is_retired or isinstance(problem, AdapterReplaced):
            return _removed(adapter)
        self._on_failure(adapter, problem)
        return problem

    def _fail(self, waiters: list[_Waiter], problem: KakeyaError) -> None:
        for waiter in waiters:
            if not waiter.granted.done():
                waiter.granted.set_exception(problem)

    def _try_again(self, waiters: list[_Waiter], problem: KakeyaError) -> bool:
        for waiter in waiters:
            waiter.tries += 1
        over = [waiter for waiter in waiters if waiter.tries >= _TRIES]
        self._fail(over, problem)
        self._put_back([waiter for waiter in waiters if waiter.tries < _TRIES])
        return bool(over)

    def _put_back(self, waiters: list[_Waiter]) -> None:
        for waiter in waiters:
            if not waiter.granted.done():
                self._former.add(waiter.adapter.adapter_id, waiter, waiter.since)

    def _leave(self, waiter: _Waiter) -> None:
        """End a wait; a lease that was granted in the same moment is given back."""
        if self._former.remove(waiter.adapter.adapter_id, waiter):
            self._stop_yielding()
            self._wake.set()
            return
        granted = waiter.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._table.release(waiter.adapter, self._clock.mono())
            self.released()

    def _ask_to_yield(self) -> None:
        """Let the least requested adapter in use yield, if a request waits long for another."""
        adapter = self._table.yielder(self._base)
        if adapter is not None and self._is_others_turn(adapter):
            adapter.is_yielding = True

    def _stop_yielding(self) -> None:
        """Let adapters take requests again once no request waits long for another adapter."""
        for adapter in self._table.hot(self._base):
            if adapter.is_yielding and not self._is_others_turn(adapter):
                adapter.is_yielding = False

    def _is_others_turn(self, adapter: Adapter) -> bool:
        """Whether a request waits long for another adapter."""
        since = self._former.oldest(but=adapter.adapter_id)
        return since is not None and self._clock.mono() - since >= AGE_S


def _removed(adapter: Adapter) -> Conflict:
    return Conflict(f"adapter {adapter.adapter_id} was removed or replaced")


def _is_present(adapter: Adapter) -> bool:
    if adapter.is_hot and adapter.is_moving:
        raise InvariantBroken("one mover for each model", f"{adapter.adapter_id} is being moved")
    return adapter.is_hot
