"""A model with one of its adapters, as callers see it: `BASE:NAME` is a model like others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from kakeya.adapters.manager import AdapterManager, AdapterWish
from kakeya.backends.resident import ResidentModel
from kakeya.core.errors import NotFound
from kakeya.generation.facts import (
    EngineStats,
    ModelFacts,
    ModelState,
    PromptsAlike,
    RequestLoad,
)
from kakeya.generation.frames import Frame
from kakeya.generation.manifest import Manifest
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.waiting import RequestWait


class AdaptedModel:
    """A `ServedModel`. A request uses the version that is registered at its start."""

    def __init__(
        self, base: ResidentModel, model_id: str, client: str, adapters: AdapterManager
    ) -> None:
        self._base = base
        self._adapters = adapters
        self._wish = AdapterWish(model_id=model_id, client=client, adapters=adapters)

    @property
    def model_id(self) -> str:
        """BASE:NAME."""
        return self._wish.model_id

    @property
    def manifest(self) -> Manifest:
        """The manifest of the base."""
        return self._base.manifest

    @property
    def state(self) -> ModelState:
        """The state of the base: an adapter comes and goes with a request."""
        return self._base.state

    @property
    def last_error(self) -> str:
        """The last error of the base."""
        return self._base.last_error

    @property
    def facts(self) -> ModelFacts | None:
        """The facts of the base."""
        return self._base.facts

    @property
    def folder(self) -> Path | None:
        """The folder of the base."""
        return self._base.folder

    def waits_for(self) -> RequestWait | None:
        """See `ServedModel`."""
        return self._base.waits_for()

    @property
    def load(self) -> RequestLoad:
        """The generations of the base, with any adapter."""
        return self._base.load

    @property
    def load_s(self) -> float | None:
        """Seconds until the base serves."""
        return self._base.load_s

    @property
    def refusal(self) -> str:
        """Why a request would be refused now."""
        return self._base.refusal

    @property
    def adapter_digest(self) -> str:
        """Of the version that is registered now; "" = it was removed."""
        with contextlib.suppress(NotFound):
            return self._adapters.find(self._wish.model_id, self._wish.client).digest
        return ""

    def held_tokens(self, token_ids: Sequence[int], cuts: Sequence[int]) -> int:
        """0: which version of the adapter a request gets is known when it begins."""
        return 0

    def alike(self, token_ids: Sequence[int]) -> PromptsAlike:
        """Nothing, likewise."""
        return PromptsAlike()

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        """Wait until the base serves. Raises NotFound if the adapter was removed."""
        self._adapters.find(self._wish.model_id, self._wish.client)
        return await self._base.ready(timeout_s, priority)

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames of the base with the adapter. Also raises the errors of acquiring it."""
        return self._base.decode(request, self._wish)

    async def release(self, kv_key: str) -> None:
        """Forget the KV kept under a key."""
        await self._base.release(kv_key)

    async def stats(self) -> EngineStats:
        """Return live figures of the base's engine."""
        return await self._base.stats()
