"""The seam between the front doors of a node and the models: models by name, and their work."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Frame
from kakeya.generation.image import ImageModel
from kakeya.generation.manifest import Manifest
from kakeya.generation.request import DecodeRequest, DraftSource, GenerationPriority
from kakeya.generation.waiting import RequestWait


class LoadableModel(Protocol):
    """One model of this node, served by any backend, in memory or not."""

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        ...

    @property
    def manifest(self) -> Manifest:
        """What its owner says of it at this moment."""
        ...

    @property
    def state(self) -> ModelState:
        """State of the model."""
        ...

    @property
    def last_error(self) -> str:
        """Why the model is FAILED or RESTARTING, in one sentence; "" otherwise."""
        ...

    @property
    def facts(self) -> ModelFacts | None:
        """The facts from the model's last load; None before the first one."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder of the model's files, where it is known without a load; else None."""
        ...

    def waits_for(self) -> RequestWait | None:
        """What a request waits for before the model serves: its load, or its turn for memory; None
        = nothing."""
        ...

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        """Wait until the model serves, in the line for memory at this priority. Raises
        PeerUnavailable with retry_after_s if it will not."""
        ...


class ServedModel(LoadableModel, Protocol):
    """A model that decodes."""

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last. Closing the iterator stops the work in one step.

        A stop token is committed: it is the last token of the stream that it ends.

        The stream survives the death of the engine: the restarted engine goes on from the tokens
        committed so far. Raises PeerUnavailable when no engine starts in time.
        """
        ...

    async def release(self, kv_key: str) -> None:
        """Forget the KV kept under a key; unknown keys and dead engines are fine."""
        ...

    async def stats(self) -> EngineStats:
        """Live numbers of the engine; zeros while none is up."""
        ...


class EmbeddingModel(LoadableModel, Protocol):
    """A model that makes vectors of texts."""

    async def embed(
        self, texts: Sequence[Sequence[int]], *, size: int = 0, client: str = "", user: str = ""
    ) -> bytes:
        """The vectors of texts in token ids, in order, little-endian float32. Shape: [texts, size].

        A text is not empty, and has at most `context_tokens` tokens, special ones included. `size`
        0 = the model's `vector_size`. The model is loaded if needed; the death of its engine is
        survived.

        Raises InvalidArgument for other texts, QueueFull if too many wait, PeerUnavailable when no
        engine starts in time, and the memory arbiter's errors.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedId:
    """A model with an adapter, and its `parent`, the model without; by the names callers use."""

    model_id: str
    parent: str


class ModelDirectory(Protocol):
    """The models of this node by name."""

    def get(self, model_id: str, client: str = "") -> ServedModel:
        """Find a model that decodes; "" is the default, BASE:NAME a model with an adapter.

        `client` names the caller, "" = unknown. Raises NotFound naming the served ids, Denied for
        an adapter of another client, and InvalidArgument for an embedder.
        """
        ...

    async def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        """The models with adapters that a client may name."""
        ...

    def verifiers(self) -> tuple[ServedModel, ...]:
        """Every model that decodes, the default first."""
        ...

    def embedder(self, model_id: str) -> EmbeddingModel:
        """Find a model that makes vectors. Raises NotFound naming those that are served, and
        InvalidArgument for a model that decodes."""
        ...

    def embedders(self) -> tuple[EmbeddingModel, ...]:
        """Every model that makes vectors."""
        ...

    def image_model(self, model_id: str) -> ImageModel:
        """Find a model that draws images; "" is the first one. Raises NotFound naming those that
        are served, and InvalidArgument for a model of another kind."""
        ...

    def image_models(self) -> tuple[ImageModel, ...]:
        """Every model that draws images."""
        ...


class DraftRouter(Protocol):
    """Chooses the draft sources of a model, by the current placement."""

    def sources(self, facts: ModelFacts, policy: str) -> tuple[DraftSource, ...]:
        """Best first. Policies: "" or "auto", "off", "ngram", "peer", MODEL_ID@HOST:PORT.

        Raises InvalidArgument for any other policy.
        """
        ...
