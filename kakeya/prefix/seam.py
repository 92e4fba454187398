"""The seam between the doors of a node and what it keeps of prefixes: who asks, and for what.

A door says what a prompt continues and gets the name of the KV to continue from; it says that a
turn is over and how the next one will begin; it has a prefix warmed. All of it is a matter of speed
alone, so nothing here raises but for what cannot be meant.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kakeya.core.errors import InvalidArgument, PeerUnavailable
from kakeya.generation.facts import ModelFacts, ModelState
from kakeya.generation.model import ServedModel
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys

CONVERSATION, SEGMENTS, PREFIX, CACHE_KEY, RETENTION = (
    "x-kakeya-conversation",
    "x-kakeya-segments",
    "x-kakeya-prefix",
    "x-kakeya-cache-key",
    "x-kakeya-retention",
)
"""Metadata of a gRPC call: what its prompt continues, and for how long that is of use."""
AT_HAND_S = 1.0
"""How long a model that is ready may take to say what it is."""
_RETENTIONS = {retention.label: retention for retention in Retention} | {
    "in-memory": Retention.IN_MEMORY,
    "24h": Retention.EXTENDED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """What a request says of its prefix; `retention` None = nothing."""

    keys: CacheKeys = field(default_factory=CacheKeys)
    retention: Retention | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing: then only content decides."""
        return self == CacheUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixClaim:
    """Who asks which model, and what its prompt continues. `model_id` is the name that the caller
    uses; `facts` are those of the model, or of the base of an adapter."""

    model_id: str
    facts: ModelFacts
    client: str = ""
    use: CacheUse = field(default_factory=CacheUse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiped:
    """What a node let go of: blocks in memory, files on disk; and whether it keeps any there.

    `kept` are files that could not be removed, and why: the next start finds what is in them.
    """

    blocks: int = 0
    files: int = 0
    kept: tuple[str, ...] = ()
    has_disk: bool = False


class Precache(Protocol):
    """What a node keeps of prefixes."""

    def kv_key(self, claim: PrefixClaim) -> str:
        """Name the KV that a generation continues and leaves; "" = none, content decides."""
        ...

    def turn_ended(self, claim: PrefixClaim, tokens: TokenSource) -> None:
        """Have the beginning of the next request warm, when there is time."""
        ...

    async def warm(
        self, claim: PrefixClaim, tokens: TokenSource, *, is_pinned: bool = False
    ) -> WarmReport:
        """Have a prefix warm, and say what became of it."""
        ...

    async def wipe(self) -> Wiped:
        """Let go of all KV that is kept of prefixes, wherever it lies."""
        ...


class NoPrecache:
    """A node that keeps nothing of prefixes."""

    def kv_key(self, claim: PrefixClaim) -> str:
        """None."""
        return ""

    def turn_ended(self, claim: PrefixClaim, tokens: TokenSource) -> None:
        """Nothing is warmed."""

    async def warm(
        self, claim: PrefixClaim, tokens: TokenSource, *, is_pinned: bool = False
    ) -> WarmReport:
        """Nothing is warmed."""
        return WarmReport(outcome=WarmOutcome.AWAY, reason="this node keeps no prefixes")

    async def wipe(self) -> Wiped:
        """There is nothing."""
        return Wiped()


async def facts_at_hand(model: ServedModel) -> ModelFacts | WarmReport:
    """What is known of a model that is in memory; a report for one that is not, which is not
    loaded for a prefix."""
    if model.state is not ModelState.READY:
        reason = f"model {model.model_id} is {model.state.value}; its first request computes it"
        return WarmReport(outcome=WarmOutcome.AWAY, reason=reason)
    try:
        return await model.ready(AT_HAND_S)
    except PeerUnavailable as gone:
        return WarmReport(outcome=WarmOutcome.AWAY, reason=gone.message)


def warmed_for(use: CacheUse, *, is_pinned: bool) -> Retention:
    """For how long what is warmed ahead is of use: pinned for a day where nothing is said."""
    return use.retention or (Retention.EXTENDED if is_pinned else Retention.SHORT)


def read_retention(word: str, param: str) -> Retention:
    """Read in_memory, short, long or extended, or OpenAI's other words. Raises InvalidArgument."""
    try:
        return _RETENTIONS[word]
    except KeyError:
        raise InvalidArgument(
            f"{param} is {word[:40]!r}; it must be one of {', '.join(_RETENTIONS)}", param=param
        ) from None


def read_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> CacheUse:
    """Read what a gRPC call says of its prefix. Raises InvalidArgument for no retention."""
    said = {key: value for key, value in metadata if isinstance(value, str)}
    return CacheUse(
        keys=CacheKeys(
            conversation_id=said.get(CONVERSATION, ""),
            segment_hash=said.get(SEGMENTS, ""),
            prefix_hash=said.get(PREFIX, ""),
            prompt_cache_key=said.get(CACHE_KEY, ""),
        ),
        retention=read_retention(said[RETENTION], RETENTION) if said.get(RETENTION) else None,
    )


Tokens = Sequence[int]
"""Marked with the cuts of the text (`cuts`); the last one is computed by the request that comes."""


TokenSource = Callable[[], Awaitable[Tokens]]
"""Renders a prefix when its turn has come, on the event loop. Raises KakeyaError."""


class WarmOutcome(StrEnum):
    """What became of a prefix."""

    WARM = "warm"
    FAILED = "failed"
    PRESSURE = "skipped_pressure"
    """Memory is short on this machine."""
    NO_ROOM = "skipped_room"
    """It would have to take the place of something else."""
    AWAY = "skipped_away"
    """The model is not in memory."""
    LATE = "skipped_late"
    """Requests left it too little time."""
    CROWDED = "skipped_queue"
    """Too many others wait already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """Tokens of a prefix: all of them, those that were there already, those computed now."""

    tokens: int = 0
    cached: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReport:
    """What became of a prefix, and why it was not done, in a sentence. `is_pinned`: nothing takes
    its place from now on."""

    outcome: WarmOutcome
    warmed: Warmed = Warmed()
    is_pinned: bool = False
    reason: str = ""
