"""A deterministic toy language model: each next token is a hash of the whole history.

Any token that is lost, doubled or moved changes everything after it, which is what the laws of
sessions and of resumed decodes need. `HashServedModel` is a `ServedModel` in this process;
`tests/backends/engine/toy_engine.py` serves the same function from a real child.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kakeya.core.errors import NotFound, PeerUnavailable
from kakeya.core.units import pack_ids
from kakeya.generation.facts import EngineStats, ModelFacts, ModelState
from kakeya.generation.frames import Done, Frame, Progress, StopReason, Tokens, Usage
from kakeya.generation.manifest import NO_MANIFEST, Manifest
from kakeya.generation.model import AdaptedId, ServedModel
from kakeya.generation.request import DecodeRequest, DraftSource, GenerationPriority, Sampling
from kakeya.generation.waiting import RequestWait

VOCAB = 97
EOS = 0


def next_token(history: Sequence[int], sampling: Sampling, vocab: int = VOCAB) -> int:
    """The model's choice; a function of (history, seed) at a temperature, of history at 0."""
    seed = sampling.seed if sampling.temperature > 0 else 0
    digest = blake2b(pack_ids(history) + seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab


def expected(
    history: Sequence[int],
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: frozenset[int] = frozenset(),
    context: int = 10_000,
    vocab: int = VOCAB,
) -> tuple[list[int], StopReason]:
    """What a whole generation gives: the stop token is its last token."""
    tokens: list[int] = []
    ids = list(history)
    while True:
        if tokens and tokens[-1] in stop:
            return tokens, StopReason.STOP_TOKEN
        if len(tokens) >= max_tokens:
            return tokens, StopReason.MAX_TOKENS
        if len(ids) >= context:
            return tokens, StopReason.CONTEXT_FULL
        token = next_token(ids, sampling or Sampling(), vocab)
        tokens.append(token)
        ids.append(token)


@dataclass
class HashServedModel:
    """A `ServedModel` without a process. `gate`, when given, must be set for each step to run."""

    model_id: str = "toy"
    vocab: int = VOCAB
    context: int = 10_000
    tokens_per_step: int = 1
    gate: asyncio.Event | None = None
    fail_after: int | None = None
    """Raise PeerUnavailable after so many tokens."""
    state: ModelState = ModelState.READY
    last_error: str = ""
    manifest: Manifest = NO_MANIFEST
    caches: dict[str, list[int]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    requests: list[DecodeRequest] = field(default_factory=list)
    closed_early: int = 0
    steps: int = 0
    cache_length_violations: int = 0
    position_violations: int = 0

    @property
    def folder(self) -> None:
        return None

    def waits_for(self) -> RequestWait | None:
        return None

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        if self.state is not ModelState.READY:
            raise PeerUnavailable(f"model {self.model_id} is {self.state}", retry_after_s=1.0)
        return ModelFacts(
            model_id=self.model_id,
            model_path="",
            vocab_size=self.vocab,
            context_tokens=self.context,
            eos_token_ids=(EOS,),
            kv_bytes_per_token=8,
        )

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        self.requests.append(request)
        history = list(request.token_ids)
        held = self.caches.get(request.kv_key, [])
        cached = 0
        while cached < min(len(held), len(history) - 1) and held[cached] == history[cached]:
            cached += 1
        tokens, reason = expected(
            history,
            request.max_tokens,
            sampling=request.sampling,
            stop=request.stop_token_ids,
            context=self.context,
            vocab=self.vocab,
        )
        finished = False
        try:
            yield Progress(computed_tokens=len(history), total_tokens=len(history))
            for start in range(0, len(tokens), self.tokens_per_step):
                if self.gate is not None:
                    await self.gate.wait()
                    self.gate.clear()
                else:
                    await asyncio.sleep(0)
                if self.fail_after is not None and start >= self.fail_after:
                    raise PeerUnavailable("the toy engine is gone", retry_after_s=2.0)
                self.steps += 1
                step = tuple(tokens[start : start + self.tokens_per_step])
                history.extend(step)
                if request.kv_key:
                    self.caches[request.kv_key] = history[:-1]
                yield Tokens(token_ids=step)
            finished = True
            yield Done(
                reason=reason,
                usage=Usage(
                    prefill_s=0.01,
                    total_s=0.02,
                    cached_tokens=cached,
                    forwards=self.steps,
                    drafted=3,
                    verified=2,
                    accepted=1,
                ),
            )
        finally:
            self.closed_early += not finished

    async def release(self, kv_key: str) -> None:
        self.released.append(kv_key)
        self.caches.pop(kv_key, None)

    async def stats(self) -> EngineStats:
        by_key = {key: 8 * len(ids) for key, ids in self.caches.items()}
        return EngineStats(
            kv_live_bytes=sum(by_key.values()),
            kv_entries=len(by_key),
            kv_bytes_by_key=by_key,
            cache_length_violations=self.cache_length_violations,
            position_violations=self.position_violations,
        )


@dataclass
class ToyDirectory:
    """A `ModelDirectory` of given models."""

    models: tuple[ServedModel, ...]

    def get(self, model_id: str, client: str = "") -> ServedModel:
        for model in self.models:
            if model_id in ("", model.model_id):
                return model
        served = ", ".join(model.model_id for model in self.models)
        raise NotFound(f"no model {model_id!r} is served here; served are: {served}")

    def verifiers(self) -> tuple[ServedModel, ...]:
        return self.models

    async def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        return ()


@dataclass
class ToyRouter:
    """A `DraftRouter` that records what it is asked."""

    policies: list[str] = field(default_factory=list)

    def sources(self, facts: ModelFacts, policy: str) -> tuple[DraftSource, ...]:
        self.policies.append(policy)
        return () if policy == "off" else (DraftSource(kind="ngram"),)
