"""A model that makes vectors, of peers that have it while this node has not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound, PeerUnavailable
from kakeya.dispatch.peers.neighbours import ServingPeers
from kakeya.dispatch.routed.route import ELSEWHERE, offering
from kakeya.fleet.cards.cards import CardRole
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.request import GenerationPriority
from kakeya.generation.waiting import RequestWait

KEPT_S = 600.0
"""For so long after the last vectors, only the weights that made them make others: a node that has
them may be started again meanwhile."""
_SPARED_S = 30.0
"""A node with other weights is asked again after so long: its owner may have replaced them."""


class VectorWeights:
    """Which weights make the vectors of a name: those of others are not to be compared with them,
    and nodes may have unlike ones by one name."""

    def __init__(self, clock: Clock) -> None:
        self._mono = clock.mono
        self._made: dict[str, tuple[str, float]] = {}
        """By model id: the digest, "" = not known, and when it made vectors last."""
        self._others: dict[tuple[str, str], float] = {}
        """Model and node ids, and until when the node is not asked."""

    def may_ask(self, model_id: str, node_id: str) -> bool:
        """Whether a node is not known to have other weights."""
        return self._others.get((model_id, node_id), 0.0) <= self._mono()

    def take(self, model_id: str, node_id: str, weights: str) -> bool:
        """Note the weights that made vectors; False = they are not to be used."""
        now = self._mono()
        known, used_mono = self._made.get(model_id, (weights, now))
        if known != weights and now - used_mono < KEPT_S:
            self._others[model_id, node_id] = now + _SPARED_S
            return False
        self._made[model_id] = weights, now
        return True


class RoutedEmbedder:
    """An `EmbeddingModel`; the texts of one call go to one peer, and after its loss to another with
    the same weights."""

    def __init__(self, model_id: str, peers: ServingPeers, weights: VectorWeights) -> None:
        self._model_id = model_id
        self._peers = peers
        self._weights = weights
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
            if self._weights.may_ask(self._model_id, peer.node_id):
                try:
                    vectors, made_by = await self._peers.calls(peer).embed(
                        self._model_id, texts, size
                    )
                except ELSEWHERE as failure:
                    self._peers.failed(peer, failure)
                    last = failure
                    continue
                if self._weights.take(self._model_id, peer.node_id, made_by):
                    return vectors
            if isinstance(last, NotFound):
                last = PeerUnavailable(
                    f"{peer.label} has other weights by the name {self._model_id} than those that "
                    "made vectors before, and no node with these answers",
                    retry_after_s=_SPARED_S,
                )
        raise last
