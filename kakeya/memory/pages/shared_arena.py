"""The page arena: the pool's decisions on real shared memory, and its blocks for other processes.

The agent makes and owns it; engines map its slabs (`reader`). The pool decides where a block lies,
the store makes the slabs, and the arena keeps the stamps in front of them true: written after a
block is committed, cleared before its pages can be used again.

    filling = arena.prepare(tenant, length, holder)   # neither seen nor evicted
    filling.view[:] = ...                             # or an engine writes to `filling.ref`
    filling.commit()                                  # all processes see it, whole; or `rollback`
    hold = arena.hold(filling.ref, engine)            # opened by its reference
    with hold: ...                                    # and pinned

The arena grows and shrinks by whole slabs when the ledger says so; it never does of its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from kakeya.core.errors import InvalidArgument, OutOfPages, PageFreed
from kakeya.core.figures import Durations
from kakeya.core.ids import draw_id
from kakeya.generation.kv import PageRef
from kakeya.memory.pages.content import PageConfig
from kakeya.memory.pages.eviction import ShrinkPlan
from kakeya.memory.pages.pins import Block, Hold, PinHolder
from kakeya.memory.pages.pool import PageOwner, PagePool
from kakeya.memory.pages.slabs import MappedSlab, SlabStore, header_bytes
from kakeya.memory.pages.stats import PoolStats

LATENCY_BOUNDS_S = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSnapshot:
    """An arena at one moment, for status and metrics."""

    pool: PoolStats
    slab_bytes: int  # of all slabs, stamps included, as the ledger counts them
    page_bytes: int
    holds_asked: int
    holds_stale: int  # of them for a block that had gone
    overdue_pins: int  # should have ended with their scope
    rolled_back: int  # blocks, by the end of the holder that filled them
    latency: Durations  # of blocks that were committed: to prepare and to commit, without filling


class Filling:
    """A block that is being written; as a context manager it rolls back unless committed."""

    __slots__ = ("_arena", "_first", "_is_ended", "_slab", "block", "length", "prepared_s", "view")

    def __init__(
        self, arena: PageArena, block: Block, slab: MappedSlab, first: int, length: int
    ) -> None:
        self.block = block
        self.length = length
        self.view = slab.bytes_of(first, length)
        self.prepared_s = 0.0  # the time that preparing took
        self._arena = arena
        self._slab = slab
        self._first = first
        self._is_ended = False

    @property
    def ref(self) -> PageRef:
        """The reference of the block for other processes."""
        return _ref(self.block, self._slab, self._first, self.length)

    def commit(self) -> None:
        """Show the block to all processes, whole. Raises PageFreed when its holder has ended."""
        self._is_ended = True
        self.view.release()
        self._arena.commit(self.block, self.prepared_s)

    def rollback(self) -> None:
        """Give its pages back; harmless after a rollback."""
        if not self._is_ended:
            self._is_ended = True
            self.view.release()
            if self.block.is_live:
                self._arena.pool.rollback(self.block)

    def __enter__(self) -> Filling:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollback()


class PageArena:
    """Pages in shared memory. One thread owns it; a context manager that takes the slabs away."""

    def __init__(
        self,
        config: PageConfig,
        *,
        folder: Path,
        rng: random.Random,
        evicted: Callable[[Block], None] | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`folder` lists the slabs of living owners; `evicted` is told before pages are reused."""
        self.config = config
        self.pool = PagePool(config, freed=self._freed)
        token = draw_id("a", rng, 12).replace("-", "")
        self._store = SlabStore(
            folder, token, pages=config.slab_pages, page_bytes=config.page_bytes
        )
        self._slabs: dict[int, MappedSlab] = {}
        self._numbers: dict[str, int] = {}  # name -> slab number
        self._evicted = evicted
        self._timer = timer
        self._latency = Durations(LATENCY_BOUNDS_S)
        self._holds_asked = 0
        self._holds_stale = 0
        self._rolled_back = 0

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Slabs of dead owners that were removed at the start."""
        return self._store.leftovers

    def at(self, now: float) -> int:
        """Move the time on, and end ownerless pins past their limit; returns their number."""
        self.pool.at(now)
        return self.pool.end_overdue()

    # --- size

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab in the ledger."""
        pages = self.config.slab_pages
        return header_bytes(pages) + pages * self.config.page_bytes

    def grow(self, slabs: int = 1) -> None:
        """Add slabs. Raises OutOfPages at the total, or when the machine has no memory for one.

        A slab's memory is there when this returns, which takes a quarter of a millisecond for
        each MiB: on an event loop, `grow_async`.
        """
        for _ in range(slabs):
            self.pool.check_growth()
            self._add(self._store.make())

    def shrink(self, slabs: int = 1) -> ShrinkPlan:
        """Remove up to so many slabs with their unpinned blocks; returns both."""
        plan, gone = self._take_out(slabs)
        for slab in gone:
            self._store.remove(slab)
        return plan

    async def grow_async(self, slabs: int = 1) -> None:
        """Grow; another thread waits for the memory. Cancelled, it adds no slab more."""
        for _ in range(slabs):
            self.pool.check_growth()
            making = asyncio.get_running_loop().run_in_executor(None, self._store.make)
            try:
                slab = await asyncio.shield(making)
            except asyncio.CancelledError:
                making.add_done_callback(self._discard)
                raise
            self._add(slab)

    async def shrink_async(self, slabs: int = 1) -> ShrinkPlan:
        """Shrink; another thread gives the memory back."""
        plan, gone = self._take_out(slabs)
        for slab in gone:
            await asyncio.shield(asyncio.to_thread(self._store.remove, slab))
        return plan

    # --- blocks

    def prepare(self, tenant: PageOwner, length: int, holder: PinHolder) -> Filling:
        """Allocate `length` bytes for `holder` to fill. Raises OutOfPages, PageFreed."""
        started = self._timer()
        most = self.config.slab_pages * self.config.page_bytes
        if not 0 < length <= most:
            raise InvalidArgument(f"{length} bytes are asked; a block has 1..{most}")
        block = self.pool.prepare(tenant, -(-length // self.config.page_bytes), holder)
        slab, first = self._at(block)
        filling = Filling(self, block, slab, first, length)
        filling.prepared_s = self._timer() - started
        return filling

    def commit(self, block: Block, prepared_s: float = 0.0) -> None:
        """Let other processes see a block, which took `prepared_s` to prepare. Raises PageFreed,
        Conflict."""
        started = self._timer()
        self.pool.commit(block)
        slab, first = self._at(block)
        slab.publish(first, block.stamp)
        self._latency.add(prepared_s + self._timer() - started)

    def hold(self, ref: PageRef, holder: PinHolder) -> Hold:
        """Open the block of a reference. Raises PageFreed when it has gone."""
        with self._asked():
            return holder.hold(self._find(ref))

    def open(self, block: Block, holder: PinHolder) -> Hold:
        """Open a block of this process. Raises PageFreed when it has gone."""
        with self._asked():
            return holder.hold(block)

    def close_holder(self, holder: PinHolder) -> int:
        """End a holder, as when its process died; returns the number of its pins."""
        closed = self.pool.close(holder)
        self._rolled_back += closed.rolled_back
        return closed.pins

    def ref(self, block: Block, length: int | None = None) -> PageRef:
        """The reference of a block for other processes. Raises PageFreed."""
        if not block.is_live:
            raise PageFreed(f"{block} was freed")
        return _ref(block, *self._at(block), length)

    def view(self, block: Block, length: int | None = None) -> memoryview:
        """View the bytes of a block; writable. Keep it pinned while the view is in use."""
        if not block.is_live:
            raise PageFreed(f"{block} was freed")
        slab, first = self._at(block)
        return slab.bytes_of(first, block.pages * slab.page_bytes if length is None else length)

    def snapshot(self) -> ArenaSnapshot:
        """Count everything once."""
        return ArenaSnapshot(
            pool=self.pool.stats(),
            slab_bytes=len(self._slabs) * self.slab_bytes,
            page_bytes=self.config.page_bytes,
            holds_asked=self._holds_asked,
            holds_stale=self._holds_stale,
            overdue_pins=sum(hold.pins for hold in self.pool.overdue()),
            rolled_back=self._rolled_back,
            latency=self._latency.copy(),
        )

    def close(self) -> None:
        """Take all slabs away; harmless twice."""
        self._store.close()

    def __enter__(self) -> PageArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Count an attempt to open a block by its outcome."""
        self._holds_asked += 1
        try:
            yield
        except PageFreed:
            self._holds_stale += 1
            raise

    def _add(self, slab: MappedSlab) -> None:
        try:
            number = self.pool.grow()
        except OutOfPages:  # another call added a slab meanwhile
            self._store.remove(slab)
            raise
        self._slabs[number] = slab
        self._numbers[slab.name] = number

    def _take_out(self, slabs: int) -> tuple[ShrinkPlan, tuple[MappedSlab, ...]]:
        plan = self.pool.plan_shrink(slabs)
        for number in plan.slabs:
            self.pool.remove(number)
        gone = tuple(self._slabs.pop(number) for number in plan.slabs)
        for slab in gone:
            del self._numbers[slab.name]
        return plan, gone

    def _discard(self, making: asyncio.Future[MappedSlab]) -> None:
        if making.exception() is None:
            self._store.remove(making.result())

    def _at(self, block: Block) -> tuple[MappedSlab, int]:
        number, first = divmod(block.first, self.config.slab_pages)
        return self._slabs[number], first

    def _find(self, ref: PageRef) -> Block:
        number = self._numbers.get(ref.slab)
        if number is None:
            raise PageFreed(f"slab {ref.slab} is not one of this arena, or went")
        return self.pool.find(number * self.config.slab_pages + ref.first, ref.stamp)

    def _freed(self, block: Block, evicted: bool) -> None:
        slab, first = self._at(block)
        if slab.stamp(first):
            slab.retract(first)
        if evicted and self._evicted is not None:
            self._evicted(block)


def _ref(block: Block, slab: MappedSlab, first: int, length: int | None) -> PageRef:
    return PageRef(
        slab=slab.name,
        slab_pages=slab.pages,
        page_bytes=slab.page_bytes,
        first=first,
        pages=block.pages,
        length=block.pages * slab.page_bytes if length is None else length,
        stamp=block.stamp,
    )


def layout(lengths: Sequence[int], alignment: int) -> tuple[tuple[int, ...], int]:
    """Place several arrays in one block, each aligned; their offsets, and the bytes of all."""
    padded = [-(-length // alignment) * alignment for length in lengths]
    ends = list(accumulate(padded, initial=0))
    return tuple(ends[:-1]), ends[-1]
