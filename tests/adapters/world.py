"""A node's adapters on a real disk and in real pages, with toy engines that read the pages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kakeya.adapters.files.base import Layers
from kakeya.adapters.files.packed import unpack
from kakeya.adapters.manager import AdapterManager
from kakeya.adapters.places import LendSlots, none_lent
from kakeya.adapters.tiers import TierRules
from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import Conflict, KakeyaError, MemoryRefused, PeerUnavailable
from kakeya.core.safetensors import read_header
from kakeya.generation.facts import ModelFacts
from kakeya.generation.kv import PageRef
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.memory.pages.node_arena import PAGE_BYTES, NodeArena, page_config
from kakeya.memory.pages.reader import PageReader
from tests.adapters.adapter_folders import tiny_adapter

TINY = "kakeya-tiny"


@dataclass(eq=False)
class ToyEngine:
    """An engine's slots: what it was given to read, by id."""

    slots: int
    pid: int | None = 1
    held: dict[str, bytes] = field(default_factory=dict)
    in_use: set[str] = field(default_factory=set)
    loads: list[str] = field(default_factory=list)
    pause: Callable[[], float] = lambda: 0.0
    before_load: Callable[[], None] = lambda: None
    loading: set[str] = field(default_factory=set)
    until: asyncio.Event | None = None
    comes: Callable[[], float] = lambda: 0.0
    is_there: asyncio.Event | None = None
    refusal: KakeyaError | None = None
    most: int = 0
    lent: int = 0
    fingerprint: str = ""
    promised: int = 0
    """The slots that it tells of, where it has fewer."""

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            model_id=TINY,
            model_path="",
            vocab_size=8,
            context_tokens=8,
            eos_token_ids=(),
            adapter_slots=self.promised or self.slots,
            adapter_rank=16,
            base_fingerprint=self.fingerprint,
        )

    async def ready(self, timeout_s: float) -> ModelFacts:
        return self.facts

    async def load_adapter(
        self,
        adapter_id: str,
        ref: PageRef,
        timeout_s: float,
        instead_of: str = "",
        sent: Callable[[], None] | None = None,
    ) -> int:
        pid = self.pid
        self.before_load()
        self.loading.add(adapter_id)
        try:
            if sent is not None:
                sent()
            return await self._load(adapter_id, ref, instead_of, pid)
        finally:
            self.loading.discard(adapter_id)

    async def _load(self, adapter_id: str, ref: PageRef, instead_of: str, pid: int | None) -> int:
        with PageReader() as reader:
            view = reader.view(ref)
            await asyncio.sleep(self.pause())
            if self.until is not None:
                await self.until.wait()
            if self.refusal is not None:
                raise self.refusal
            if self.pid != pid or pid is None:
                raise PeerUnavailable("the toy engine died")
            if instead_of in self.in_use:
                raise Conflict(f"{instead_of} is in use")
            self.held.pop(instead_of, None)
            if len(self.held) >= self.slots and adapter_id not in self.held:
                raise MemoryRefused(f"{self.slots} slots are taken, by {sorted(self.held)}")
            packed = bytes(view)
            del view
        unpack(packed)
        self.held[adapter_id] = packed
        self.loads.append(adapter_id)
        self.most = max(self.most, len(self.held))
        return len(packed)

    async def unload_adapter(self, adapter_id: str) -> bool:
        if adapter_id in self.in_use:
            raise Conflict(f"{adapter_id} is in use")
        return self.held.pop(adapter_id, None) is not None

    async def adapters(self) -> tuple[str, ...]:
        return tuple(self.held)

    def restart(self, adapters: AdapterManager) -> None:
        """Die, and come back with empty slots."""
        pid, self.pid = self.pid or 0, None
        self.held.clear()
        adapters.engine_changed(TINY, None)
        self.pid = pid + 1
        adapters.engine_changed(TINY, self.pid)


class Plenty:
    """A ledger with room for everything."""

    def may_grow(self, name: str, size: int) -> bool:
        return True

    async def make_room(self, name: str, size: int, timeout_s: float) -> None:
        pass

    def grown(self, name: str) -> None:
        pass


@dataclass(eq=False)
class World:
    """One node's adapters."""

    adapters: AdapterManager
    arena: NodeArena
    engine: ToyEngine
    folder: Path
    source: Path

    async def add(self, seed: int, name: str = "", **more: object) -> str:
        """Register a random adapter; its model id."""
        made = await asyncio.to_thread(tiny_adapter, self.source / f"{seed}", seed, rank=2)
        record = await self.adapters.register(name or f"a{seed}", TINY, made, **more)
        return record.model_id


@asynccontextmanager
async def world(
    folder: Path,
    *,
    slots: int = 2,
    pages: int = 64,
    rules: TierRules | None = None,
    clock: Clock | None = None,
    most_rank: int = 16,
    bases: Mapping[str, str] | None = None,
    lend_slots: LendSlots = none_lent,
) -> AsyncIterator[World]:
    clock = clock or SystemClock()
    engine = ToyEngine(slots)

    @asynccontextmanager
    async def lend(_base: str) -> AsyncIterator[ToyEngine]:
        await asyncio.sleep(engine.comes())
        if engine.is_there is not None:
            await engine.is_there.wait()
        engine.lent += 1
        try:
            yield engine
        finally:
            engine.lent -= 1

    arena = await asyncio.to_thread(
        lambda: NodeArena(
            folder / "arena",
            page_config(pages * PAGE_BYTES, pages * PAGE_BYTES),
            ledger=Plenty(),
            clock=clock,
            rng=random.Random(str(folder)),
        )
    )
    known = {TINY: str(EMBEDDED_FOLDER / TINY)} if bases is None else bases
    try:
        async with AdapterManager(
            folder / "adapters",
            arena,
            bases=lambda: known,
            lend=lend,
            most_rank=most_rank,
            clock=clock,
            rng=random.Random(2),
            rules=rules,
            lend_slots=lend_slots,
            layers=layers_in_files,
        ) as adapters:
            yield World(adapters, arena, engine, folder / "adapters", folder / "sources")
    finally:
        await asyncio.to_thread(arena.__exit__, None, None, None)


async def layers_in_files(folder: Path) -> Layers:
    """Of kakeya-tiny, whose files and network have the same names; without a child process."""
    header = await asyncio.to_thread(read_header, folder / "model.safetensors")
    return {
        name.removesuffix(".weight"): (entry.shape[1], entry.shape[0])
        for name, entry in header.items()
        if len(entry.shape) == 2 and "embed" not in name
    }


def waiting(node: World) -> int:
    models = node.adapters.status()["models"]
    return models[TINY]["waiting"] if TINY in models else 0
