"""Facts of a loaded model, and the live numbers and the state of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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
    longest_tokens: int = 0
    """The longest sequence for which there can ever be memory; at most `context_tokens`."""
    mlx_version: str = ""
    tokens_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0
    forward_costs_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of one forward by its rows; 1 is the pipelined plain step. {} = not measured."""
    load_s: float = 0.0
    prefill_chunk_tokens: int = 0
    vocabulary_digest: str = ""
    device: str = ""
    blas_accelerated: bool = False
    adapter_slots: int = 0
    adapter_rank: int = 0
    base_fingerprint: str = ""
    batch_rows: int = 1
    """How many sequences share one forward."""
    kv_block_tokens: int = 0
    """Tokens of a block of KV that another engine can take; 0 = this model's KV cannot."""
    kv_block_bytes: int = 0
    kv_state_bytes: int = 0
    """Of the recurrent state that may lie behind a block; 0 = the model has none."""
    kv_layout: str = ""
    """Meaning of a block's bytes, as canonical JSON; equal only for blocks of the same kind."""
    kv_exactness: str = ""
    """The other conditions for blocks of the very same bits, as canonical JSON."""
    weights_state: str = ""
    """Of the files that the weights were read from; "" = not known."""
    vector_size: int = 0
    """Of an encoder, the length of its vectors; 0 = the model decodes."""
    nested_sizes: tuple[int, ...] = ()
    """Shorter lengths that an encoder was trained for, at which its vectors may be cut off; 0 among
    them = any."""
    working_set_bytes: int = 0
    """The bytes that the GPU's driver lets one process keep; 0 = no GPU computes."""
    prefill_grid: tuple[tuple[int, int], ...] = ()
    """(position, tokens): from each position on, a prompt is computed in pieces of so many tokens,
    at any measured speed; positions rise from 0, each at the beginning of a block. () = the bits of
    KV do not depend on the pieces, which are cut as the measurements say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes that an engine child occupies; `resident_bytes` includes the other fields.

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
    """Rows of the last forward over several sequences; 0 = there was none yet, 1 = the forward
    failed, and the sequences take turns for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """The requests that a model has at this moment: the tokens so far of each answer that decodes,
    the requests that wait for their first token, and what is left to compute of their prompts.

    `prompts_per_s` is how many came lately, and `busy_share` the share of the time with a prompt to
    compute, 0..1.
    """

    answers: tuple[int, ...] = ()
    waiting: int = 0
    waiting_tokens: int = 0
    prompts_per_s: float = 0.0
    busy_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsAlike:
    """What the requests of a model at this moment have in common with a prompt: `requests` have
    most of it, and those that go first will leave the KV of its first `tokens`."""

    requests: int = 0
    tokens: int = 0


class ModelState(StrEnum):
    """The life of a served model. An unloaded one is not in memory; its next request loads it."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    UNLOADED = "unloaded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelState:
    """State of a draft-only model."""

    model_id: str
    state: ModelState
    last_error: str = ""
