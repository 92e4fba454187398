"""The seam between the APIs of a node and its prefixes.

An API says which conversation or prefix a prompt continues, and gets the name of the KV to continue
from. It tells that a turn is over and how the next one will begin. It has a prefix warmed. Prefixes
change speed alone, so calls raise only for invalid arguments.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kakeya.core.errors import InvalidArgument, ModelLoading, PeerUnavailable
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.model import ServedModel
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys
from kakeya.text.changing_lines import ALL_KINDS, ChangingLine

CONVERSATION, SEGMENTS, PREFIX, CACHE_KEY, RETENTION, STABLE_TOKENS = (
    "x-kakeya-conversation",
    "x-kakeya-segments",
    "x-kakeya-prefix",
    "x-kakeya-cache-key",
    "x-kakeya-retention",
    "x-kakeya-stable-tokens",
)
"""Metadata of a gRPC call, or headers: the conversation or prefix of its prompt, its retention, and
how many of its ids are stable."""
_MOST_DIGITS = 9
AT_HAND_S = 1.0
"""Seconds that a ready model may take to tell its facts."""
RETENTIONS = {retention.label: retention for retention in Retention} | {
    "in-memory": Retention.IN_MEMORY,
    "24h": Retention.EXTENDED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """What a request says of its prefix; `retention` None = not given.

    `stable_tokens`, of a prompt of token ids, are those that other requests begin with too, 0 = it
    does not say: KV is then shared in whole blocks, and with it to the token.
    """

    keys: CacheKeys = field(default_factory=CacheKeys)
    retention: Retention | None = None
    stable_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the request gives no key: then only content decides."""
        return self.keys == CacheKeys() and self.retention is None

    def cuts(self, prompt_tokens: int) -> tuple[int, ...]:
        """The cut of a prompt of so many ids: in front of the last stable token, where a prompt of
        the stable ones alone ends, since the last token of a prompt is not prefilled."""
        return (self.stable_tokens - 1,) if 1 < self.stable_tokens <= prompt_tokens else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixClaim:
    """The client, the model and the keys of a prompt. `model_id` is the name that the caller uses;
    `facts` are those of the model, or of the base of an adapter."""

    model_id: str
    facts: ModelFacts
    client: str = ""
    use: CacheUse = field(default_factory=CacheUse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiped:
    """The counts of a wipe: blocks in memory, files on disk; and whether the node stores any there.

    `kept` are files that could not be removed, and why: the next start finds their blocks.
    """

    blocks: int = 0
    files: int = 0
    kept: tuple[str, ...] = ()
    has_disk: bool = False


class Precache(Protocol):
    """The prefixes that a node keeps warm."""

    @property
    def moved_kinds(self) -> Collection[ChangingLine]:
        """The kinds of lines that are moved out of the way of the cache."""
        ...

    def kv_key(self, claim: PrefixClaim) -> str:
        """Name the KV that a generation continues and leaves; "" = none, content decides."""
        ...

    def turn_ended(self, claim: PrefixClaim, tokens: TokenSource) -> None:
        """Have the beginning of the next request warm, when there is time."""
        ...

    def opened(self, claim: PrefixClaim) -> Awaitable[WarmReport] | None:
        """Have warm what is known of a key whose request is about to come, as where a person begins
        to speak: the beginning of its next turn, or else the declared prompts of the model.

        Returns the report, which need not be waited for; None = nothing is known of the key.
        """
        ...

    async def warm(
        self, claim: PrefixClaim, tokens: TokenSource, *, is_pinned: bool = False
    ) -> WarmReport:
        """Have a prefix warmed; the report of that."""
        ...

    async def wipe(self) -> Wiped:
        """Drop all KV of prefixes, in engines, in pages and on disk."""
        ...


class NoPrecache:
    """A node that keeps no prefixes."""

    moved_kinds: Collection[ChangingLine] = ALL_KINDS
    """As where prefixes are kept: a prompt does not depend on that."""

    def kv_key(self, claim: PrefixClaim) -> str:
        """None."""
        return ""

    def turn_ended(self, claim: PrefixClaim, tokens: TokenSource) -> None:
        """Nothing is warmed."""

    def opened(self, claim: PrefixClaim) -> Awaitable[WarmReport] | None:
        """Nothing is known."""
        return None

    async def warm(
        self, claim: PrefixClaim, tokens: TokenSource, *, is_pinned: bool = False
    ) -> WarmReport:
        """Nothing is warmed."""
        return WarmReport(outcome=WarmOutcome.AWAY, reason="this node keeps no prefixes")

    async def wipe(self) -> Wiped:
        """There is nothing."""
        return Wiped()


async def facts_at_hand(model: ServedModel) -> ModelFacts | WarmReport:
    """Find the facts of a model that is in memory; a report for any other, since no model is loaded
    for a prefix."""
    if model.state is not ModelState.READY:
        reason = f"model {model.model_id} is {model.state.value}; its first request computes it"
        return WarmReport(outcome=WarmOutcome.AWAY, reason=reason)
    try:
        return await model.ready(AT_HAND_S)
    except (ModelLoading, PeerUnavailable) as gone:
        return WarmReport(outcome=WarmOutcome.AWAY, reason=gone.message)


def warmed_for(use: CacheUse, *, is_pinned: bool) -> Retention:
    """The retention of a warmed prefix: as given, or a day for a pin."""
    return use.retention or (Retention.EXTENDED if is_pinned else Retention.SHORT)


def read_retention(word: str, param: str) -> Retention:
    """Read in_memory, short, long or extended, or OpenAI's other words. Raises InvalidArgument."""
    try:
        return RETENTIONS[word]
    except KeyError:
        raise InvalidArgument(
            f"{param} is {word[:40]!r}; it must be one of {', '.join(RETENTIONS)}", param=param
        ) from None


def read_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> CacheUse:
    """Read all of it from a gRPC call. Raises InvalidArgument for an unknown retention, or a count
    that is none."""
    said = {key: value for key, value in metadata if isinstance(value, str)}
    return CacheUse(
        keys=CacheKeys(
            conversation_id=said.get(CONVERSATION, ""),
            segment_hash=said.get(SEGMENTS, ""),
            prefix_hash=said.get(PREFIX, ""),
            prompt_cache_key=said.get(CACHE_KEY, ""),
        ),
        retention=read_retention(said[RETENTION], RETENTION) if said.get(RETENTION) else None,
        stable_tokens=_count(said.get(STABLE_TOKENS, "")),
    )


def _count(word: str) -> int:
    if word and not (word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS):
        raise InvalidArgument(
            f"{STABLE_TOKENS} is {word[:40]!r}; it must be a number of tokens", param=STABLE_TOKENS
        )
    return int(word or 0)


Tokens = Sequence[int]
"""Marked with the cuts of the text (`cuts`); the last one is computed by the request that comes."""


TokenSource = Callable[[], Awaitable[Tokens]]
"""Renders a prefix when its turn has come, on the event loop. Raises KakeyaError."""


class WarmOutcome(StrEnum):
    """The outcome of warming a prefix."""

    WARM = "warm"
    FAILED = "failed"
    PRESSURE = "skipped_pressure"
    """Memory is short on this machine."""
    NO_ROOM = "skipped_room"
    """It would need an eviction."""
    AWAY = "skipped_away"
    """The model is not in memory."""
    LATE = "skipped_late"
    """Requests left it too little time."""
    CROWDED = "skipped_queue"
    """Too many prefixes wait already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """Tokens of a prefix: all of them, those that were there already, those computed now."""

    tokens: int = 0
    cached: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReport:
    """The outcome for a prefix, and a sentence on why it was not warmed. `is_pinned`: no other
    block takes its place from now on."""

    outcome: WarmOutcome
    warmed: Warmed = Warmed()
    is_pinned: bool = False
    reason: str = ""
