"""The seam between scheduling and arithmetic: a loaded model as the engine uses it.

`kakeya.mlx` implements it; tests of the scheduler use a toy. Every method runs on the one model
thread, and may raise DeviceLost. A state's `length` counts its tokens with KV; between steps it is
`committed - 1` (the last token is pending) or `committed` (its row is in flight already).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kakeya.adapters.files.packed import PackedAdapter
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.processors.processors import LogitProcessors
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import TokenLogprob
from kakeya.generation.request import Sampling

CHUNK_LIMIT_S = 0.15
"""A prefill chunk longer than this would make a cancelled request linger."""
KEPT_BUFFER_BYTES = 256 << 20
"""Bytes of buffers that no array uses, where no other bound is set."""
PART_S = 0.02
"""Beside others a forward over prompts is computed in parts of about so long. Each part waits for
the device once."""
LEAST_CHUNK_TOKENS = 16
"""Below this a forward costs about the same, however few its rows are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFacts(ModelFacts):
    """Facts of a loaded and probed model, with those that only its engine needs."""

    kv_windows: tuple[tuple[int, int], ...] = ()
    """(tokens, bytes of each): of layers that keep only the last so many tokens, beside
    `kv_bytes_per_token`."""
    sequence_state_bytes: int = 0
    """Bytes that a sequence holds at any length: recurrent state."""
    prefill_context_s: float = 0.0
    """Seconds that each token of context adds to each token of prefill: attention over it."""
    prefill_parts: int = 1
    """The most parts that a forward over prompts can be computed in."""
    shares_pieces_from: int = 0
    """The least tokens of a piece that may share a forward with those of others; 0 = none may."""
    states_for: str = ""
    """The drafter, by the name it is served under, whose hidden states are kept; "" = none."""

    def parts_of(self, seconds: float, part_s: float = PART_S) -> int:
        """The parts of a forward that takes so long, each of about `part_s`; 0 = unknown."""
        wanted = round(seconds / part_s) if seconds > 0 else self.prefill_parts
        return max(1, min(self.prefill_parts, wanted))

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of KV of a sequence of this length, as mlx-lm allocates it: in blocks.

        While a chunk is added, a window holds the chunk too.
        """
        rows = -(-min(tokens, self.context_tokens) // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
        return self.kv_bytes_per_token * rows + self.fixed_bytes(rows)

    def fixed_bytes(self, rows: int) -> int:
        """The part of this that stops growing at some length; `rows` are allocated."""
        if rows <= 0:
            return 0
        chunk = self.prefill_chunk_tokens
        windows = sum(each * min(rows, tokens + chunk) for tokens, each in self.kv_windows)
        return windows + self.sequence_state_bytes

    def prefill_chunk_at(self, length: int) -> int:
        """Tokens of the prefill chunk behind a context of `length`, so that it stays within time.

        A whole power of two, at most `prefill_chunk_tokens`, fixed for the life of the engine:
        equal histories are computed in equal pieces, and give equal KV. No piece lies in two
        blocks.
        """
        if self.prefill_grid:
            return next(chunk for start, chunk in reversed(self.prefill_grid) if start <= length)
        chunk, rate = self.prefill_chunk_tokens, self.prefill_tokens_per_second
        if self.kv_block_tokens:
            chunk = min(chunk, self.kv_block_tokens)
        token_s = (1 / rate if rate > 0 else 0.0) + self.prefill_context_s * length
        while chunk >= 2 * LEAST_CHUNK_TOKENS and chunk * token_s > CHUNK_LIMIT_S:
            chunk //= 2
        return chunk


class DeviceLost(BaseException):
    """The device failed in the middle of its work: any KV of this process may be wrong.

    The process ends and keeps none of it, so that no handler of a generation's faults may take it.
    """


@dataclass(frozen=True, slots=True)
class KvView:
    """The bytes of a block that has room for `tokens` positions, and behind them for state."""

    data: memoryview
    tokens: int
    has_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that the model's framework holds, weights included.

    `cache_bytes` are buffers that no array uses; they are not among the active ones.
    """

    active_bytes: int
    peak_bytes: int
    cache_bytes: int = 0


class SequenceState(Protocol):
    """The KV of one sequence and the rows in flight on it."""

    grid_tokens: int
    """The count of first tokens with the very KV that prefill on the grid gives. The caller of
    `prefill`, which knows the grid, keeps it."""

    @property
    def length(self) -> int:
        """Tokens with KV, rows in flight included."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of KV."""
        ...

    def select_with(
        self,
        sampling: Sampling,
        processors: LogitProcessors | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        """Choose tokens this way from now on, and keep log probabilities, as a request asks.

        The caller extends `processors` by each token that it commits. A step that is launched, or
        logits that are given, get the edit of the next position; a block those behind its tokens.
        """
        ...

    def adapt(self, slot: int) -> None:
        """Compute with the adapter in this slot from now on; 0 = with none."""
        ...

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens and wait until their KV is computed."""
        ...

    def launch(self, token: int | None, *, keeps_logits: bool = False) -> None:
        """Start a plain step on `token`; None = on the token that the step before it will select.

        `keeps_logits`: `take_logits` is going to ask for those of this step.
        """
        ...

    def take_logits(self) -> bytes:
        """The logits of the step that was launched to keep them and is collected, once: float32,
        little-endian; b"" = there are none. Shape: [V]."""
        ...

    def selected_from(self, logits: bytes) -> int:
        """The token that a step with these logits (of `take_logits`) selects next; nothing is
        computed but the choice."""
        ...

    def take_logprobs(self, count: int) -> list[TokenLogprob]:
        """Those of the first `count` tokens that were selected and read since the last call, in
        order; the others are forgotten. Empty where none are kept."""
        ...

    def collect(self) -> int:
        """Wait for the oldest launched step; return the token that it selected."""
        ...

    def in_flight(self) -> int:
        """Steps launched and not collected."""
        ...

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Append `tokens` in one forward; return the token selected after each of them."""
        ...

    def verifiable_rows(self) -> int:
        """The most rows to append of which any tail can be trimmed again."""
        ...

    def trim(self, count: int) -> bool:
        """Drop the KV of the last `count` tokens; False, and nothing changed, where it can't."""
        ...

    def export_block(self, first: int, tokens: int, into: KvView, *, with_state: bool) -> bool:
        """Copy the KV of tokens to their places in the block that they lie in; detached from it.

        With state, which is that behind the newest token. False where a layer no longer holds
        them. Raises InvalidArgument when the block is too short.
        """
        ...

    def import_blocks(self, blocks: Sequence[KvView], tokens: int) -> None:
        """Hold the KV of so many tokens, as these blocks have it; for an empty state.

        A block is copied before this returns. Raises InvalidArgument when they do not hold that;
        nothing is changed then.
        """
        ...

    def stow(self, blocks: Sequence[KvView]) -> bool:
        """Copy all KV into these blocks, the rest and the state into the last one, and hold none.

        `length` and rows in flight stay. `restore` has to come before anything else.

        False, and nothing changed, where the model's KV has no blocks.
        """
        ...

    def restore(self, blocks: Sequence[KvView]) -> None:
        """Hold the KV again that was stowed in these blocks."""
        ...

    def hidden_states(self, first: int, end: int) -> HiddenStates | None:
        """Those of the tokens `first` to `end`, the newest that there are; None = none.

        Only a model that `states_for` names a drafter of keeps them.
        """
        ...

    def layer_length(self) -> int:
        """The length that the cache layers themselves have; the check on the bookkeeping."""
        ...


class PromptForward(Protocol):
    """The next piece of the prompt of one sequence, or of several, in one forward.

    The sequences are as before until the last part is computed. One that is stowed, trimmed or
    dropped meanwhile has to leave first.
    """

    @property
    def parts(self) -> int:
        """Parts that are left."""
        ...

    def advance(self) -> bool:
        """Compute the next part; whether it was the last one, and all KV is appended."""
        ...

    def leave(self, state: SequenceState) -> None:
        """Append nothing to this sequence."""
        ...


class AdapterBank(Protocol):
    """Slots for adapters beside a model's weights, 1 to `slots`, which grow to `count`."""

    @property
    def count(self) -> int:
        """The most adapters at the same time."""
        ...

    @property
    def slots(self) -> int:
        """Slots that there are by now; 0 before the first adapter."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not; they grow and never shrink."""
        ...

    def missing_bytes(self, adapter: PackedAdapter, slots: int) -> int:
        """Bytes to allocate for this adapter and so many slots. Raises InvalidArgument if it does
        not fit."""
        ...

    def grow(self, slots: int) -> None:
        """Have so many slots; those that are there keep their adapters."""
        ...

    def load(self, slot: int, adapter: PackedAdapter) -> None:
        """Fill a slot. Raises InvalidArgument if it does not fit the model."""
        ...


class Model(Protocol):
    """A loaded model."""

    @property
    def adapters(self) -> AdapterBank | None:
        """Its slots for adapters; None where it has none."""
        ...

    @property
    def facts(self) -> LoadedFacts:
        """Facts of the loaded model."""
        ...

    def open(self) -> SequenceState:
        """A new, empty sequence."""
        ...

    def begin_prompts(
        self, states: Sequence[SequenceState], pieces: Sequence[Sequence[int]], parts: int
    ) -> PromptForward:
        """Begin to append a piece to each sequence, in about so many parts.

        Several of them have at least `facts.shares_pieces_from` tokens each.
        """
        ...

    def launch_together(
        self, states: Sequence[SequenceState], tokens: Sequence[int | None]
    ) -> None:
        """Start a plain step of each sequence in one forward; as `launch` for each of them.

        For 2 to `facts.batch_rows` sequences. When it raises, they are as before.
        """
        ...

    def draft(
        self,
        prefix: Sequence[int],
        size: int,
        seed: int | None,
        temperature: float,
        steps: int = 1,
        states: HiddenStates | None = None,
    ) -> Draft:
        """Draft `size` tokens after `prefix`, greedy or with the verifier's own noise; a model that
        refines its drafts does so `steps` times, and one that reads hidden states gets them."""
        ...

    def chores(self) -> Iterator[float]:
        """Checks and measurements, a slice for each `next`; they may change `facts`.

        Yields before each slice how many seconds the engine must have been idle for it; 0 = a check
        that sequences wait for which could share forwards.
        """
        ...

    def memory(self) -> MemoryUse:
        """Bytes held now."""
        ...

    def tidy(self) -> None:
        """Give buffers that are no longer needed back; called now and then between steps."""
        ...

    def limit(self, memory_bytes: int | None, cache_bytes: int | None) -> None:
        """Bound the memory of the framework, and its unused buffers; None = unchanged."""
        ...

    def idle_bytes(self) -> int:
        """Bytes of KV of drafts for peers, and of other active parts that can be computed again."""
        ...

    def shed(self, size: int) -> None:
        """Drop of that, oldest first, until `size` bytes are gone or nothing is left."""
        ...
