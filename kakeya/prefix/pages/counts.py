"""Counts of prefix reuse since the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Source(StrEnum):
    """Where the KV of a prompt's tokens came from."""

    LIVE = "live"  # the engine still held it
    PAGES = "pages"
    DISK = "disk"
    PEER = "peer"
    COMPUTED = "computed"


@dataclass(slots=True)
class PrefixCounts:
    """Tokens of prompts by source, and blocks by outcome."""

    tokens: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    committed: int = 0
    rolled_back: int = 0
    evicted: int = 0
    expired: int = 0
    written: int = 0
    waits: int = 0
    waited_s: float = 0.0
    logits_reused: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens whose KV was not computed again."""
        return sum(self.tokens.values()) - self.tokens[Source.COMPUTED]
