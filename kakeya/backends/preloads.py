"""Loads of models without a request: at the start of a node as room allows, and once the pressure
that evicted a model has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kakeya.backends.engines import Engines
from kakeya.backends.images.handler import ImageModels
from kakeya.backends.images.model import IMAGE
from kakeya.backends.resident import ResidentModel
from kakeya.backends.terms import DRAFT_TERMS
from kakeya.generation.spec import ModelRole
from kakeya.memory.api import PLAIN, MemoryArbiter
from kakeya.memory.arbiter.comeback import Comeback
from kakeya.memory.arbiter.events import Event, Evicted, MemoryPressure
from kakeya.memory.arbiter.plan import Reason
from kakeya.memory.arbiter.resident import ResidentKey


class Preloads:
    """See the module; `mono` is a monotonic clock, in seconds."""

    def __init__(
        self,
        engines: Engines,
        images: ImageModels,
        arbiter: MemoryArbiter,
        mono: Callable[[], float],
    ) -> None:
        self._engines = engines
        self._images = images
        self._arbiter = arbiter
        self._mono = mono
        self._comeback = Comeback()

    async def begin(self, pinned: Collection[str]) -> None:
        """Load what there is room for, the pinned models first."""
        for model_id in self._images.by_id.keys() & pinned:
            await self._arbiter.preload(IMAGE, model_id)
        for model in sorted(self._engines.in_order(), key=lambda one: one.model_id not in pinned):
            await self._preload(model)

    async def bring_back(self) -> None:
        """Load absent models into memory that no request needs."""
        for model in self._engines.in_order():
            key = ResidentKey(model.capability, model.model_id)
            is_away = model.resident is None and model.may_come_back
            if is_away and self._comeback.may(key, self._mono()):
                await self._preload(model)

    def happened(self, told: Event) -> None:
        """Note an event of the arbiter."""
        match told:
            case MemoryPressure():
                self._comeback.pressed(told.level, self._mono())
            case Evicted() if told.reason is Reason.PRESSURE:
                self._comeback.taken(told.key, self._mono())
            case _:
                pass

    async def _preload(self, model: ResidentModel) -> None:
        if model.is_on_demand or not model.failures.may_load:
            return
        terms = DRAFT_TERMS if model.role is ModelRole.PROPOSER else PLAIN
        if not await self._arbiter.preload(model.capability, model.model_id, terms):
            model.not_expected()
