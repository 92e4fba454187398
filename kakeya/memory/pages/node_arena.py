"""The page arena of a node: one for all that lies in pages, a tenant of the memory ledger.

It has no memory until somebody needs pages. It grows slab by slab, each time only if the ledger
has room, or makes it for a request that waits; gives slabs back when the ledger asks; and ends what
an engine held as soon as that engine is gone. Where it may not grow, it evicts ahead of need (see
`upkeep`). Slabs that a killed agent left are removed at the start.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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
from kakeya.memory.pages.queue import PageLine
from kakeya.memory.pages.shared_arena import ArenaSnapshot, Filling, PageArena
from kakeya.memory.pages.upkeep import ArenaUpkeep, MakesWay

_log = logging.getLogger(__name__)
NAME = "pages"
PAGE_BYTES = min(PAGE_SIZES)
"""Unless it is set: an adapter of a small model fills a part of the smallest one."""
_USAGE_S = 0.25
"""The ledger asks after each request; pins change without a notice, so this is how old what it
hears may be."""


ROOM_S = 10.0
"""How long a request waits for the ledger to make room for a slab."""


def never() -> bool:
    """Nobody waits for it."""
    return False


def paged_bytes(length: int, page_bytes: int) -> int:
    """What so many bytes take in pages."""
    return -(-length // page_bytes) * page_bytes


def page_config(
    slab_bytes: int,
    most_bytes: int,
    *,
    page_bytes: int = PAGE_BYTES,
    fit: Fit = Fit.BEST,
    headroom: float = HEADROOM,
) -> PageConfig:
    """Slabs of about `slab_bytes`, which is the largest block, and no more than `most_bytes`; of
    one page at the least."""
    slab_pages = max(1, slab_bytes // page_bytes)
    return PageConfig(
        page_bytes=page_bytes,
        slab_pages=slab_pages,
        total_pages=max(slab_pages, most_bytes // page_bytes),
        fit=fit,
        headroom=headroom,
    )


class LedgerClient(Protocol):
    """What of the memory arbiter a tenant that grows needs."""

    def may_grow(self, name: str, size: int) -> bool:
        """Reserve bytes that nobody needs; False = not now."""
        ...

    async def make_room(self, name: str, size: int, timeout_s: float) -> None:
        """Reserve bytes for which what idles goes. Raises a KakeyaError when there are none."""
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
        """`ledger` counts it as a tenant: `add_tenant` is its maker's matter. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._arena = PageArena(config, folder=folder, rng=rng, evicted=self._evicted)
        self._line = PageLine(self._arena)
        self._upkeep = ArenaUpkeep(
            self._arena, is_limited=self._is_limited, freed=self._line.stir, clock=clock
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._arena.close()

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Slabs of killed owners that were removed at the start."""
        return self._arena.leftovers

    @property
    def largest_block_bytes(self) -> int:
        """The longest thing that fits."""
        config = self._arena.config
        return config.slab_pages * config.page_bytes

    def paged_bytes(self, length: int) -> int:
        """What so many bytes take in its pages."""
        return paged_bytes(length, self._arena.config.page_bytes)

    async def tend(self) -> None:
        """Evict ahead of need and report overdue pins, for ever: a supervised task."""
        await self._upkeep.tend()

    # --- as a tenant of the ledger

    def usage(self) -> Tenant:
        """What it holds now: whole slabs, of which empty ones go first."""
        now = self._clock.mono()
        if self._usage is None or now - self._usage[0] > _USAGE_S:
            self._arena.at(now)
            self._usage = now, self._count()
        return self._usage[1]

    async def shrink(self, size: int) -> None:
        """Give up slabs of `size` bytes together, those first whose blocks are worth the least."""
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
        """Make a holder that is no engine."""
        return self._arena.pool.holder(name)

    async def prepare(
        self,
        tenant: PageTenant,
        length: int,
        holder: PinHolder,
        is_wanted: Callable[[], bool] = never,
    ) -> Filling:
        """Allocate; grows if the ledger lets it, else evicts, else waits a moment. Where nothing
        helps and `is_wanted` says that a request waits for it, the ledger is to make room; that
        takes a while, so it is tried again whatever comes of it.

        Raises OutOfPages, PageFreed, InvalidArgument.
        """
        self._arena.at(self._clock.mono())
        pages = -(-length // self._arena.config.page_bytes)
        if not self._arena.pool.has_free(pages):
            await self._grow(pages)
        try:
            filling = await self._line.prepare(tenant, length, holder)
        except OutOfPages as problem:
            if not is_wanted():
                raise self._explained(problem) from problem
            refused = await self._grow_by_force()
            try:
                filling = await self._line.prepare(tenant, length, holder)
            except OutOfPages as still:
                raise self._explained(still, refused) from still
        self._upkeep.allocated()
        return filling

    def ref(self, block: Block, length: int) -> PageRef:
        """What an engine needs to know of a block. Raises PageFreed."""
        return self._arena.ref(block, length)

    def view(self, block: Block, length: int) -> memoryview:
        """View the bytes of a block; keep it no longer than nobody else can run. Raises
        PageFreed."""
        return self._arena.view(block, length)

    def hold(self, block: Block, holder: PinHolder) -> Hold:
        """Open a block for somebody; pin it by `with`. Raises PageFreed."""
        self._arena.at(self._clock.mono())
        return self._arena.open(block, holder)

    def at_now(self) -> None:
        """Move the time of all blocks on: what is used next is younger than what was before."""
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
        self._line.stir()

    # --- engines

    def engine(self, model_id: str, pid: int) -> PinHolder:
        """The holder of a model's engine, which is a new one for each process."""
        known = self._engines.get(model_id)
        if known is None or known.pid != pid:
            self.engine_changed(model_id, pid)
            known = self._engines[model_id] = _Engine(pid, self.holder(f"{model_id} ({pid})"))
        return known.holder

    def engine_changed(self, model_id: str, pid: int | None) -> None:
        """Take back what an earlier engine of this model held; None = there is none now."""
        known = self._engines.get(model_id)
        if known is None or known.pid == pid:
            return
        del self._engines[model_id]
        pins = self._arena.close_holder(known.holder)
        if pins:
            event(_log, "an engine ended with pins", model=model_id, pid=known.pid, pins=pins)
        self._line.stir()

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

    async def _grow(self, pages: int) -> None:
        """Add one slab if it is allowed and still needed; without it, somebody is evicted."""
        async with self._growth:
            is_enough = self._arena.pool.has_free(pages)
            if not is_enough and self._ledger.may_grow(NAME, self._arena.slab_bytes):
                await self._add_slab()

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
        """Add one slab, for which what idles may have to go; why there is no room in time."""
        until_mono = self._clock.mono() + ROOM_S
        before = self._arena.pool.slabs()
        async with self._growth:
            if set(self._arena.pool.slabs()) - set(before):
                return None  # somebody else's wait was for all
            try:
                self._arena.pool.check_growth()
                left_s = until_mono - self._clock.mono()
                await self._ledger.make_room(NAME, self._arena.slab_bytes, left_s)
            except KakeyaError as refused:
                event(_log, "no room for pages", reason=refused.message)
                return refused
            await self._add_slab()
            return None

    async def _add_slab(self) -> None:
        """Grow by what is reserved."""
        try:
            await self._arena.grow_async()
        except OutOfPages as full:
            event(_log, "no more pages", level=logging.DEBUG, reason=full.message)
        finally:
            self._usage = None
            self._ledger.grown(NAME)

    def _explained(self, problem: OutOfPages, refused: KakeyaError | None = None) -> OutOfPages:
        """Say when to ask again, and what to do where there are no pages at all."""
        why = refused.message if refused is not None else ""
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
