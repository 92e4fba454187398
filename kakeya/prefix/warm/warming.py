"""A prefix to be warmed, its counts, and the seam to the part that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from kakeya.generation.kv import NO_HOLDER, KvHolder
from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.seam import Tokens, TokenSource, Warmed, WarmOutcome, WarmReport


class Kind(IntEnum):
    """The cause of warming a prefix, the most urgent first."""

    ASKED = 0
    """A caller waits for the outcome: a session that opens, /v1/precache."""
    TURN = 1
    """A conversation as its next request will begin, after each of its turns."""
    KEPT = 2
    """Declared prompts after each load, and prefixes that come up to their deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prefix to be warm. Its `block_class` weighs it against others where room is short.

    `is_kept`: it is refreshed until it is forgotten; `is_pinned`: it is not evicted either, until
    its retention is over. Pins have keys of their own. `client` is the caller, for adapters that
    have an owner; `kv_holder` is another node that has its KV.
    """

    key: str
    model_id: str
    tokens: TokenSource
    retention: Retention = Retention.SHORT
    block_class: BlockClass = BlockClass.USER
    is_kept: bool = False
    is_pinned: bool = False
    client: str = ""
    kv_holder: KvHolder = NO_HOLDER


class WarmSource(Protocol):
    """The part that computes prefixes and knows the kept ones."""

    async def refuse(self, prefix: Prefix) -> WarmReport | None:
        """Why this cannot be computed now; None = it can."""
        ...

    async def keep(self, prefix: Prefix, tokens: Tokens) -> int:
        """Refresh the blocks of a prefix for its class; how many tokens from its beginning."""
        ...

    async def refuse_pin(self, prefix: Prefix, tokens: Tokens, missing: int) -> WarmReport | None:
        """Why this cannot be pinned once the `missing` tokens are there too; None = it can."""
        ...

    def pin(self, prefix: Prefix, tokens: Tokens) -> None:
        """Pin the blocks that are there until `unpin`; an earlier pin of its key ends."""
        ...

    async def has_room(self, prefix: Prefix, tokens: int) -> bool:
        """Whether so many more tokens fit without an eviction."""
        ...

    async def warm(self, prefix: Prefix, tokens: Tokens) -> Warmed | WarmReport:
        """Compute the missing blocks, behind all requests; a report where the work had to give way.
        Raises KakeyaError."""
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
