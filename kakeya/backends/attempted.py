"""The model that a generation is attempted with, and for what the generation waits."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from kakeya.backends.engine.life import EngineLife
from kakeya.generation.continuation import Continuation
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import QueuePlace
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.waiting import RequestWait, WaitReason

_OF_MODEL = (WaitReason.ADAPTER, WaitReason.MEMORY, WaitReason.RESTART)
"""In these stages it may be the model that is waited for."""


class AttemptedModel(Protocol):
    """A model that lends its engine: `ResidentModel`, or `EngineBackend` itself."""

    @property
    def model_id(self) -> str:
        """The id that callers use."""
        ...

    @property
    def facts(self) -> ModelFacts | None:
        """The facts from its last engine."""
        ...

    def waits_for(self) -> RequestWait | None:
        """What a request waits for before the model serves."""
        ...

    def prompts_s(self, job: Continuation) -> float:
        """Seconds of the prompts that are computed first once a job has the model, its own too."""
        ...

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        """Wait until the model serves."""
        ...

    def lend_for(self, request: DecodeRequest) -> AbstractAsyncContextManager[EngineLife]:
        """Hold the model in memory for a request; load it if needed."""
        ...


def wait_of(
    model: AttemptedModel, job: Continuation, stage: WaitReason | None, place: QueuePlace | None
) -> RequestWait | None:
    """The wait of a generation before its first token.

    The model tells its turn for memory and its load, to which the prompts are added that go before
    this one, and the engine, which works at stage None, the `place` in its queue.
    """
    if stage in _OF_MODEL and (wait := model.waits_for()) is not None:
        if wait.seconds is None or stage is not WaitReason.MEMORY:
            return wait
        return replace(wait, seconds=wait.seconds + model.prompts_s(job))
    if stage is not None:
        is_told = stage is not WaitReason.MEMORY
        return RequestWait(reason=stage, model_id=model.model_id) if is_told else None
    if place is None:
        return None
    return RequestWait(
        reason=WaitReason.PLACE if place.position else WaitReason.PROMPT,
        model_id=model.model_id,
        position=place.position or None,
        seconds=place.seconds,
    )
