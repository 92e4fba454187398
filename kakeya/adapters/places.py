"""Moves of adapters: from disk to pages, from pages to a slot of an engine, and back.

    cold -> warm    read and check in a thread, lay in pages, commit       one flight for each
    warm            an exact one that idles may be rounded to int8, to take fewer pages
    warm -> hot     pin for the engine, have it read the pages, unpin

`tiers` and `slot_queue` decide which adapter moves, and when.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kakeya.adapters.files.packed import PackedAdapter, Precision, rounded, unpack
from kakeya.adapters.files.store import AdapterRecord, AdapterStore, BaseReplaced
from kakeya.adapters.tiers import Adapter, AdapterTable, Tier
from kakeya.core.errors import (
    Conflict,
    InvalidArgument,
    LoadFailed,
    MemoryRefused,
    OutOfPages,
    PageFreed,
    PeerUnavailable,
)
from kakeya.core.log import event
from kakeya.generation.facts import ModelFacts
from kakeya.generation.kv import PageRef
from kakeya.memory.pages.content import ContentPriority, ContentType
from kakeya.memory.pages.node_arena import NodeArena
from kakeya.memory.pages.pins import Block
from kakeya.memory.pages.pool import PageOwner
from kakeya.memory.pages.shared_arena import Filling

_log = logging.getLogger(__name__)
_LOAD_TIMEOUT_S = 30.0
_TRIES = 3
"""Pages may be taken for others between laying an adapter there and pinning it."""


LendSlots = Callable[[str, int], Awaitable[bool]]
"""Lends a model's engine so many bytes for its slots; False = not all of them now."""


async def none_lent(_base: str, _size: int) -> bool:
    """Lend nothing, where engines have no bounds."""
    return False


class AdapterEngine(Protocol):
    """An engine as adapters need it; `EngineBackend` is one."""

    @property
    def pid(self) -> int | None:
        """The id of its process; None while there is none."""
        ...

    @property
    def facts(self) -> ModelFacts | None:
        """Facts of its model; None while it is not loaded."""
        ...

    async def ready(self, timeout_s: float) -> ModelFacts:
        """Wait until it serves."""
        ...

    async def load_adapter(
        self,
        adapter_id: str,
        ref: PageRef,
        timeout_s: float,
        instead_of: str = "",
        sent: Callable[[], None] | None = None,
    ) -> int:
        """Take an adapter from pages into a slot, or into that of another adapter.

        `sent` is called once the load was sent: the engine does later requests behind it. With
        `sent`, at least one request follows.
        """
        ...

    async def unload_adapter(self, adapter_id: str) -> bool:
        """Free a slot."""
        ...

    async def adapters(self) -> tuple[str, ...]:
        """Ids of the adapters in its slots."""
        ...


def slot_bytes(packed: PackedAdapter, facts: ModelFacts, slots: int) -> int:
    """The most bytes of so many slots for all layers that an adapter names."""
    features = sum(tensor.in_size + tensor.out_size for tensor in packed.tensors)
    is_half = facts.device != "cpu" and facts.dtype in ("float16", "bfloat16")
    return slots * facts.adapter_rank * features * (2 if is_half else 4)


@dataclass(frozen=True, slots=True)
class _Laid:
    """The pages of an adapter, and the bytes of it there."""

    block: Block
    length: int


class AdapterPlaces:
    """Carries out moves, and keeps the table true. Lives on the event loop."""

    def __init__(
        self,
        table: AdapterTable,
        store: AdapterStore,
        arena: NodeArena,
        record_of: Callable[[str], AdapterRecord],
        lend_slots: LendSlots = none_lent,
    ) -> None:
        """`record_of` finds the record of an adapter by its id in the table."""
        self._table = table
        self._store = store
        self._arena = arena
        self._record_of = record_of
        self._lend_slots = lend_slots
        self._slot_bytes: dict[str, int] = {}
        self._holder = arena.holder("adapters")
        self._tenants = {
            Tier.COLD: self._tenant(ContentPriority.LORA_COLD),
            Tier.WARM: self._tenant(ContentPriority.LORA_WARM),
            Tier.HOT: self._tenant(ContentPriority.LORA_HOT),
        }
        self._laid: dict[Adapter, _Laid] = {}
        self._adapters: dict[Block, Adapter] = {}
        self._flights: dict[Adapter, asyncio.Task[None]] = {}
        self._wanted: Counter[Adapter] = Counter()
        self._pids: dict[str, int | None] = {}
        self.moves = dict.fromkeys(Tier, 0)
        self.rounded = 0

    # --- engines

    def engine_changed(self, base: str, pid: int | None) -> None:
        """Note which process serves a model now: another one has empty slots."""
        if pid is not None:
            self._arena.engine_changed(base, pid)
        if self._pids.get(base) != pid:
            self._pids[base] = pid
            self._slot_bytes.pop(base, None)
            self._table.emptied(base)

    def is_up(self, base: str) -> bool:
        """Whether a model's engine is there."""
        return self._pids.get(base) is not None

    def is_flying(self, adapter: Adapter) -> bool:
        """Whether it is on its way into pages now."""
        return adapter in self._flights

    # --- moves

    @contextmanager
    def wanted(self, adapter: Adapter) -> Iterator[None]:
        """Note that a request waits for an adapter: idle models may have to go for its pages."""
        self._wanted[adapter] += 1
        try:
            yield
        finally:
            self._wanted[adapter] -= 1
            if not self._wanted[adapter]:
                del self._wanted[adapter]

    async def warm(self, adapter: Adapter) -> None:
        """Lay an adapter in pages. Raises LoadFailed, OutOfPages."""
        if adapter.is_warm:
            return
        flight = self._flights.get(adapter)
        if flight is None:
            flight = asyncio.ensure_future(self._lay(adapter))
            self._flights[adapter] = flight
            flight.add_done_callback(lambda done: self._landed(adapter, done))
        await asyncio.shield(flight)

    async def heat(
        self,
        adapter: Adapter,
        engine: AdapterEngine,
        out: Adapter | None,
        sent: Callable[[], None] | None,
    ) -> None:
        """Bring an adapter into a slot, from which `out` goes; one call of the engine does both.

        `sent`, for a caller that sends a request behind the load, is called once the load was sent,
        if it is expected to succeed: the engine has made slots before, and this adapter did not
        fail the last time.
        Raises BaseReplaced, PeerUnavailable when the engine ends, Conflict when `out` is still in
        use there, and the errors of `warm` and of the engine.
        """
        pid = engine.pid
        if pid is None or pid != self._pids.get(adapter.base):
            raise PeerUnavailable(f"the engine of {adapter.base} was restarted", retry_after_s=1.0)
        facts = engine.facts
        problem = self._record_of(adapter.adapter_id).problem_with(
            facts.base_fingerprint if facts else ""
        )
        if problem:
            raise BaseReplaced(problem)
        is_certain = adapter.base in self._slot_bytes and not adapter.is_doubtful
        with self._leaving(out):
            try:
                size = await self._load(adapter, engine, pid, out, sent if is_certain else None)
            except MemoryRefused:
                adapter.is_coming = False  # requests sent from here on are behind no load
                if await self._reconcile(adapter.base, engine):
                    size = await self._load(adapter, engine, pid, out)
                elif facts is None or not await self._make_room(adapter, facts):
                    raise
                else:
                    size = await self._load_into_room(adapter, engine, pid, out)
        await self._settle(adapter.base, size)
        if self._pids.get(adapter.base) != pid:
            raise PeerUnavailable(f"the engine of {adapter.base} ended", retry_after_s=1.0)
        self._table.entered_slot(adapter)
        self.moves[Tier.HOT] += 1

    def cool(self, adapter: Adapter) -> None:
        """Take an adapter out of the pages, unless an engine reads it now."""
        laid = self._laid.get(adapter)
        if laid is None or laid.block.is_pinned:
            return
        self._arena.free(laid.block)
        self._forget(laid.block)
        self.moves[Tier.COLD] += 1

    async def round(self, adapter: Adapter) -> None:
        """Lay an exact adapter in fewer pages, as int8, unless it is used meanwhile.

        Raises OutOfPages, PageFreed.
        """
        laid = self._laid.get(adapter)
        if laid is None or adapter.is_rounded:
            return
        adapter.is_rounded = True
        if self._record_of(adapter.adapter_id).precision != Precision.EXACT:
            return
        with self._arena.hold(laid.block, self._holder):
            packed = await asyncio.to_thread(rounded, self._arena.view(laid.block, laid.length))
            if self._arena.paged_bytes(len(packed)) >= self._arena.paged_bytes(laid.length):
                return
            filling = await self._fill(adapter, packed)
        with filling:
            if self._laid.get(adapter) is laid and adapter.is_idle and not laid.block.is_pinned:
                filling.commit()
                self._arena.free(laid.block)
                del self._adapters[laid.block]
                self._enter(adapter, filling.block, len(packed))
                self.rounded += 1
            else:
                adapter.is_rounded = False  # once it idles again

    def rank(self) -> None:
        """Tell the pages the priority of adapters, by their ratings."""
        for adapter, laid in self._laid.items():
            tenant = self._tenants[adapter.rating]
            if laid.block.tenant is not tenant:
                self._arena.move(laid.block, tenant)

    async def aclose(self) -> None:
        """End all flights."""
        flights = tuple(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    # --- inside

    @contextmanager
    def _leaving(self, out: Adapter | None) -> Iterator[None]:
        """Note where `out` is after its slot was asked for.

        It keeps the slot where the engine refused, and has left it otherwise. Where no answer came,
        it may still be there, and is a stray that `_reconcile` frees.
        """
        try:
            yield
        except (Conflict, InvalidArgument, LoadFailed, MemoryRefused, OutOfPages):
            raise
        except BaseException:
            if out is not None:
                self._table.left_slot(out)
            raise
        if out is not None:
            self._table.left_slot(out)

    async def _lay(self, adapter: Adapter) -> None:
        packed = await asyncio.to_thread(self._store.load, self._record_of(adapter.adapter_id))
        with await self._fill(adapter, packed) as filling:
            filling.commit()
        self._enter(adapter, filling.block, len(packed))
        self._table.entered_pages(adapter)
        self.moves[Tier.WARM] += 1

    async def _fill(self, adapter: Adapter, packed: bytes) -> Filling:
        tenant = self._tenants[adapter.rating]
        filling = await self._arena.prepare(
            tenant, len(packed), self._holder, lambda: adapter in self._wanted
        )
        filling.view[:] = packed
        return filling

    def _enter(self, adapter: Adapter, block: Block, length: int) -> None:
        self._laid[adapter] = _Laid(block, length)
        self._adapters[block] = adapter

    def _landed(self, adapter: Adapter, flight: asyncio.Task[None]) -> None:
        self._flights.pop(adapter, None)
        if not flight.cancelled():
            flight.exception()  # waiting callers get it; there may be none

    async def _load(
        self,
        adapter: Adapter,
        engine: AdapterEngine,
        pid: int,
        out: Adapter | None,
        sent: Callable[[], None] | None = None,
    ) -> int:
        """Have the engine read the pages; returns the bytes of all slots there."""
        instead_of = out.adapter_id if out is not None else ""
        for _ in range(_TRIES):
            await self.warm(adapter)
            laid = self._laid.get(adapter)
            if laid is None:
                continue
            try:
                hold = self._arena.hold(laid.block, self._arena.engine(adapter.base, pid))
            except PageFreed:
                continue
            with hold:
                ref = self._arena.ref(laid.block, laid.length)
                return await engine.load_adapter(
                    adapter.adapter_id, ref, _LOAD_TIMEOUT_S, instead_of, sent
                )
        raise OutOfPages(
            f"the pages of adapter {adapter.adapter_id} were taken {_TRIES} times before its "
            "engine could read them",
            retry_after_s=1.0,
        )

    async def _make_room(self, adapter: Adapter, facts: ModelFacts) -> bool:
        """Borrow the bytes of as many slots again, in all layers that an adapter names, or of one.

        For an engine without KV to spare for them.
        """
        await self.warm(adapter)
        laid = self._laid.get(adapter)
        if laid is None:
            return False
        packed = unpack(self._arena.view(laid.block, laid.length), is_trusted=True)
        known = self._slot_bytes.get(adapter.base, 0)
        there = len(self._table.hot(adapter.base))
        sizes = [slot_bytes(packed, facts, slots) for slots in (there + 2, 1)]
        del packed
        for more in sizes if there else sizes[:1]:
            if await self._lend_slots(adapter.base, known + more):
                return True
        await self._lend_slots(adapter.base, known)
        return False

    async def _load_into_room(
        self, adapter: Adapter, engine: AdapterEngine, pid: int, out: Adapter | None
    ) -> int:
        """Load, and give back lent bytes that were not needed."""
        try:
            size = await self._load(adapter, engine, pid, out)
        except BaseException:
            await self._lend_slots(adapter.base, self._slot_bytes.get(adapter.base, 0))
            raise
        self._slot_bytes.pop(adapter.base, None)
        return size

    async def _settle(self, base: str, size: int) -> None:
        """Borrow the bytes that the slots of an engine take, if they have become more."""
        if size > self._slot_bytes.get(base, 0):
            self._slot_bytes[base] = size
            await self._lend_slots(base, size)

    async def _reconcile(self, base: str, engine: AdapterEngine) -> bool:
        """Free slots with adapters that are unknown here, as after an answer that came too late.

        Returns whether there were any.
        """
        strays = [one for one in await engine.adapters() if not self._is_known(one)]
        for adapter_id in strays:
            event(_log, "freeing a slot with an unknown adapter", model=base, adapter=adapter_id)
            await engine.unload_adapter(adapter_id)
        return bool(strays)

    def _is_known(self, adapter_id: str) -> bool:
        """Whether an engine should have it, or is being given it now."""
        if adapter_id not in self._table:
            return False
        adapter = self._table.get(adapter_id)
        return adapter.is_hot or adapter.is_moving

    def _tenant(self, priority: ContentPriority) -> PageOwner:
        return self._arena.tenant(
            ContentType.LORA_WEIGHT, "adapters", self._forget, priority=priority
        )

    def _forget(self, block: Block) -> None:
        adapter = self._adapters.pop(block, None)
        if adapter is not None:
            self._laid.pop(adapter, None)
            self._table.left_pages(adapter)
