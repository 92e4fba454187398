"""The LoRA adapters of a node: registered, kept in three tiers, lent out while they are hot.

    record = await adapters.register("poet", "kakeya-tiny", folder)
    with await adapters.acquire("kakeya-tiny:poet") as lease:
        ...                             # in a slot of the engine, as `lease.adapter_id`

An engine knows an adapter by its version, which is its name and content. A replaced adapter is
another one to it, so running requests end with the version that they began with, and no keys and
values mix. A removed adapter takes no new requests and goes when the last old one has ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kakeya.adapters.figures import BOUNDS_S, AdapterSnapshot, adapter_figures, queue_status
from kakeya.adapters.files.base import read_layers
from kakeya.adapters.files.packed import Precision
from kakeya.adapters.files.store import AdapterDamaged, AdapterRecord, AdapterStore
from kakeya.adapters.intake import AdapterIntake, ReadLayers, Registration
from kakeya.adapters.lease import AdapterUse
from kakeya.adapters.places import AdapterPlaces, LendSlots, none_lent
from kakeya.adapters.registry import AdapterRegistry
from kakeya.adapters.slot_queue import Lend, SlotQueue
from kakeya.adapters.tiers import Adapter, AdapterTable, Tier, TierRules
from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, KakeyaError, LoadFailed, NotFound, StoreFailed
from kakeya.core.figures import Durations, Figure, Json, as_json
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, TaskHealth, every
from kakeya.generation.config import WAIT_S
from kakeya.memory.pages.node_arena import NodeArena

_log = logging.getLogger(__name__)
REBALANCE_S = 5.0
_WARMINGS = 16
"""Adapters that are laid in pages, or rounded there, in one rebalance, so that disk, ledger and
processor are not flooded."""


class AdapterManager:
    """See the module; an `async with`, entered once models are known and before they serve."""

    def __init__(
        self,
        folder: Path,
        arena: NodeArena,
        *,
        bases: Callable[[], Mapping[str, str]],
        lend: Lend,
        most_rank: int,
        clock: Clock,
        rng: random.Random,
        rules: TierRules | None = None,
        lend_slots: LendSlots = none_lent,
        layers: ReadLayers = read_layers,
    ) -> None:
        """`bases` returns the models that may have adapters, with their folders; `most_rank` is the
        largest rank that engines take; `lend_slots` gives an engine room for its slots; `layers`
        tells the linear layers of the network in a folder."""
        self._store = AdapterStore(folder)
        self._intake = AdapterIntake(
            bases,
            most_rank=most_rank,
            most_bytes=arena.largest_block_bytes,
            wall=clock.wall,
            layers=layers,
        )
        self._lend = lend
        self._clock = clock
        self._rng = rng
        self._registry = AdapterRegistry()
        self._table = AdapterTable(rules)
        self._versions: dict[str, AdapterRecord] = {}  # retired ones too, until they are gone
        self._places = AdapterPlaces(
            self._table, self._store, arena, self._versions.__getitem__, lend_slots
        )
        self._queues: dict[str, SlotQueue] = {}
        self._retired: set[Adapter] = set()
        self._tasks = Supervisor(clock)
        self._tick = asyncio.Event()
        self._writing = asyncio.Lock()
        self._problems: dict[str, str] = {}
        self._followers: list[Callable[[str], None]] = []
        self.times = {tier: Durations(BOUNDS_S) for tier in Tier}

    async def __aenter__(self) -> Self:
        for record in await asyncio.to_thread(lambda: list(self._store.scan())):
            self._put(record)
        if len(self._registry):
            event(_log, "adapters found", adapters=len(self._registry))
        self._tasks.start("adapter tiers", self._rebalance_forever)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.aclose()
        await self._places.aclose()

    def follow(self, retired: Callable[[str], None]) -> None:
        """Call `retired` once for each version that takes no more requests."""
        self._followers.append(retired)

    # --- the owner's side

    async def register(
        self,
        name: str,
        base: str,
        folder: Path,
        *,
        owner: str = "",
        precision: Precision = Precision.INT8,
        is_replacing: bool = False,
    ) -> AdapterRecord:
        """Take an adapter in from a folder of mlx-lm's; it may be used when this returns.

        Raises InvalidArgument, NotFound for a base that this node does not serve, Conflict for a
        name that is taken (unless replacing). A version that was replaced or removed may come back
        while requests still run with it: the next ones share it with them.
        """
        wanted = Registration(name=name, base=base, folder=folder, owner=owner, precision=precision)
        record, packed = await self._intake.take(wanted)
        async with self._writing:
            known = self._registry.get(record.model_id)
            if known is not None and not is_replacing:
                raise Conflict(
                    f"adapter {record.model_id} is registered; remove it first, or replace it"
                )
            is_same = known is not None and known.version == record.version
            await asyncio.to_thread(self._store.save, record, packed)
            if known is not None and not is_same:
                self._retire(known)
            self._put(record)
        event(_log, "adapter registered", adapter=record.model_id, rank=record.rank, owner=owner)
        return record

    async def remove(self, name: str) -> AdapterRecord:
        """Forget BASE:NAME, or NAME: no new request gets it, running ones go on with it.

        Raises NotFound, InvalidArgument when several bases have an adapter of that name, and
        StoreFailed when the disk keeps it: then it is as before.
        """
        async with self._writing:
            record = self._registry.named(name)
            await self._delete(record)
            self._retire(record)
        event(_log, "adapter removed", adapter=record.model_id)
        return record

    async def _delete(self, record: AdapterRecord) -> None:
        """Forget the record before its file goes, so that no request finds the file damaged."""
        adapter = self._table.get(record.version)
        self._registry.drop(record.model_id)
        adapter.is_retired = True
        try:
            await asyncio.to_thread(self._store.remove, record)
        except StoreFailed:
            adapter.is_retired = False
            self._registry.put(record)
            raise

    def records(self) -> tuple[AdapterRecord, ...]:
        """Records of all registered adapters."""
        return tuple(self._registry)

    # --- the callers' side

    def find(self, model_id: str, client: str = "") -> AdapterRecord:
        """Find an adapter for a client. Raises NotFound naming near ones, Denied."""
        try:
            return self._registry.find(model_id, client)
        except NotFound:
            if model_id in self._problems:
                raise NotFound(self._problems[model_id]) from None
            raise

    def digest_of(self, version: str) -> str:
        """The digest of the content of a version. Raises NotFound."""
        if version not in self._versions:
            raise NotFound(f"no adapter is known as {version[:80]!r}")
        return self._versions[version].digest

    def usable(self, client: str = "") -> tuple[AdapterRecord, ...]:
        """Adapters that a client may name."""
        return self._registry.usable(client)

    async def acquire(
        self,
        model_id: str,
        client: str = "",
        *,
        patience_s: float = WAIT_S,
        is_following: bool = False,
        begun: AdapterRecord | None = None,
    ) -> AdapterUse:
        """Lease an adapter, brought into a slot of its engine if it is not there; with `begun` the
        very version that a generation began with.

        `is_following`: the engine may still be reading the adapter, for a decode that is sent
        behind its load. That decode ends with NotFound where the load fails; call `lost` then, and
        this again.

        Raises NotFound, Denied, QueueFull, CapacityExhausted when it got no slot in time,
        AdapterDamaged, OutOfPages, and errors of loading the model; Conflict when a version that
        was begun was removed or replaced meanwhile.
        """
        while True:
            record = begun or self.find(model_id, client)
            try:
                return await self._acquire(record, patience_s, is_following=is_following)
            except Conflict:  # removed or replaced since it was found
                if begun is not None:
                    raise
                async with self._writing:  # its file changes before its record does
                    if self._registry.get(model_id) == record:
                        raise

    async def _acquire(
        self, record: AdapterRecord, patience_s: float, *, is_following: bool
    ) -> AdapterUse:
        began_mono = self._clock.mono()
        adapter = self._table.get(record.version) if record.version in self._table else None
        if adapter is None or adapter.is_retired:
            raise Conflict(
                f"adapter {record.model_id} was replaced or removed under a request; send it again"
            )
        tier = adapter.tier
        queue = self._queue(record.base)
        if not queue.take(adapter, is_following=is_following):
            await queue.wait(adapter, patience_s, is_following=is_following)
        self.times[tier].add(self._clock.mono() - began_mono)
        return AdapterUse(self.released, adapter, record)

    def released(self, adapter: Adapter) -> None:
        """Called by leases, when they end."""
        self._table.release(adapter, self._clock.mono())
        self._queues[adapter.base].released()
        if adapter.is_retired and not adapter.leases:
            self._tick.set()

    def cool(self, model_id: str) -> None:
        """Take an adapter out of the pages now, unless an engine reads it. Raises NotFound."""
        self._places.cool(self._table.get(self._registry.named(model_id).version))

    def lost(self, lease: AdapterUse) -> None:
        """Note that an engine does not know a leased adapter, because it was started anew."""
        adapter = self._table.get(lease.adapter_id)
        self._table.left_slot(adapter)

    def engine_changed(self, base: str, pid: int | None) -> None:
        """Note which process serves a model; None = it is in no memory."""
        self._places.engine_changed(base, pid)

    # --- status and figures

    def status(self) -> Json:
        """The state of all adapters, as JSON."""
        now = self._clock.mono()
        return as_json(self.figures()) | {
            "registered": len(self._registry),
            "warm": len(self._table.warm()),
            "models": {
                base: queue_status(self._table, base, queue, now)
                for base, queue in self._queues.items()
            },
            "retired": sorted(adapter.adapter_id for adapter in self._retired),
            "problems": self.problems(),
        }

    def problems(self) -> dict[str, str]:
        """Problems of adapters that are damaged, by model id or by the name of the file."""
        return self._store.set_aside | self._problems

    def describe(self, record: AdapterRecord) -> AdapterSnapshot:
        """The tier and the use of an adapter. Raises NotFound when it is gone."""
        adapter = self._table.get(record.version)
        return AdapterSnapshot(
            tier=adapter.tier,
            leases=adapter.leases,
            uses=self._table.uses(adapter, self._clock.mono()),
        )

    def figures(self) -> Iterator[Figure]:
        """Tiers, acquires, moves."""
        waiting = {base: queue.waiting for base, queue in self._queues.items()}
        return adapter_figures(self._table, waiting, self.times, self._places)

    async def stale(self) -> dict[str, str]:
        """Why adapters of weights that were replaced are refused, by model id."""
        records = self.records()
        bases = {record.base for record in records}
        found = {base: await self._intake.fingerprint(base) for base in bases}
        problems = {r.model_id: r.problem_with(found[r.base]) for r in records}
        return {model_id: problem for model_id, problem in problems.items() if problem}

    def health(self) -> tuple[TaskHealth, ...]:
        """The background tasks."""
        return self._tasks.health()

    # --- inside

    def _put(self, record: AdapterRecord) -> None:
        self._registry.put(record)
        self._problems.pop(record.model_id, None)
        self._versions[record.version] = record
        if record.version not in self._table:
            self._table.add(record.version, record.base)
            return
        adapter = self._table.get(record.version)
        adapter.is_retired = False  # it came back while it was going
        self._retired.discard(adapter)

    def _queue(self, base: str) -> SlotQueue:
        if base in self._queues:
            return self._queues[base]
        queue = self._queues[base] = SlotQueue(
            base,
            self._table,
            self._places,
            self._lend,
            clock=self._clock,
            on_failure=self._could_not_be_loaded,
        )
        self._tasks.start(f"adapters of {base}", queue.run)
        return queue

    def _could_not_be_loaded(self, adapter: Adapter, problem: KakeyaError) -> None:
        if adapter.is_retired:
            return
        record = self._versions[adapter.adapter_id]
        event(
            _log,
            "adapter could not be loaded",
            level=logging.WARNING,
            adapter=record.version,
            problem=problem.message,
        )
        if isinstance(problem, AdapterDamaged) and self._registry.get(record.model_id) == record:
            self._problems[record.model_id] = problem.message
            self._registry.drop(record.model_id)
            self._retire(record)

    def _retire(self, record: AdapterRecord) -> None:
        if record.version not in self._table:
            return  # its file was found damaged, and it is gone by now
        adapter = self._table.get(record.version)
        adapter.is_retired = True
        self._retired.add(adapter)
        self._tick.set()
        for retired in self._followers:
            retired(record.version)

    async def _rebalance_forever(self) -> None:
        await every(
            REBALANCE_S,
            self.rebalance,
            clock=self._clock,
            rng=self._rng,
            wake=self._tick,
            is_shared=True,
        )

    async def rebalance(self) -> None:
        """Rate all adapters, and move those that no request waits for."""
        self._drop_retired()
        if not self._table:
            return  # an idle node comes here all night
        slots = {
            base: queue.slots for base, queue in self._queues.items() if self._places.is_up(base)
        }
        moves = self._table.rebalance(self._clock.mono(), slots)
        self._places.rank()
        for move in moves:
            if move.to is Tier.COLD:
                self._places.cool(self._table.get(move.adapter_id))
        for base, queue in self._queues.items():
            hot = (move for move in moves if move.to is Tier.HOT)
            queue.tidy(tuple(m for m in hot if self._table.get(m.adapter_id).base == base))
        for move in [move for move in moves if move.to is Tier.WARM][:_WARMINGS]:
            await self._warm(move.adapter_id)
        for adapter in self._table.idlers(self._clock.mono())[:_WARMINGS]:
            await self._round(adapter)

    async def _round(self, adapter: Adapter) -> None:
        try:
            await self._places.round(adapter)
        except KakeyaError as problem:
            event(_log, "adapter not rounded", level=logging.DEBUG, problem=problem.message)

    async def _warm(self, adapter_id: str) -> None:
        if adapter_id not in self._table:
            return
        adapter = self._table.get(adapter_id)
        try:
            await self._places.warm(adapter)
        except LoadFailed as problem:
            self._could_not_be_loaded(adapter, problem)
        except KakeyaError as problem:
            event(_log, "adapter not warmed", level=logging.DEBUG, problem=problem.message)

    def _drop_retired(self) -> None:
        """Drop removed adapters that no request uses any more."""
        for adapter in tuple(self._retired):
            if not adapter.is_idle or adapter.waiting or self._places.is_flying(adapter):
                continue
            self._places.cool(adapter)
            if adapter.tier is Tier.COLD:
                self._table.remove(adapter)
                del self._versions[adapter.adapter_id]
                self._retired.discard(adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWish:
    """The adapter that a client asked for, as BASE:NAME."""

    model_id: str
    client: str
    adapters: AdapterManager

    async def acquire(self, patience_s: float, begun: AdapterRecord | None) -> AdapterUse:
        """Lease it, or the version that was begun, for decodes that come behind its load."""
        return await self.adapters.acquire(
            self.model_id, self.client, patience_s=patience_s, is_following=True, begun=begun
        )
