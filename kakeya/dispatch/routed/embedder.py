"""A model that makes vectors, of peers that have it while this node has not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kakeya.core.errors import KakeyaError, NotFound
from kakeya.dispatch.peers.neighbours import ServingPeers
from kakeya.dispatch.routed.route import ELSEWHERE, offering
from kakeya.fleet.cards.cards import CardRole
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.request import GenerationPriority
from kakeya.generation.waiting import RequestWait


class RoutedEmbedder:
    """An `EmbeddingModel`; the texts of one call go to one peer, and after its loss to another."""

    def __init__(self, model_id: str, peers: ServingPeers) -> None:
        self._model_id = model_id
        self._peers = peers
        self._told: ModelFacts | None = None
        """The facts that its caller has: the texts are in these tokens."""

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        return self._model_id

    @property
    def manifest(self) -> Manifest:
        """Nothing is said of it here."""
        return NO_MANIFEST

    @property
    def state(self) -> ModelState:
        """READY: peers offer what they would serve."""
        return ModelState.READY

    @property
    def last_error(self) -> str:
        """None is known."""
        return ""

    @property
    def facts(self) -> ModelFacts | None:
        """Those that a peer told; None before the first request."""
        if self._told is not None:
            return self._told
        known = self._peers.known(self._model_id, CardRole.EMBEDDER)
        return None if known is None else known.facts

    @property
    def folder(self) -> Path | None:
        """None: its files are elsewhere."""
        return None

    def waits_for(self) -> RequestWait | None:
        """Nothing that is known here."""
        return None

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        """The facts of a peer's model, its tokenizer brought here. Raises the peer's errors."""
        role = CardRole.EMBEDDER
        told = await self._peers.describe(self._model_id, "", timeout_s, priority, role=role)
        self._told = told.facts
        return self._told

    async def embed(
        self, texts: Sequence[Sequence[int]], *, size: int = 0, client: str = "", user: str = ""
    ) -> bytes:
        """See `EmbeddingModel`. Raises the last peer's error."""
        last: KakeyaError = NotFound(f"no node makes embeddings with {self._model_id} now")
        for peer in offering(self._peers, self._model_id, self.facts, CardRole.EMBEDDER):
            try:
                return await self._peers.calls(peer).embed(self._model_id, texts, size)
            except ELSEWHERE as failure:
                self._peers.failed(peer, failure)
                last = failure
        raise last
