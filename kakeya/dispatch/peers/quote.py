"""How a node would serve a request at this moment: the figures that routing decides on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol, runtime_checkable

from kakeya.generation.facts import ModelFacts, ModelState, PromptsAlike, RequestLoad
from kakeya.generation.model import ModelDirectory, ServedModel


@runtime_checkable
class QuotedModel(ServedModel, Protocol):
    """A model of this node, with what its peers ask of it."""

    @property
    def load(self) -> RequestLoad:
        """Its requests at this moment."""
        ...

    @property
    def load_s(self) -> float | None:
        """Seconds until it serves, if it were asked for now; None = not known."""
        ...

    @property
    def refusal(self) -> str:
        """Why a request would be refused now; "" = it would not."""
        ...

    @property
    def adapter_digest(self) -> str:
        """Of the content of its adapter; "" = it has none."""
        ...

    def held_tokens(self, token_ids: Sequence[int], cuts: Sequence[int]) -> int:
        """How many leading tokens of a history have their KV here."""
        ...

    def alike(self, token_ids: Sequence[int]) -> PromptsAlike:
        """What its requests at this moment have in common with a history."""
        ...


class OwnModels(ModelDirectory, Protocol):
    """The models of this node alone."""

    def get(self, model_id: str, client: str = "") -> QuotedModel:
        """As `ModelDirectory`."""
        ...

    def verifiers(self) -> tuple[QuotedModel, ...]:
        """As `ModelDirectory`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOrigin:
    """What the tokens of an answer come from: digests of the weights and of the arithmetic. Where
    both are equal, so are the tokens of a generation; "" = not known."""

    weights: str = ""
    numerics: str = ""


NO_ORIGIN = AnswerOrigin()
"""Of a model that was never loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """See the module. Speeds are tokens per second, 0 = not measured.

    `load_s` is 0 for a model in memory, None = not known. A prompt is computed in pieces of
    `piece_tokens`, 0 = as a whole. `cached_tokens` are leading ones of the history whose KV is
    there. `kv_rates` are the bytes/s with which KV comes there from other nodes, by node id; None =
    it shares no KV with others.
    """

    is_ready: bool
    load_s: float | None = 0.0
    prefill_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0
    piece_tokens: int = 0
    batch_rows: int = 1
    load: RequestLoad = field(default_factory=RequestLoad)
    cached_tokens: int = 0
    alike: PromptsAlike = field(default_factory=PromptsAlike)
    refusal: str = ""
    origin: AnswerOrigin = field(default_factory=AnswerOrigin)
    kv_rates: Mapping[str, float] | None = None


def quote_of(
    model: QuotedModel,
    token_ids: Sequence[int],
    cuts: Sequence[int],
    kv_rates: Mapping[str, float] | None = None,
) -> Quote:
    """The quote of a model of this node for a history."""
    facts = model.facts
    if facts is None:
        return Quote(is_ready=False, load_s=model.load_s, refusal=model.refusal)
    return Quote(
        is_ready=model.state is ModelState.READY,
        load_s=model.load_s,
        prefill_tokens_per_s=facts.prefill_tokens_per_second,
        tokens_per_s=facts.tokens_per_second,
        piece_tokens=facts.prefill_chunk_tokens,
        batch_rows=facts.batch_rows,
        load=model.load,
        cached_tokens=model.held_tokens(token_ids, cuts),
        alike=model.alike(token_ids),
        refusal=model.refusal,
        origin=origin_of(facts, model.adapter_digest),
        kv_rates=kv_rates,
    )


def origin_of(facts: ModelFacts | None, adapter_digest: str = "") -> AnswerOrigin:
    """What a model's tokens come from: equal weights on any node have one digest, with the
    adapter, and the vocabulary of which the ids are; None = the model was never loaded."""
    if facts is None:
        return NO_ORIGIN
    made_of = facts.base_fingerprint
    adapter = (adapter_digest,) if adapter_digest else ()
    return AnswerOrigin(
        weights=_digest(made_of, facts.vocabulary_digest, *adapter) if made_of else "",
        numerics=_digest(facts.kv_exactness, facts.mlx_version),
    )


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()[:16] if any(parts) else ""
