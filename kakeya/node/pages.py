"""The pages of a node as a part of the agent: the arena, and the adapters and prefixes in it."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from kakeya.adapters.config import AdapterConfig
from kakeya.backends.resident import ResidentModel
from kakeya.core.clock import Clock
from kakeya.core.figures import Figure
from kakeya.core.tasks import Supervisor, TaskHealth
from kakeya.generation.facts import ModelState
from kakeya.generation.spec import ModelRole
from kakeya.memory.estimate.estimate import estimate_source
from kakeya.memory.estimate.size_file import hub_folder
from kakeya.memory.pages import node_arena as pages
from kakeya.memory.pages.node_arena import NodeArena, page_config
from kakeya.node.adapters import NodeAdapters
from kakeya.node.memory import NodeMemory
from kakeya.prefix.config import PrecacheConfig
from kakeya.prefix.peers.auth import FleetKey
from kakeya.prefix.prefixes import NodePrefixes
from kakeya.prefix.seam import Wiped
from kakeya.prefix.warm.recall import PrefixStart, Recalled

ARENA_FOLDER = "arena"
KEEP_S = 5.0
"""Seconds in which the KV of GGUF models is saved when the node ends."""
BLOCK_TOKENS = 256
"""The most tokens of a block of KV."""
_BLOCKS_A_SLAB = 2
"""Two, so that a block fits even if it is somewhat larger than its estimate."""


class NodePages:
    """An `async with`, entered when the node's memory is and left before it."""

    def __init__(
        self,
        adapters: AdapterConfig,
        precache: PrecacheConfig,
        memory: NodeMemory,
        *,
        data_dir: Path,
        fleet_key: FleetKey | None = None,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.fleet_key = fleet_key
        self._adapter_config = adapters
        self._precache_config = precache
        self._memory = memory
        self._data_dir = data_dir
        self._clock = clock
        self._rng = rng
        self._tasks = Supervisor(clock)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.arena = await asyncio.to_thread(self._make_arena)
            stack.push_async_callback(asyncio.to_thread, self.arena.__exit__, None, None, None)
            self._memory.arbiter.add_tenant(self.arena)
            stack.callback(self._memory.arbiter.remove_tenant, pages.NAME)
            await stack.enter_async_context(self._tasks)
            self._tasks.start("pages", self.arena.tend)
            self.adapters = await stack.enter_async_context(
                NodeAdapters(
                    self._adapter_config,
                    self._memory,
                    self.arena,
                    data_dir=self._data_dir,
                    clock=self._clock,
                    rng=self._rng,
                )
            )
            verifiers = partial(self._memory.engines.of_role, ModelRole.VERIFIER)
            self.prefixes = await stack.enter_async_context(
                NodePrefixes(
                    self.arena,
                    memory_bytes=self._precache_config.memory_bytes,
                    disk_bytes=self._precache_config.disk_bytes,
                    data_dir=self._data_dir,
                    served=lambda: [one.model_id for one in verifiers()],
                    adapters=lambda: {one.digest for one in self.adapters.manager.records()},
                    adapter_digest=self.adapters.manager.digest_of,
                    clock=self._clock,
                    rng=self._rng,
                    key=self.fleet_key.block_key if self.fleet_key else b"",
                    tenant=self.fleet_key.tenant if self.fleet_key else "",
                )
            )
            self._start = await stack.enter_async_context(
                PrefixStart(self.prefixes, clock=self._clock)
            )
            self.adapters.manager.follow(self.prefixes.adapter_retired)
            for model in verifiers():
                model.prefixes = self.prefixes
            archive = self._memory.engines.archive
            archive.open(self.prefixes.store, self.prefixes.names.weights)
            self.prefixes.others = archive.seeds
            self._memory.engines.follow(self._engine_changed)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for model in self._memory.engines.of_role(ModelRole.VERIFIER):
            model.prefixes = None
        await self._memory.engines.archive.aclose(KEEP_S)
        await self._stack.aclose()

    async def wipe(self) -> Wiped:
        """Drop all KV of prefixes, in pages, on disk, and in the slots of GGUF models."""
        await self._memory.engines.archive.forget()
        return await self.prefixes.wipe()

    @property
    def shares_prefixes(self) -> bool:
        """Whether blocks of KV are exchanged with peers."""
        return self.prefixes.is_on and self._precache_config.peers

    def tell_recalled(self, recalled: Recalled | None) -> None:
        """Set the callback for each history that is recalled for a new engine; None = none."""
        self._start.recalled = recalled

    def unready(self) -> str:
        """The reason why the node is not ready yet; "" = it is."""
        return self._start.unready()

    def figures(self) -> Iterator[Figure]:
        """Figures of the pages and of their contents."""
        yield from self.arena.figures()
        yield from self.adapters.manager.figures()
        yield from self.prefixes.figures()

    def health(self) -> tuple[TaskHealth, ...]:
        """Background tasks."""
        return (
            *self._tasks.health(),
            *self.adapters.manager.health(),
            *self.prefixes.health(),
            *self._start.health(),
        )

    def _make_arena(self) -> NodeArena:
        adapters, precache = self._adapter_config, self._precache_config
        slab_bytes, most_bytes = adapters.slab_bytes, adapters.warm_bytes
        if precache.memory_bytes:
            most_bytes += precache.memory_bytes
            block_bytes = _BLOCKS_A_SLAB * pages.paged_bytes(
                self._largest_block_bytes(), adapters.page_bytes
            )
            slab_bytes = max(slab_bytes, min(block_bytes, precache.memory_bytes))
        shape = page_config(
            slab_bytes,
            most_bytes,
            page_bytes=adapters.page_bytes,
            fit=adapters.fit,
            headroom=adapters.headroom,
        )
        return NodeArena(
            self._data_dir / ARENA_FOLDER,
            replace(
                shape,
                high_watermark=adapters.high_watermark,
                low_watermark=adapters.low_watermark,
            ),
            ledger=self._memory.arbiter,
            clock=self._clock,
            rng=self._rng,
        )

    def _largest_block_bytes(self) -> int:
        """Estimate the largest block of all models from their files."""
        engines = self._memory.engines
        hub = hub_folder(os.environ, Path.home())
        return max(
            (
                estimate_source(
                    engines.sources[model.model_id], hub=hub, kv_tokens=BLOCK_TOKENS, widens=False
                ).kv_bytes
                for model in engines.of_role(ModelRole.VERIFIER)
            ),
            default=0,
        )

    def _engine_changed(self, model: ResidentModel) -> None:
        self.arena.engine_changed(model.model_id, model.pid)
        is_ready = model.state is ModelState.READY
        self.adapters.manager.engine_changed(model.model_id, model.pid if is_ready else None)
        if is_ready and model.role is ModelRole.VERIFIER:
            self._start.ready(model)
