"""A loaded and probed model, as the engine sees it.

The probe runs on the model itself, right after loading: how large a prefill chunk stays under
the time in which a cancellation must be noticed, the time of a pipelined plain step, and that of a
forward by its rows. The controller starts from these costs and corrects them as it goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import cast

import mlx.core as mx

from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.core.process import trim_heap
from kakeya.decoding.draft.proposer import Draft
from kakeya.engine.model import (
    CHUNK_LIMIT_S,
    KEPT_BUFFER_BYTES,
    LoadedFacts,
    MemoryUse,
    SequenceState,
)
from kakeya.mlx.batch.batch import BATCH_ROWS, hand_over, launch_together, uses_slabs, why_by_turns
from kakeya.mlx.batch.places import PlaceAssignment
from kakeya.mlx.batch.shared_prefix_probe import shares_from
from kakeya.mlx.drafts import Drafter
from kakeya.mlx.kv import layers as kv_layers
from kakeya.mlx.kv.blocks import KvBlocks, plan_blocks
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.lora import AdapterSlots
from kakeya.mlx.numerics.grid import Grid, exactness, is_row_exact, nominal_grid
from kakeya.mlx.verifier import MlxVerifier

_log = logging.getLogger(__name__)
_CHUNKS = (32, 64, 128, 256)
_DEEP_TOKENS = 4096
"""Prefill is timed a second time behind so much context: attention slows it with the length."""
_PROBE_LIMIT_S = 2.0
_BLOCK_ROWS = (2, 3, 5, 9, 17)
_PLAIN_STEPS = 24
_LEAST_STEPS = 3
"""Least steps that are timed: with a cost of 0 for a step every draft would be a loss."""
_REPEATS = 3


class MlxModel:
    """Implements `engine.model.Model`; every method runs on the thread that loaded it."""

    def __init__(self, loaded: LoadedModel, load_s: float, blas_accelerated: bool) -> None:
        self._loaded = loaded
        mx.set_cache_limit(KEPT_BUFFER_BYTES)
        hand_over(loaded.network)
        probe = _Probe(loaded)
        self._blocks = blocks = _blocks(loaded)
        grid: Grid = ()
        chunk_tokens = probe.chunk_tokens
        if blocks is not None:
            chunk_tokens = min(chunk_tokens, blocks.block_tokens)
            if not is_row_exact(loaded, blocks):
                grid = nominal_grid(loaded, blocks)
                chunk_tokens = grid[0][1]
        batch_rows, self._assignment = _sharing(loaded)
        self._facts = LoadedFacts(
            model_id=loaded.model_id,
            model_path=str(loaded.path),
            vocab_size=probe.vocab_size,
            context_tokens=loaded.context_tokens,
            eos_token_ids=loaded.eos_token_ids,
            quantization=loaded.quantization,
            dtype=loaded.dtype,
            weight_bytes=loaded.weight_bytes,
            kv_bytes_per_token=probe.kv_bytes_per_token,
            kv_windows=probe.kv_windows,
            sequence_state_bytes=probe.state_bytes,
            mlx_version=version("mlx"),
            tokens_per_second=1 / probe.costs[1],
            prefill_tokens_per_second=probe.prefill_tokens_per_second,
            load_s=load_s,
            prefill_chunk_tokens=chunk_tokens,
            prefill_grid=grid,
            vocabulary_digest=loaded.vocabulary_digest,
            device=str(mx.default_device().type).removeprefix("DeviceType."),
            blas_accelerated=blas_accelerated,
            forward_costs_s=probe.costs,
            prefill_context_s=probe.prefill_context_s,
            adapter_slots=loaded.adapters.count if loaded.adapters else 0,
            adapter_rank=loaded.adapters.max_rank if loaded.adapters else 0,
            base_fingerprint=loaded.adapters.base if loaded.adapters else "",
            batch_rows=batch_rows,
            kv_block_tokens=blocks.block_tokens if blocks else 0,
            kv_block_bytes=blocks.block_tokens * blocks.row_bytes if blocks else 0,
            kv_state_bytes=blocks.state_bytes if blocks else 0,
            kv_layout=blocks.layout if blocks else "",
            kv_exactness=exactness(loaded, grid) if blocks else "",
            weights_state=loaded.weights_state,
        )
        # The probe's buffers would count as the model's, and none of them is needed again.
        mx.clear_cache()
        trim_heap()
        self._drafter = Drafter(loaded, chunk_tokens)
        event(
            _log,
            "model probed",
            model=loaded.model_id,
            tokens_per_s=self._facts.tokens_per_second,
            prefill_per_s=self._facts.prefill_tokens_per_second,
            chunk=self._facts.prefill_chunk_tokens,
            last_chunk=self._facts.prefill_chunk_at(loaded.context_tokens),
            batch_rows=self._facts.batch_rows,
            costs_ms={rows: round(cost * 1000, 2) for rows, cost in probe.costs.items()},
        )

    @property
    def facts(self) -> LoadedFacts:
        """Facts of the loaded model."""
        return self._facts

    @property
    def adapters(self) -> AdapterSlots | None:
        """Its slots for adapters; None where it has none."""
        return self._loaded.adapters

    def open(self) -> MlxVerifier:
        """A new, empty sequence."""
        return MlxVerifier(self._loaded, self._blocks)

    def launch_together(
        self, states: Sequence[SequenceState], tokens: Sequence[int | None]
    ) -> None:
        """Start a plain step of each sequence in one forward."""
        rows = cast("Sequence[MlxVerifier]", states)
        launch_together(self._loaded, rows, tokens, self._assignment)

    def draft(
        self, prefix: Sequence[int], size: int, seed: int | None, temperature: float
    ) -> Draft:
        """Draft `size` tokens after `prefix`."""
        return self._drafter.draft(prefix, size, seed, temperature)

    def memory(self) -> MemoryUse:
        """Bytes that mlx holds."""
        return MemoryUse(
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            cache_bytes=mx.get_cache_memory(),
        )

    def tidy(self) -> None:
        """Give buffers that no array uses back to the system."""
        if self._assignment is not None:
            self._assignment.settle()
        mx.clear_cache()

    def limit(self, memory_bytes: int | None, cache_bytes: int | None) -> None:
        """Bound the memory of mlx, and its unused buffers; None = unchanged."""
        if memory_bytes is not None:
            mx.set_memory_limit(memory_bytes)
            if self._assignment is not None:
                self._assignment.limit_bytes = memory_bytes
        if cache_bytes is not None:
            mx.set_cache_limit(cache_bytes)

    def idle_bytes(self) -> int:
        """Bytes of KV kept for drafts of peers, and of slabs beyond caches of their own."""
        spare = self._assignment.spare_bytes() if self._assignment is not None else 0
        return spare + self._drafter.held_bytes

    def shed(self, size: int) -> None:
        """Drop slabs, then KV kept for drafts, oldest first, until `size` bytes are gone."""
        if self._assignment is not None:
            size -= self._assignment.spare_bytes()
            self._assignment.dissolve()
        self._drafter.shed(size)


def _blocks(loaded: LoadedModel) -> KvBlocks | None:
    """The model's blocks of KV; None, with a reason in the log, where it has none."""
    try:
        return plan_blocks(loaded)
    except Exception as refusal:  # noqa: BLE001 - whatever a model does that is not known
        event(
            _log,
            "KV of the model cannot leave this engine",
            level=logging.WARNING,
            model=loaded.model_id,
            reason=refusal.message if isinstance(refusal, KakeyaError) else repr(refusal),
        )
        return None


def _sharing(loaded: LoadedModel) -> tuple[int, PlaceAssignment | None]:
    """The most rows of a shared forward, and the assignment of slabs; None = caches of their own.

    1, with a reason in the log, where sequences take turns.
    """
    reason = ""
    for assignment in (PlaceAssignment(), None) if uses_slabs() else (None,):
        reason = why_by_turns(loaded, assignment)
        if not reason:
            if assignment is not None:
                assignment.shares_from = shares_from(loaded)
            return BATCH_ROWS, assignment
    event(
        _log,
        "sequences take turns",
        level=logging.WARNING,
        model=loaded.model_id,
        reason=reason,
    )
    return 1, None


class _Probe:
    """Timed forwards on made-up ids, longest useful first; the whole takes a second or two."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._ends_at = time.perf_counter() + _PROBE_LIMIT_S
        logits = loaded.forward(mx.array([[0]], dtype=mx.int32), loaded.make_cache())
        mx.eval(logits)
        self.vocab_size = int(logits.shape[-1])
        self.chunk_tokens, self.prefill_tokens_per_second = self._prefill()
        self.prefill_context_s = self._prefill_context_s()
        state = self._warm(64)
        self.kv_bytes_per_token = state.nbytes_per_token()
        self.kv_windows = kv_layers.windows(state.cache)
        self.state_bytes = kv_layers.state_bytes(state.cache)
        self.costs = {1: self._plain(state)}
        for rows in _BLOCK_ROWS:
            if time.perf_counter() > self._ends_at or state.verifiable_rows() < rows:
                break
            self.costs[rows] = self._block(state, rows)

    def _ids(self, count: int) -> list[int]:
        return [(7919 * position) % self.vocab_size for position in range(count)]

    def _warm(self, tokens: int) -> MlxVerifier:
        state = MlxVerifier(self._loaded)
        state.prefill(self._ids(min(tokens, self._loaded.context_tokens // 2)))
        return state

    def _prefill(self) -> tuple[int, float]:
        """The largest chunk that stays under the limit, and tokens per second at it."""
        chosen, rate = _CHUNKS[0], 0.0
        for chunk in _CHUNKS:
            if chunk * 2 > self._loaded.context_tokens:
                break
            self._warm(chunk)
            started = time.perf_counter()
            self._warm(chunk)
            seconds = time.perf_counter() - started
            if seconds > CHUNK_LIMIT_S and rate:
                break
            chosen, rate = chunk, chunk / seconds
            if 2 * seconds > CHUNK_LIMIT_S:
                break
        return chosen, rate

    def _prefill_context_s(self) -> float:
        """Seconds that a token of context adds to a token of prefill; 0 where none does.

        The context is made up, not computed: its content changes no time.
        """
        deep = min(_DEEP_TOKENS, self._loaded.context_tokens - self.chunk_tokens)
        rate, best_s = self.prefill_tokens_per_second, float("inf")
        if deep < self.chunk_tokens or rate <= 0:
            return 0.0
        for _ in range(2):
            state = self._warm(1)
            if not state.pretend(deep):
                return 0.0
            started = time.perf_counter()
            state.prefill(self._ids(self.chunk_tokens))
            best_s = min(best_s, time.perf_counter() - started)
            if best_s > _PROBE_LIMIT_S / 2:
                break
        return max(0.0, best_s / self.chunk_tokens - 1 / rate) / deep

    def _plain(self, state: MlxVerifier) -> float:
        """Seconds of a pipelined plain step; the state ends where it began."""
        before = state.length
        state.launch(0)
        state.launch(None)
        state.collect()
        started = time.perf_counter()
        steps = 0
        while steps < _LEAST_STEPS or (
            steps < _PLAIN_STEPS and time.perf_counter() < self._ends_at
        ):
            state.launch(None)
            state.collect()
            steps += 1
        seconds = (time.perf_counter() - started) / steps
        state.collect()
        state.trim(state.length - before)
        return max(seconds, 1e-6)

    def _block(self, state: MlxVerifier, rows: int) -> float:
        """Best of a few: seconds of a forward over `rows` rows with its tail trimmed."""
        best = float("inf")
        for _ in range(_REPEATS):
            started = time.perf_counter()
            state.verify(self._ids(rows))
            state.trim(rows)
            best = min(best, time.perf_counter() - started)
        return best
