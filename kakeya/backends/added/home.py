"""The models that come to a node and leave it while it runs: ring groups while they are wished for,
and models that pulls brought while they are on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from kakeya.backends.engine.engine import OtherRanks
from kakeya.backends.engines import Engines
from kakeya.backends.model_life import CAPABILITY_OF
from kakeya.backends.model_sizes import ModelSizes
from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring.canary_node import GroupChecks
from kakeya.backends.ring.own_share import lendable_bytes
from kakeya.backends.sizes import UNKNOWN_KV_BYTES, LeaseSize, lease_size
from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, InvariantBroken, NotFound
from kakeya.generation.spec import ModelSpec
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.estimate.estimate import Estimate

GONE_S = 30.0
_LOOK_S = 0.05
_WIDENED = 2
"""Weights of 16 bits become ones of 32 bits on a CPU."""


class ModelHome:
    """Adds to the models of a node and takes away from them. `opened` and `closed` tell the part
    that finds models by name, `freed` hears that the name of a group is free; the node sets
    them."""

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
        self.freed: Callable[[], None] = lambda: None

    @property
    def sources(self) -> Mapping[str, str]:
        """The folders of the node's models, by id."""
        return self._engines.sources

    @property
    def lasting_sources(self) -> Mapping[str, str]:
        """As `sources`, without the models that pulls brought."""
        return self._engines.lasting_sources

    async def add_group(
        self,
        spec: ModelSpec,
        others: Callable[[], AbstractAsyncContextManager[OtherRanks]],
        size: LeaseSize,
        whole: Estimate,
    ) -> ResidentModel:
        """Serve a ring group, whose `whole` weights are compared with it where one process can
        hold them. A model of its name that a pull brought makes way. Raises Conflict, ConfigError.
        """
        if (alone := self.pulled(spec.model_id)) is not None:
            await self.withdraw(alone)
        try:
            made = await asyncio.to_thread(self._engines.prepared, spec, others)
            model = self._engines.add(made)
        except BaseException:  # a model that made way comes back
            self.freed()
            raise
        self._sizes.add(spec.model_id, size)
        one_process = lease_size(whole, budget := self.arbiter.budget_bytes)
        if one_process.bytes <= budget:
            self._sizes.add(self._engines.alone[spec.model_id].model_id, one_process)
        self._checks.add(model)
        self.opened(model)
        return model

    async def add_pulled(self, spec: ModelSpec) -> ResidentModel:
        """Serve a model that a pull brought. Raises Conflict for the name of another model, and
        ConfigError for one that this node cannot load."""
        made = await asyncio.to_thread(self._engines.prepared, spec)
        kv_bytes = made.recipe.kv_bytes
        sized = await self._sizes.sized(
            {spec.model_id: (made.source, CAPABILITY_OF[spec.role])},
            self.arbiter.budget_bytes,
            stated_bytes={},
            fixed_kv_bytes={} if kv_bytes is None else {spec.model_id: kv_bytes},
        )
        # Nothing is awaited between the two: a model without a size cannot be asked for.
        model = self._engines.add(made)
        self._sizes.add(spec.model_id, sized[spec.model_id])
        self.opened(model)
        return model

    def has_room(self, disk_bytes: int) -> bool:
        """Whether idle models would leave room for one with files of so many bytes."""
        weights = disk_bytes * (1 if sys.platform == "darwin" else _WIDENED)
        return weights + UNKNOWN_KV_BYTES <= lendable_bytes(self.arbiter.status())

    def pulled(self, model_id: str) -> ResidentModel | None:
        """The model of this name that a pull brought; None = there is none."""
        return next((one for one in self.all_pulled() if one.model_id == model_id), None)

    def all_pulled(self) -> tuple[ResidentModel, ...]:
        """The models that pulls brought and that are served."""
        return tuple(one for _, one in self._engines.models() if one and one.is_on_demand)

    async def withdraw(self, model: ResidentModel, *, is_forced: bool = False) -> None:
        """Serve a model no more that a pull brought; its memory was given back at the return.

        Raises Conflict while it is in use, unless `is_forced`.
        """
        resident = model.resident
        is_used = model.waiting or (resident is not None and not resident.is_idle)
        if is_used and not is_forced:
            raise Conflict(
                f"{model.model_id} is in use on this node; try again once its requests have ended"
            )
        self.closed(model)
        ending = asyncio.create_task(self._end(model), name=f"withdraw {model.model_id}")
        try:
            try:
                await asyncio.shield(ending)
            finally:
                await asyncio.wait((ending,))
        except BaseException:  # its caller left, or it is still in memory: its files are here
            self.opened(model)
            raise
        self._engines.remove(model.model_id)
        self._sizes.remove(model.model_id)

    async def remove_group(self, model: ResidentModel) -> None:
        """Serve a ring group no more; returns when its engine has ended and its memory was given
        back."""
        self.closed(model)
        alone = self._engines.alone[model.model_id]  # in memory where its canary was cut off
        await self._end(model, alone)
        self._sizes.remove(alone.model_id)
        self._engines.remove(model.model_id)
        self._sizes.remove(model.model_id)
        self.freed()

    async def _end(self, *models: ResidentModel) -> None:
        try:
            async with asyncio.timeout(GONE_S):
                for one in models:
                    while one.resident is not None:
                        # First the engine: the answers that hold the model end with it.
                        if one.backend is not None:
                            await one.backend.aclose()
                        with contextlib.suppress(NotFound, Conflict):
                            self.arbiter.unload(one.capability, one.model_id)
                        await self._clock.sleep(_LOOK_S)
        except TimeoutError:
            raise InvariantBroken(
                "a model without an engine leaves memory", models[0].model_id
            ) from None
        self.arbiter.unlearn(models[0].capability, models[0].model_id)
