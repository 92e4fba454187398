"""The adapters of a node as a part of the agent: the manager and its dependencies."""

from __future__ import annotations

import random
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Self

from kakeya.adapters.config import AdapterConfig
from kakeya.adapters.manager import AdapterManager
from kakeya.adapters.places import AdapterEngine
from kakeya.core.clock import Clock
from kakeya.generation.spec import ModelRole
from kakeya.memory.pages.node_arena import NodeArena
from kakeya.node.memory import NodeMemory

ADAPTER_FOLDER = "adapters"


class NodeAdapters:
    """An `async with`, entered when the node's memory is and left before it."""

    def __init__(
        self,
        config: AdapterConfig,
        memory: NodeMemory,
        arena: NodeArena,
        *,
        data_dir: Path,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._memory = memory
        self.arena = arena
        self._data_dir = data_dir
        self._clock = clock
        self._rng = rng
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
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
                    rules=self._config.rules,
                )
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def status(self) -> dict[str, object]:
        """Adapters and the pages that they lie in, as JSON."""
        return self.manager.status() | {"pages": self.arena.status()}

    def _bases(self) -> dict[str, str]:
        engines = self._memory.engines
        return {
            model.model_id: model.facts.model_path
            if model.facts
            else engines.sources[model.model_id]
            for model in engines.of_role(ModelRole.VERIFIER)
            if model.model_id not in engines.alone  # ring groups take none
        }

    def _lend(self, base: str) -> AbstractAsyncContextManager[AdapterEngine]:
        return self._memory.engines.get(base).lend()
