"""The page arena of a node: one for all content in pages, and a tenant of the memory ledger.

    empty at first      it takes no memory until a request needs pages
    grows slab by slab  if the ledger has room, or makes it for a request that waits; where it may
                        not grow, it evicts ahead of need (see `upkeep`)
    shrinks             when the ledger asks
    an engine's end     ends the pins of that engine at once

Slabs that a killed agent left are removed at the start.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, OutOfPages
from kakeya.core.figures import Figure, Json, as_json
from kakeya.core.log import event
from kakeya.core.units import format_bytes
from kakeya.generation.kv import PageRef
from kakeya.memory.arbiter.policy import Rung, Tenant
from kakeya.memory.pages.content import (
    HEADROOM,
    PAGE_SIZES,
    ContentPriority,
    ContentType,
    Fit,
    PageConfig,
)
from kakeya.memory.pages.figures import page_figures
from kakeya.memory.pages.pins import Block, Hold, PinHolder
from kakeya.memory.pages.pool import PageOwner as PageTenant
from kakeya.memory.pages.queue import PageQueue
from kakeya.memory.pages.shared_arena import ArenaSnapshot, Filling, PageArena
from kakeya.memory.pages.upkeep import ArenaUpkeep, MakesWay

_log = logging.getLogger(__name__)
NAME = "pages"
PAGE_BYTES = min(PAGE_SIZES)
"""The default: an adapter of a small model fills a part of the smallest page."""
_USAGE_S = 0.25
"""The age limit of the usage that the ledger hears. It asks after each request, and pins change
without notice."""
ROOM_S = 10.0
"""The longest wait of a request for the ledger to make room for a slab."""


def never() -> bool:
    """No request waits for it."""
    return False


def paged_bytes(length: int, page_bytes: int) -> int:
    """The bytes of the whole pages that `length` bytes take."""
    return -(-length // page_bytes) * page_bytes


def page_config(
    slab_bytes: int,
    most_bytes: int,
    *,
    page_bytes: int = PAGE_BYTES,
    fit: Fit = Fit.BEST,
    headroom: float = HEADROOM,
) -> PageConfig:
    """The configuration of slabs of about `slab_bytes`, which is the largest block, and of at
    most `most_bytes` together; of one page at least."""
    slab_pages = max(1, slab_bytes // page_bytes)
    return PageConfig(
        page_bytes=page_bytes,
        slab_pages=slab_pages,
        total_pages=max(slab_pages, most_bytes // page_bytes),
        fit=fit,
        headroom=headroom,
    )


class LedgerClient(Protocol):
    """The calls of the memory arbiter for a tenant that grows."""

    def may_grow(self, name: str, size: int) -> bool:
        """Reserve spare bytes; False = not now."""
        ...

    async def make_room(self, name: str, size: int, timeout_s: float) -> None:
        """Reserve bytes, with evictions of idle models. Raises a KakeyaError when there are
        none."""
        ...

    def grown(self, name: str) -> None:
        """End the reservation: it has grown, or it will not."""
        ...


@dataclass(slots=True)
class _Engine:
    pid: int
    holder: PinHolder


class NodeArena:
    """See the module; a `with` that takes all slabs away at the end. Lives on the event loop."""

    def __init__(
        self,
        folder: Path,
        config: PageConfig,
        *,
        ledger: LedgerClient,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """`ledger` counts the arena once the caller has added it as a tenant. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._arena = PageArena(config, folder=folder, rng=rng, evicted=self._evicted)
        self._queue = PageQueue(self._arena)
        self._upkeep = ArenaUpkeep(
            self._arena, is_limited=self._is_limited, freed=self._queue.serve, clock=clock
        )
        self._ledger = ledger
        self._clock = clock
        self._growth = asyncio.Lock()
        self._engines: dict[str, _Engine] = {}
        self._told: dict[PageTenant, Callable[[Block], None]] = {}
        self._usage: tuple[float, Tenant] | None = None
        if self._arena.leftovers:
            event(_log, "removed what a killed node left", slabs=len(self._arena.leftovers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._arena.close()

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Slabs of killed owners that were removed at the start."""
        return self._arena.leftovers

    @property
    def largest_block_bytes(self) -> int:
        """The size of the longest block that fits."""
        config = self._arena.config
        return config.slab_pages * config.page_bytes

    def paged_bytes(self, length: int) -> int:
        """The bytes of the whole pages that `length` bytes take."""
        return paged_bytes(length, self._arena.config.page_bytes)

    async def tend(self) -> None:
        """Evict ahead of need and report overdue pins, for ever: a supervised task."""
        await self._upkeep.tend()

    # --- as a tenant of the ledger

    def usage(self) -> Tenant:
        """The bytes of its slabs now; empty slabs are given up first."""
        now = self._clock.mono()
        if self._usage is None or now - self._usage[0] > _USAGE_S:
            self._arena.at(now)
            self._usage = now, self._count()
        return self._usage[1]

    async def shrink(self, size: int) -> None:
        """Give up slabs of `size` bytes together, those with the least worth in them first."""
        slab = self._arena.slab_bytes
        self._arena.at(self._clock.mono())
        gone = await self._arena.shrink_async(-(-size // slab))
        self._usage = None
        event(_log, "pages given back", slabs=len(gone.slabs), blocks=len(gone.blocks))

    # --- blocks

    def tenant(
        self,
        content: ContentType,
        owner: str,
        evicted: Callable[[Block], None],
        priority: ContentPriority | None = None,
        makes_way: MakesWay | None = None,
    ) -> PageTenant:
        """Make a tenant; `evicted` is told of its blocks before their pages are used again.

        With `makes_way` the tenant chooses which of its blocks are evicted ahead of need.
        """
        made = self._arena.pool.tenant(content, owner, priority)
        self._told[made] = evicted
        if makes_way is not None:
            self._upkeep.makes_way[made] = makes_way
        return made

    def holder(self, name: str) -> PinHolder:
        """Make a holder of pins that is no engine."""
        return self._arena.pool.holder(name)

    async def prepare(
        self,
        tenant: PageTenant,
        length: int,
        holder: PinHolder,
        is_wanted: Callable[[], bool] = never,
    ) -> Filling:
        """Allocate a block: with a new slab if the ledger allows it, else by eviction, else after a
        short wait.

        Where that fails and `is_wanted` says that a request waits for the block, the ledger makes
        room. That takes a while, so the allocation is tried again even if the ledger refuses.

        Raises OutOfPages, PageFreed, InvalidArgument.
        """
        self._arena.at(self._clock.mono())
        pages = -(-length // self._arena.config.page_bytes)
        failed = None if self._arena.pool.has_free(pages) else await self._grow(pages)
        try:
            filling = await self._queue.prepare(tenant, length, holder)
        except OutOfPages as problem:
            if not is_wanted():
                raise self._explained(problem, failed) from problem
            failed = await self._grow_by_force()
            try:
                filling = await self._queue.prepare(tenant, length, holder)
            except OutOfPages as still:
                raise self._explained(still, failed) from still
        self._upkeep.allocated()
        return filling

    def ref(self, block: Block, length: int) -> PageRef:
        """The reference by which an engine reads a block. Raises PageFreed."""
        return self._arena.ref(block, length)

    def view(self, block: Block, length: int) -> memoryview:
        """View the bytes of a block; drop the view before the next await. Raises PageFreed."""
        return self._arena.view(block, length)

    def hold(self, block: Block, holder: PinHolder) -> Hold:
        """Open a block for a holder; pin it by `with`. Raises PageFreed."""
        self._arena.at(self._clock.mono())
        return self._arena.open(block, holder)

    def at_now(self) -> None:
        """Move the time of all blocks on: later uses count as younger than earlier ones."""
        self._arena.at(self._clock.mono())

    def move(self, block: Block, tenant: PageTenant) -> None:
        """Give a block to another tenant. Raises PageFreed."""
        self._arena.pool.move(block, tenant)

    def mark_dirty(self, block: Block) -> None:
        """Say that a block waits for the disk. Raises PageFreed."""
        self._arena.pool.mark_dirty(block)

    def mark_clean(self, block: Block) -> None:
        """Say that a block is on disk, or will not be; harmless when it is clean or free."""
        self._arena.pool.mark_clean(block)

    def free(self, block: Block) -> None:
        """Give a block back. Raises PageFreed, Conflict while it is pinned."""
        self._arena.pool.free(block)
        self._queue.serve()

    # --- engines

    def engine(self, model_id: str, pid: int) -> PinHolder:
        """The holder of a model's engine; each process has its own."""
        known = self._engines.get(model_id)
        if known is None or known.pid != pid:
            self.engine_changed(model_id, pid)
            known = self._engines[model_id] = _Engine(pid, self.holder(f"{model_id} ({pid})"))
        return known.holder

    def engine_changed(self, model_id: str, pid: int | None) -> None:
        """Take back the pins of a model's earlier engine; `pid` None = it has no engine now."""
        known = self._engines.get(model_id)
        if known is None or known.pid == pid:
            return
        del self._engines[model_id]
        pins = self._arena.close_holder(known.holder)
        if pins:
            event(_log, "an engine ended with pins", model=model_id, pid=known.pid, pins=pins)
        self._queue.serve()

    # --- what there is

    def snapshot(self) -> ArenaSnapshot:
        """Count everything once."""
        return self._arena.snapshot()

    def check_integrity(self) -> None:
        """Check what holds of the pages between any two calls. Raises InvariantBroken."""
        self._arena.pool.check_integrity()

    def status(self) -> Json:
        """Pages by state, as JSON; `fragmentation` is 0 where all free pages lie together."""
        arena = self._arena.snapshot()
        return as_json(page_figures(arena)) | {
            "page_bytes": arena.page_bytes,
            "total": arena.pool.total_pages,
            "fragmentation": round(1 - arena.pool.contiguity, 3),
        }

    def figures(self) -> Iterator[Figure]:
        """Utilisation, fragmentation, latencies."""
        return page_figures(self._arena.snapshot())

    async def _grow(self, pages: int) -> KakeyaError | None:
        """Add a slab if it is allowed and still needed; without it, blocks are evicted.

        Returns why an allowed slab could not be made.
        """
        async with self._growth:
            is_enough = self._arena.pool.has_free(pages)
            if not is_enough and self._ledger.may_grow(NAME, self._arena.slab_bytes):
                return await self._add_slab()
        return None

    def _is_limited(self) -> bool:
        """Whether it may not grow now; looked at by a reservation that ends at once."""
        if self._growth.locked():
            return False
        try:
            self._arena.pool.check_growth()
        except OutOfPages:
            return True
        if not self._ledger.may_grow(NAME, self._arena.slab_bytes):
            return True
        self._ledger.grown(NAME)
        return False

    async def _grow_by_force(self) -> KakeyaError | None:
        """Add a slab, with evictions of idle models; returns why it could not, if it could not."""
        until_mono = self._clock.mono() + ROOM_S
        before = self._arena.pool.slabs()
        async with self._growth:
            if set(self._arena.pool.slabs()) - set(before):
                return None  # the slab of another request serves this one, too
            try:
                self._arena.pool.check_growth()
                left_s = until_mono - self._clock.mono()
                await self._ledger.make_room(NAME, self._arena.slab_bytes, left_s)
            except KakeyaError as refused:
                event(_log, "no room for pages", reason=refused.message)
                return refused
            return await self._add_slab()

    async def _add_slab(self) -> KakeyaError | None:
        """Add a slab within the reservation; returns why it could not be made, if it could not."""
        try:
            await self._arena.grow_async()
        except OutOfPages as full:
            event(_log, "no more pages", level=logging.DEBUG, reason=full.message)
            return full
        finally:
            self._usage = None
            self._ledger.grown(NAME)
        return None

    def _explained(self, problem: OutOfPages, failed: KakeyaError | None) -> OutOfPages:
        """Add when to ask again, and the way out where there are no pages at all."""
        why = failed.message if failed is not None else ""
        if self._arena.pool.slabs():
            message = f"{problem.message}; {why}" if why else problem.message
        else:
            why = why or (
                f"the ledger has no {format_bytes(self._arena.slab_bytes)} to give; ask again, or "
                "give the node a larger --memory-budget"
            )
            message = f"there is no memory for pages now: {why}"
        return OutOfPages(message, retry_after_s=problem.retry_after_s or 1.0)

    def _count(self) -> Tenant:
        pool, slab = self._arena.pool, self._arena.slab_bytes
        there = pool.slabs()
        used = {block.first // self._arena.config.slab_pages for block in pool.blocks()}
        empty = len(set(there) - used)
        movable = len(pool.plan_shrink(len(there)).slabs)
        return Tenant(
            name=NAME,
            rung=Rung.PAGES,
            held_bytes=len(there) * slab,
            expired_bytes=empty * slab,
            spare_bytes=(movable - empty) * slab,
        )

    def _evicted(self, block: Block) -> None:
        if block.tenant in self._told:
            self._told[block.tenant](block)
