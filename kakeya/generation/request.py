"""What a generation is asked with and answers with, and the seam to whoever runs the model.

RuntimeService and the HTTP gateway speak to models through `ServedModel`; an engine child behind
a unix socket implements it. Token ids only: text and templates live above.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Literal, Protocol

from kakeya.generation.kv import KvExchange
from kakeya.generation.retention import Retention


class StopReason(StrEnum):
    """Why a generation ended by itself."""

    MAX_TOKENS = "max_tokens"
    STOP_TOKEN = "stop_token"
    CONTEXT_FULL = "context_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is selected. Temperature 0 is greedy; the seed then has no effect.

    The same seed gives the same tokens with or without drafts and after a failover, because noise
    is keyed by (seed, position). `top_p` 1 and `top_k` 0 keep the whole vocabulary.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """Where drafts may come from: in the engine itself, or a peer's ProposerService.

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


class Priority(IntEnum):
    """How urgent a generation is; a more urgent one goes first, and may interrupt a less urgent."""

    URGENT = 0
    NORMAL = 1
    BATCH = 2
    SPECULATIVE = 3
    """Nobody waits for it: prefixes that are warmed ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """One generation: the whole history, where to stop, how to select, where to get drafts.

    `kv_key` names the KV to continue from and to keep afterwards; "" keeps nothing. `adapter_id`
    names a loaded adapter; "" is the model alone. `deadline_s` is how long the caller waits for the
    first token, None = it did not say, or has it: a model that takes longer to load is refused at
    once. With `max_tokens` 0 the history is only prefilled, all but its last token, for `kv`, which
    carries blocks of KV between the node's pages and its engine. `client` is who asks, for fair
    shares, and `user` for which of its users; a smaller `priority` is more urgent. `frame_s` is how
    long tokens may wait for others to travel with, the first ones and the last excepted; 0 = as the
    engine likes. `cuts` are places of the history at which others are likely to part from it, in
    order: its KV can be taken up there (`kakeya.generation.cuts`). Blocks are kept for
    `kv_retention`.
    """

    token_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: Sampling = Sampling()
    draft_sources: tuple[DraftSource, ...] = ()
    kv_key: str = ""
    adapter_id: str = ""
    deadline_s: float | None = None
    client: str = ""
    user: str = ""
    priority: Priority = Priority.NORMAL
    frame_s: float = 0.0
    kv: KvExchange | None = None
    cuts: tuple[int, ...] = ()
    kv_retention: Retention = Retention.LONG

    def after(self, elapsed_s: float) -> DecodeRequest:
        """The same request so much later: what is left of its deadline."""
        if self.deadline_s is None:
            return self
        return replace(self, deadline_s=max(0.0, self.deadline_s - elapsed_s))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A loaded model, as its engine describes it."""

    model_id: str
    model_path: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    quantization: str = ""
    dtype: str = ""
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_fixed_bytes: int = 0
    mlx_version: str = ""
    tokens_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0
    load_s: float = 0.0
    prefill_chunk_tokens: int = 0
    vocabulary_digest: str = ""
    device: str = ""
    blas_accelerated: bool = False
    adapter_slots: int = 0
    adapter_rank: int = 0
    base_fingerprint: str = ""
    batch_rows: int = 1
    kv_block_tokens: int = 0
    kv_block_bytes: int = 0
    kv_state_bytes: int = 0
    kv_layout: str = ""
    kv_exactness: str = ""
    weights_state: str = ""
    prefill_grid: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What an engine child occupies now, in bytes; `resident_bytes` includes the others.

    `mlx_cache_bytes` are buffers that no array uses, `idle_kv_bytes` KV that no generation uses:
    both can be given back. `limit_bytes` is the bound that was set, 0 = none.
    """

    resident_bytes: int
    mlx_active_bytes: int = 0
    mlx_cache_bytes: int = 0
    idle_kv_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Live numbers of an engine child."""

    kv_live_bytes: int = 0
    kv_entries: int = 0
    running: int = 0
    waiting: int = 0
    mlx_active_bytes: int = 0
    mlx_peak_bytes: int = 0
    resident_bytes: int = 0
    cache_length_violations: int = 0
    position_violations: int = 0
    kv_bytes_by_key: dict[str, int] = field(default_factory=dict)
    footprint: Footprint | None = None
    adapter_ids: tuple[str, ...] = ()
    batch_rows: int = 0
    """Rows of the last forward over several sequences; 0 = there was none yet, 1 = it failed, and
    they take turns for a while."""


class ModelState(StrEnum):
    """The life of a served model. An unloaded one is not in memory; its next request loads it."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    UNLOADED = "unloaded"
    FAILED = "failed"
    STOPPED = "stopped"


class ServedModel(Protocol):
    """One model of this node, whoever runs it."""

    @property
    def model_id(self) -> str:
        """The name that callers use."""
        ...

    @property
    def state(self) -> ModelState:
        """Where it is in its life now."""
        ...

    @property
    def last_error(self) -> str:
        """Why it is FAILED or RESTARTING, in one sentence; "" otherwise."""
        ...

    async def ready(self, timeout_s: float) -> ModelFacts:
        """Wait until it serves. Raises PeerUnavailable (with retry_after_s) when it will not."""
        ...

    def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        """Stream frames; exactly one Done, last. Closing the iterator stops the work in one step.

        A stop token is committed: it is the last token of the stream that it ends.

        Survives the death of the engine: decoding goes on in the restarted one from the tokens
        committed so far. Raises PeerUnavailable when it cannot be restarted in time.
        """
        ...

    async def release(self, kv_key: str) -> None:
        """Forget the KV kept under a key; unknown keys and dead engines are fine."""
        ...

    async def stats(self) -> EngineStats:
        """Live numbers; zeros while the engine is not up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedId:
    """A model that is another one, its parent, with an adapter; both by the names callers use."""

    model_id: str
    parent: str


class ModelDirectory(Protocol):
    """The models of this node by name."""

    def get(self, model_id: str, client: str = "") -> ServedModel:
        """Find a model that decodes; "" is the default, BASE:NAME a model with an adapter.

        `client` is who asks, "" = nobody in particular. Raises NotFound naming the served ids, and
        Denied for an adapter of another client.
        """
        ...

    def adapted(self, client: str = "") -> tuple[AdaptedId, ...]:
        """The models with adapters that a client may name."""
        ...

    def verifiers(self) -> tuple[ServedModel, ...]:
        """Every model that decodes, the default first."""
        ...


class DraftRouter(Protocol):
    """Who may draft for a model, by the placement of this moment."""

    def sources(self, facts: ModelFacts, policy: str) -> tuple[DraftSource, ...]:
        """Best first. Policies: "" or "auto", "off", "ngram", "peer", MODEL_ID@HOST:PORT.

        Raises InvalidArgument for any other policy.
        """
        ...
