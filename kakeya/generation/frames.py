"""What a generation answers with: frames, in order, the last of them `Done` with its cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class StopReason(StrEnum):
    """Why a generation ended by itself."""

    MAX_TOKENS = "max_tokens"
    STOP_TOKEN = "stop_token"
    CONTEXT_FULL = "context_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUsage:
    """What one draft source did during one generation; counts are tokens unless said.

    `shadowed` tokens were only compared with what plain decoding emitted, which costs nothing;
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
    """What a generation cost."""

    prefill_s: float = 0.0
    total_s: float = 0.0
    cached_tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    sources: tuple[SourceUsage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Prefill so far, the cached tokens that were there before included."""

    computed_tokens: int
    total_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What one step committed, in order; never empty."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The last frame."""

    reason: StopReason
    usage: Usage = field(default_factory=Usage)


Frame = Progress | Tokens | Done
