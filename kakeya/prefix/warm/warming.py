"""What a prefix to be warm is, what may become of it, and the seam to who computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.seam import Tokens, TokenSource, Warmed, WarmOutcome, WarmReport


class Kind(IntEnum):
    """Who wants a prefix, the most urgent first."""

    ASKED = 0
    """A caller waits for the outcome: a session that opens, /v1/precache."""
    TURN = 1
    """A conversation as its next request will begin, after each of its turns."""
    KEPT = 2
    """Declared prompts after each load, and whatever comes up to its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prefix to be warm. Its `block_class` weighs it against others where room is short.

    `is_kept`: it is looked after until it is forgotten; `is_pinned`: nothing may take its place
    either, until its retention is over. Pins have keys of their own. `client` is who asks, for
    adapters that belong to somebody.
    """

    key: str
    model_id: str
    tokens: TokenSource
    retention: Retention = Retention.SHORT
    block_class: BlockClass = BlockClass.USER
    is_kept: bool = False
    is_pinned: bool = False
    client: str = ""


class WarmSource(Protocol):
    """Who computes prefixes and knows what is kept."""

    async def refuse(self, prefix: Prefix) -> WarmReport | None:
        """Why this cannot be computed now; None = it can."""
        ...

    async def keep(self, prefix: Prefix, tokens: Tokens) -> int:
        """Refresh what is there of a prefix for its class: so many tokens from its beginning."""
        ...

    async def refuse_pin(self, prefix: Prefix, tokens: Tokens, missing: int) -> WarmReport | None:
        """Why this cannot be pinned once the `missing` tokens are there too; None = it can."""
        ...

    def pin(self, prefix: Prefix, tokens: Tokens) -> None:
        """Let nothing take the place of what is there until `unpin`; what was pinned under its key
        before may go."""
        ...

    async def has_room(self, prefix: Prefix, tokens: int) -> bool:
        """Whether so many more tokens fit without taking anybody's place."""
        ...

    async def warm(self, prefix: Prefix, tokens: Tokens) -> Warmed | WarmReport:
        """Compute what is not there, behind everybody's requests; a report where it had to give
        way. Raises KakeyaError."""
        ...

    def unpin(self, key: str) -> None:
        """End the pin of a key; harmless where there is none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmStats:
    """Counts over a prewarmer's life; the last four are of this moment."""

    outcomes: Mapping[WarmOutcome, int]
    cached_tokens: int
    computed_tokens: int
    refreshed: int
    """Kept prefixes that were whole at their deadline: nothing had to be computed."""
    queued: int
    kept: int
    kept_tokens: int
    running: str
    """The key that is computed; "" = none."""
