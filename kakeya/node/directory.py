"""The models that this node decodes with, by name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from kakeya.adapters.adapted_model import AdaptedModel, Adapters
from kakeya.adapters.files.store import AdapterRecord
from kakeya.core.clock import Clock
from kakeya.core.errors import NotFound
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Done, Frame, Usage
from kakeya.generation.model import AdaptedId, ServedModel
from kakeya.generation.request import DecodeRequest


class VerifierDirectory:
    """Finds verifiers, alone or with an adapter; the first one is the default.

    `on_usage` is told of each whole decode.
    """

    def __init__(
        self,
        verifiers: Sequence[ServedModel],
        on_usage: Callable[[Usage], None],
        adapters: Adapters,
        clock: Clock,
    ) -> None:
        self._verifiers: tuple[ServedModel, ...] = tuple(
            _Watched(model, on_usage) for model in verifiers
        )
        self._adapters = adapters
        self._clock = clock

    def get(self, model_id: str, client: str = "") -> ServedModel:
        """Find a model that decodes; "" is the default, BASE:NAME one with an adapter.

        Raises NotFound naming what is served or near, and Denied.
        """
        for model in self._verifiers:
            if model_id in ("", model.model_id):
                return model
        base, _, _ = model_id.rpartition(":")
        for model in self._verifiers:
            if base == model.model_id:
                return self._adapted(model, model_id, client)
        if not self._verifiers:
            raise NotFound("this node decodes with no model; start one with --model ID_OR_PATH")
        served = ", ".join(model.model_id for model in self._verifiers)
        raise NotFound(f"model {model_id[:80]!r} is not served here; this node serves {served}")

    def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        """The models with adapters that a client may name."""
        return tuple(
            AdaptedId(model_id=record.model_id, parent=record.base)
            for record in self._adapters.usable(client)
        )

    def verifiers(self) -> tuple[ServedModel, ...]:
        """Every model that decodes, the default first."""
        return self._verifiers

    def _adapted(self, base: ServedModel, model_id: str, client: str) -> ServedModel:
        def record() -> AdapterRecord:
            return self._adapters.find(model_id, client)

        record()
        return AdaptedModel(base, model_id, record, self._adapters, self._clock)


class _Watched:
    """A model whose decodes are accounted for."""

    def __init__(self, model: ServedModel, on_usage: Callable[[Usage], None]) -> None:
        self._model = model
        self._on_usage = on_usage

    @property
    def model_id(self) -> str:
        return self._model.model_id

    @property
    def state(self) -> ModelState:
        return self._model.state

    @property
    def last_error(self) -> str:
        return self._model.last_error

    async def ready(self, timeout_s: float) -> ModelFacts:
        return await self._model.ready(timeout_s)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        async with aclosing(self._model.decode(request)) as frames:
            async for frame in frames:
                if isinstance(frame, Done):
                    self._on_usage(frame.usage)
                yield frame

    async def release(self, kv_key: str) -> None:
        await self._model.release(kv_key)

    async def stats(self) -> EngineStats:
        return await self._model.stats()


def failed_addresses(usage: Usage) -> tuple[str, ...]:
    """The peers whose drafts failed during a decode, not merely came late or were wrong."""
    return tuple(
        source.source.rpartition("@")[2]
        for source in usage.sources
        if source.failed and "@" in source.source
    )
