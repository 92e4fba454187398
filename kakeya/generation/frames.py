"""Frames: the answer of a generation, in order, the last of them `Done` with its cost.

Callers see progress, tokens and the end. An engine also tells its agent of KV and logits; these
frames end at the agent's `KvExchange`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class StopReason(StrEnum):
    """Why a generation ended by itself."""

    MAX_TOKENS = "max_tokens"
    STOP_TOKEN = "stop_token"
    CONTEXT_FULL = "context_full"


@dataclass(slots=True, kw_only=True)
class SourceUsage:
    """Counts of one draft source in one generation, in tokens unless said; the engine counts on.

    `shadowed` tokens were only compared with the output of plain decoding, which costs nothing;
    `shadow_hits` of them were right.
    """

    source: str
    drafts: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    abstained: int = 0
    failed: int = 0
    late: int = 0
    shadowed: int = 0
    shadow_hits: int = 0
    mean_wait_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Cost of a generation; counts are tokens unless said.

    `forwards` are those of decoding, plain steps and blocks; prefill is not among them.
    `mixed_numerics`: nodes of unlike arithmetic computed parts of it, so that an undisturbed answer
    might have other tokens.
    """

    prefill_s: float = 0.0
    total_s: float = 0.0
    cached_tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    sources: tuple[SourceUsage, ...] = ()
    mixed_numerics: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Prompt tokens with KV, the `cached_tokens` from earlier requests included."""

    computed_tokens: int
    total_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The log probability of a token, and the most likely tokens at its place with theirs.

    Natural logarithms of the model's own distribution, to which no penalty, bias, grammar or
    temperature was applied. `top` begins with the most likely token; at equal probability the
    lowest id comes first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens that one step committed, in order; never empty. `logprobs` has one for each token, or
    none where the request asked for none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The last frame."""

    reason: StopReason
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvImported:
    """The engine took the KV of so many tokens from the offered blocks."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvExported:
    """The engine filled the pages of a block; `tokens` as the offer said, 0 = a whole block."""

    index: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPark:
    """The engine asks for pages of these lengths, in bytes, for KV that has to go.

    () = it needs none any more. `number` counts what the generation asked for.
    """

    lengths: tuple[int, ...]
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWant:
    """The engine asks for a larger KV bound.

    Without `needed_bytes` a generation cannot begin or go on; `wished_bytes`, at least as many,
    also spare kept KV and further questions.
    """

    needed_bytes: int
    wished_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """The place of a generation among those that wait in the engine, from 1; 0 = it waits no more.

    `seconds` are an estimate of the time to its first token.
    """

    position: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLogits:
    """The logits behind the history, the same each time: float32, little-endian. Shape: [V]."""

    logits: bytes


Frame = Progress | Tokens | Done
EngineFrame = Frame | KvImported | KvExported | KvPark | KvWant | QueuePlace | HistoryLogits
