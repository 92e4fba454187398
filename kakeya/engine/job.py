"""A generation as the engine is asked for it, and the frames that it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.draft.decoder import FinishReason
from kakeya.decoding.draft.sampling import SamplingParams
from kakeya.generation.kv import KvPages
from kakeya.prefix.names.endings import LOGIT_BYTES

NORMAL_PRIORITY = 1
"""0 urgent, 1 normal, 2 batch, 3 speculative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """Where drafts may come from: the n-gram index of the sequence, or a peer's proposer.

    `server_name` is what the peer's certificate must carry; "" = a plain connection.
    """

    kind: Literal["ngram", "remote"]
    address: str = ""
    model_id: str = ""
    extended: bool = False
    server_name: str = ""

    @property
    def name(self) -> str:
        """`ngram`, or MODEL@HOST:PORT."""
        return "ngram" if self.kind == "ngram" else f"{self.model_id}@{self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """One generation; `kv_key` names the KV to continue from and to keep, "" keeps none.

    `adapter_id` names a loaded adapter, "" is the model alone. With `max_tokens` 0 the history is
    only prefilled, all but its last token. `kv_blocks` hold the KV of its first blocks and stay
    pinned until the first frame; `kv_exports` are to be filled with what is computed. `cuts` are
    places at which pieces of prefill end beside the grid. `park_id` names it to who may lend pages
    for its KV while it is set aside, 0 = nobody does. `client` is who asks, for fair shares, and
    `user` for which of its users; a smaller `priority` is more urgent. `logits` are those behind
    the history as a LogitsFrame gave them, b"" = not known; `wants_logits`: such a frame is wanted.
    """

    token_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    sources: tuple[SourceSpec, ...] = ()
    kv_key: str = ""
    adapter_id: str = ""
    kv_blocks: tuple[KvPages, ...] = ()
    kv_exports: tuple[KvPages, ...] = ()
    cuts: tuple[int, ...] = ()
    park_id: int = 0
    client: str = ""
    user: str = ""
    priority: int = NORMAL_PRIORITY
    deadline_s: float | None = None
    logits: bytes = b""
    wants_logits: bool = False

    def check(self, vocab_size: int, context_tokens: int) -> None:
        """Refuse what a model of these bounds cannot take; raises InvalidArgument."""
        if not self.token_ids:
            raise InvalidArgument("the history is empty; give at least one token")
        if self.max_tokens < 0:
            raise InvalidArgument(f"max_tokens is {self.max_tokens}; 0 = only prefill")
        if len(self.token_ids) >= context_tokens:
            raise InvalidArgument(
                f"the history has {len(self.token_ids)} tokens, the model's context is "
                f"{context_tokens}; leave room for at least one new token"
            )
        largest = max(self.token_ids)
        if largest >= vocab_size or min(self.token_ids) < 0:
            raise InvalidArgument(f"token id {largest} is outside the vocabulary of {vocab_size}")
        if len(self.logits) not in (0, LOGIT_BYTES * vocab_size):
            raise InvalidArgument(
                f"the logits have {len(self.logits)} bytes, those of a vocabulary of {vocab_size} "
                f"have {LOGIT_BYTES * vocab_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFrame:
    """How many tokens of KV were taken from the blocks that were given."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFrame:
    """A block that lies whole in the pages given for it; `tokens` as these said, 0 = a block."""

    index: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkFrame:
    """Pages of these lengths are wanted for KV that has to go; none = no longer. `number` counts
    what the generation asked for."""

    lengths: tuple[int, ...]
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFrame:
    """Prompt tokens computed so far, the cached ones that were there before included."""

    computed_tokens: int
    total_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensFrame:
    """What one step committed."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsFrame:
    """The logits behind the history, the same each time: float32, little-endian. Shape: [V]."""

    logits: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneFrame:
    """The end of a generation; counts are tokens unless said.

    `forwards` are those of decoding, plain steps and blocks; prefill is not among them.
    """

    reason: FinishReason
    prefill_s: float
    total_s: float
    cached_tokens: int
    forwards: int
    drafted: int
    verified: int
    accepted: int
    sources: tuple[SourceTally, ...] = ()


@dataclass(slots=True, kw_only=True)
class SourceTally:
    """What one draft source did during one generation."""

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
    wait_s: float = 0.0


EngineFrame = (
    ImportedFrame | ExportedFrame | ParkFrame | PrefillFrame | TokensFrame | LogitsFrame | DoneFrame
)
