"""Embeddings for the clients of every dialect: texts to token ids, checks, and vectors of a model.

find the model -> wait until it was loaded once -> texts to ids, refused or cut off -> vectors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from starlette.types import Scope

from kakeya.backends.request import ModelNotFound
from kakeya.core.clock import Clock
from kakeya.core.errors import ContextLengthExceeded, InvalidArgument, NotFound
from kakeya.dispatch.profiles import ClientProfile
from kakeya.dispatch.registry import TaskRegistry
from kakeya.gateway.figures import HttpMetrics
from kakeya.gateway.generation import profile_of
from kakeya.gateway.http.connection import HttpLimits
from kakeya.gateway.http.receipt import note_defaults
from kakeya.generation.facts import ModelFacts
from kakeya.generation.fair_bound import FairBound
from kakeya.generation.model import EmbeddingModel, ModelDirectory
from kakeya.generation.request import GenerationPriority
from kakeya.text.text import Texts

EmbeddingInput: TypeAlias = str | tuple[int, ...]
"""A text; or the ids of one in the model's own tokens, special ones included. Never empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The vectors of inputs, in order, little-endian float32; `tokens` counts those of all."""

    model_id: str
    vectors: Sequence[bytes]
    tokens: int


class Embeddings:
    """Makes vectors with the embedders of a node."""

    def __init__(
        self,
        directory: ModelDirectory,
        texts: Texts,
        metrics: HttpMetrics,
        limits: HttpLimits,
        clock: Clock,
        tasks: TaskRegistry,
    ) -> None:
        self._directory = directory
        self._texts = texts
        self._metrics = metrics
        self._tasks = tasks
        self._crowd = FairBound(limits.generations, clock.mono)
        self.limits = limits

    def meant(self, name: str, client: str, scope: Scope) -> tuple[str, ClientProfile]:
        """The name of the embedder that a client means: its profile's, where there is none of the
        name that it gives; and the profile."""
        profile = profile_of(self._tasks, client, scope)
        other = profile.spec.embedder
        if not other or name in [model.model_id for model in self._directory.embedders()]:
            return name, profile
        note_defaults(scope, {"model": other}, f"profiles.{profile.name}")
        return other, profile

    def find(self, model_id: str) -> EmbeddingModel:
        """Find an embedder. Raises ModelNotFound with the ids that are served, InvalidArgument for
        a model that decodes."""
        try:
            return self._directory.embedder(model_id)
        except NotFound as unknown:
            raise ModelNotFound(unknown.message) from None

    @contextmanager
    def admitted(self, share: str, user: str = "") -> Iterator[None]:
        """Hold a place for a request of this share. Raises QueueFull when all are taken."""
        full = f"{self._crowd.total} requests for embeddings are running, which is the limit"
        with self._crowd.member(share, user, full):
            yield

    async def embed(
        self,
        model: EmbeddingModel,
        inputs: Sequence[EmbeddingInput],
        *,
        size: int | None = None,
        truncates: bool = False,
        names: Callable[[int], str] = "input[{}]".format,
        share: str = "",
        user: str = "",
        priority: GenerationPriority = GenerationPriority.NORMAL,
    ) -> Embedded:
        """Make the vectors of inputs, of `size` numbers each; None = as many as the model makes.

        An input that is too long is cut off where `truncates`, else refused. `names` tells how an
        error names an input, `priority` how urgently a model is needed that is not in memory.

        Raises InvalidArgument for a size or a token id that the model does not have, for an input
        without tokens, ContextLengthExceeded for one that is too long, and the errors of
        `EmbeddingModel.embed`.
        """
        facts = await model.ready(self.limits.ready_s, priority)
        _check_size(size, facts)
        token_ids = await self._token_ids(inputs, facts, truncates=truncates)
        for index, ids in enumerate(token_ids):
            _check_input(ids, names(index), facts)
        tokens = sum(map(len, token_ids))
        self._metrics.generation_began(model.model_id, tokens)
        packed = await model.embed(token_ids, size=size or 0, client=share, user=user)
        step = len(packed) // len(inputs)
        vectors = [packed[at : at + step] for at in range(0, len(packed), step)]
        return Embedded(model_id=model.model_id, vectors=vectors, tokens=tokens)

    async def _token_ids(
        self, inputs: Sequence[EmbeddingInput], facts: ModelFacts, *, truncates: bool
    ) -> list[Sequence[int]]:
        """The ids of inputs, in order."""
        most = facts.context_tokens if truncates else None
        texts = [one for one in inputs if isinstance(one, str)]
        encoded: Iterator[Sequence[int]] = iter(())
        if texts:
            text = await self._texts.get(facts.model_path)
            encoded = iter(await text.encode_whole(texts, cut_to=most))
        return [next(encoded) if isinstance(one, str) else one[:most] for one in inputs]


def _check_size(size: int | None, facts: ModelFacts) -> None:
    whole, nested = facts.vector_size, facts.nested_sizes
    if size in (None, whole, *nested) or (0 in nested and size is not None and 0 < size <= whole):
        return
    allowed = f"from 1 to {whole}" if 0 in nested else " or ".join(map(str, (*nested, whole)))
    raise InvalidArgument(
        f"dimensions is {size}; the vectors of {facts.model_id} may have {allowed} numbers",
        param="dimensions",
    )


def _check_input(token_ids: Sequence[int], name: str, facts: ModelFacts) -> None:
    if not token_ids:
        raise InvalidArgument(f"{name} has no tokens; it needs at least one", param=name)
    if len(token_ids) > facts.context_tokens:
        raise ContextLengthExceeded(
            f"{name} has {len(token_ids)} tokens; {facts.model_id} takes at most "
            f'{facts.context_tokens}: give a shorter text, or "truncate": true to have it cut off',
            param=name,
        )
    if (highest := max(token_ids)) >= facts.vocab_size:
        raise InvalidArgument(
            f"{name} holds the token id {highest}; {facts.model_id} has {facts.vocab_size} tokens",
            param=name,
        )
