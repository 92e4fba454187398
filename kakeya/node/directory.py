"""The models of this node by name, and their engine children as proposers for peers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kakeya.core.errors import NotFound
from kakeya.decoding.proposer import Draft, ProposerStats
from kakeya.runtime.generation import ServedModel
from kakeya.serving.backends.engine_backend import EngineBackend

_DRAFT_LIMIT_S = 10.0
"""Above the engine's own limit for a draft, so that its error is the one that is told."""


class Models:
    """Finds verifiers; the first one is the default."""

    def __init__(self, verifiers: Sequence[ServedModel]) -> None:
        self._verifiers = tuple(verifiers)

    def get(self, model_id: str) -> ServedModel:
        """Find a model that decodes; "" is the default. Raises NotFound naming the served ids."""
        for model in self._verifiers:
            if model_id in ("", model.model_id):
                return model
        if not self._verifiers:
            raise NotFound("this node decodes with no model; start one with --model ID_OR_PATH")
        served = ", ".join(model.model_id for model in self._verifiers)
        raise NotFound(f"model {model_id!r} is not served here; this node serves {served}")

    def verifiers(self) -> tuple[ServedModel, ...]:
        """Every model that decodes, the default first."""
        return self._verifiers


class EngineProposer:
    """A draft model in an engine child, as the blocking proposer that ProposerService serves.

    `propose` is called on worker threads; the child is spoken to on the agent's event loop.
    """

    def __init__(self, backend: EngineBackend, loop: asyncio.AbstractEventLoop) -> None:
        self._backend = backend
        self._loop = loop
        self._stats = ProposerStats()

    @property
    def name(self) -> str:
        """The model id it is served and advertised under."""
        return self._backend.model_id

    @property
    def stats(self) -> ProposerStats:
        """Live counts; read, never written, by others."""
        return self._stats

    def propose(self, prefix: Sequence[int], size: int) -> Draft:
        """Draft greedily. Raises PeerUnavailable while the engine is not up."""
        asked = asyncio.run_coroutine_threadsafe(self._backend.draft(prefix, size), self._loop)
        self._stats.calls += 1
        try:
            draft = asked.result(_DRAFT_LIMIT_S)
        except BaseException:
            asked.cancel()
            self._stats.failures += 1
            raise
        self._stats.drafted += len(draft.tokens)
        self._stats.abstained += not draft.tokens
        self._stats.forward_passes += draft.forward_passes
        return draft
