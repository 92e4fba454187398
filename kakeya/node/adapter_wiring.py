"""The adapters of a node as a part of the agent: the arena, the manager, and what they hang on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.core import Metric

from kakeya.core.clock import Clock
from kakeya.memory.slabs import header_bytes
from kakeya.node import arena as pages
from kakeya.node.adapter_places import AdapterEngine
from kakeya.node.adapters import AdapterManager
from kakeya.node.arena import NodeArena, page_config
from kakeya.node.config import AdapterConfig
from kakeya.node.memory import NodeMemory
from kakeya.node.models import Role
from kakeya.node.resident_model import ResidentModel
from kakeya.runtime.generation import ModelState

ARENA_FOLDER, ADAPTER_FOLDER = "arena", "adapters"


def least_bytes(config: AdapterConfig) -> int:
    """What adapters need beside a model: one slab, as the ledger counts it; 0 = none are served."""
    if not config.slots:
        return 0
    slab = page_config(config.slab_bytes, config.warm_bytes)
    return header_bytes(slab.slab_pages) + slab.slab_pages * slab.page_bytes


class NodeAdapters:
    """An `async with`, entered when the node's memory is and left before it."""

    def __init__(
        self,
        config: AdapterConfig,
        memory: NodeMemory,
        *,
        data_dir: Path,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._memory = memory
        self._data_dir = data_dir
        self._clock = clock
        self._rng = rng
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.arena = await asyncio.to_thread(self._make_arena)
            stack.push_async_callback(asyncio.to_thread, self.arena.__exit__, None, None, None)
            self._memory.arbiter.add_tenant(self.arena)
            stack.callback(self._memory.arbiter.remove_tenant, pages.NAME)
            self.manager = await stack.enter_async_context(
                AdapterManager(
                    self._data_dir / ADAPTER_FOLDER,
                    self.arena,
                    bases=self._bases,
                    lend=self._lend,
                    lend_slots=self._memory.lend_slots,
                    most_rank=self._config.rank,
                    clock=self._clock,
                    rng=self._rng,
                )
            )
            self._memory.engines.follow(self._engine_changed)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def status(self) -> dict[str, object]:
        """Adapters and the pages that they lie in, as JSON."""
        return self.manager.status() | {"pages": self.arena.status()}

    def metrics(self) -> Iterator[Metric]:
        """Of the pages, and of what lies in them."""
        yield from self.arena.metrics()
        yield from self.manager.metrics()

    def _make_arena(self) -> NodeArena:
        config = page_config(self._config.slab_bytes, self._config.warm_bytes)
        return NodeArena(
            self._data_dir / ARENA_FOLDER,
            config,
            ledger=self._memory.arbiter,
            clock=self._clock,
            rng=self._rng,
        )

    def _bases(self) -> dict[str, str]:
        engines = self._memory.engines
        return {
            model.model_id: model.facts.model_path
            if model.facts
            else engines.sources[model.model_id]
            for model in engines.of_role(Role.VERIFIER)
        }

    def _lend(self, base: str, patience_s: float) -> AbstractAsyncContextManager[AdapterEngine]:
        return self._memory.engines.get(base).lend(patience_s)

    def _engine_changed(self, model: ResidentModel) -> None:
        pid = model.pid if model.state is ModelState.READY else None
        self.manager.engine_changed(model.model_id, pid)
