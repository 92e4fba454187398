"""The seam between the front doors of a node and the models: models by name, and their decode."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Frame
from kakeya.generation.request import DecodeRequest, DraftSource


class ServedModel(Protocol):
    """One model of this node, whoever runs it."""

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        ...

    @property
    def state(self) -> ModelState:
        """Where it is in its life now."""
        ...

    @property
    def last_error(self) -> str:
        """Why it is FAILED or RESTARTING, in one sentence; "" otherwise."""
        ...

    async def ready(self, timeout_s: float) -> ModelFacts:
        """Wait until it serves. Raises PeerUnavailable (with retry_after_s) when it will not."""
        ...

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last. Closing the iterator stops the work in one step.

        A stop token is committed: it is the last token of the stream that it ends.

        Survives the death of the engine: decoding goes on in the restarted one from the tokens
        committed so far. Raises PeerUnavailable when it cannot be restarted in time.
        """
        ...

    async def release(self, kv_key: str) -> None:
        """Forget the KV kept under a key; unknown keys and dead engines are fine."""
        ...

    async def stats(self) -> EngineStats:
        """Live numbers; zeros while the engine is not up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedId:
    """A model that is another one, its parent, with an adapter; both by the names callers use."""

    model_id: str
    parent: str


class ModelDirectory(Protocol):
    """The models of this node by name."""

    def get(self, model_id: str, client: str = "") -> ServedModel:
        """Find a model that decodes; "" is the default, BASE:NAME a model with an adapter.

        `client` is who asks, "" = nobody in particular. Raises NotFound naming the served ids, and
        Denied for an adapter of another client.
        """
        ...

    def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        """The models with adapters that a client may name."""
        ...

    def verifiers(self) -> tuple[ServedModel, ...]:
        """Every model that decodes, the default first."""
        ...


class DraftRouter(Protocol):
    """Who may draft for a model, by the placement of this moment."""

    def sources(self, facts: ModelFacts, policy: str) -> tuple[DraftSource, ...]:
        """Best first. Policies: "" or "auto", "off", "ngram", "peer", MODEL_ID@HOST:PORT.

        Raises InvalidArgument for any other policy.
        """
        ...
