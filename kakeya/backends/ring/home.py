"""The models of a node that are ring groups: served while their group is wished for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from kakeya.backends.engine.engine import OtherRanks
from kakeya.backends.engines import Engines
from kakeya.backends.model_sizes import ModelSizes
from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring.canary_node import GroupChecks
from kakeya.backends.sizes import LeaseSize, lease_size
from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, InvariantBroken, NotFound
from kakeya.generation.spec import ModelSpec
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.estimate.estimate import Estimate

GONE_S = 30.0
_LOOK_S = 0.05


class GroupHome:
    """Adds to the models of a node and takes away from them. `opened` and `closed` tell the part
    that finds models by name; the node sets them."""

    def __init__(
        self,
        engines: Engines,
        sizes: ModelSizes,
        arbiter: MemoryArbiter,
        checks: GroupChecks,
        clock: Clock,
    ) -> None:
        self._engines = engines
        self._sizes = sizes
        self.arbiter = arbiter
        self._checks = checks
        self._clock = clock
        self.opened: Callable[[ResidentModel], None] = lambda _: None
        self.closed: Callable[[ResidentModel], None] = lambda _: None

    @property
    def sources(self) -> Mapping[str, str]:
        """The folders of the node's models, by id."""
        return self._engines.sources

    def add(
        self,
        spec: ModelSpec,
        others: Callable[[], AbstractAsyncContextManager[OtherRanks]],
        size: LeaseSize,
        whole: Estimate,
    ) -> ResidentModel:
        """Serve one more model, whose `whole` weights are compared with it where one process can
        hold them. Raises Conflict, ConfigError."""
        model = self._engines.add_group(spec, others)
        self._sizes.add(spec.model_id, size)
        alone = lease_size(whole, budget := self.arbiter.status().budget_bytes)
        if alone.bytes <= budget:
            self._sizes.add(self._engines.alone[spec.model_id].model_id, alone)
        self._checks.add(model)
        self.opened(model)
        return model

    async def remove(self, model: ResidentModel) -> None:
        """Serve a model no more; returns when its engine has ended and its memory was given
        back."""
        self.closed(model)
        alone = self._engines.alone[model.model_id]  # in memory where its canary was cut off
        try:
            async with asyncio.timeout(GONE_S):
                for one in (model, alone):
                    while one.resident is not None:
                        # First the engine: the answers that hold the model end with it.
                        if one.backend is not None:
                            await one.backend.aclose()
                        with contextlib.suppress(NotFound, Conflict):
                            self.arbiter.unload(one.capability, one.model_id)
                        await self._clock.sleep(_LOOK_S)
        except TimeoutError:
            raise InvariantBroken("a model without an engine leaves memory", model.model_id) from (
                None
            )
        self.arbiter.unlearn(model.capability, model.model_id)
        self._sizes.remove(alone.model_id)
        self._engines.remove_group(model.model_id)
        self._sizes.remove(model.model_id)
