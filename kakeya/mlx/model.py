"""A loaded model, as the engine sees it.

It serves as soon as its weights are there and their KV has a layout. Checks and measurements that
take longer are chores, done in slices: whether sequences may share forwards, and how long forwards
take. An engine begins with the findings of an earlier load where there are some. Bits of KV depend
on no measurement of the same load, only on shapes and on findings that were there at its start.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import cast

import mlx.core as mx

from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.core.process import trim_heap
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.engine.model import (
    CHUNK_LIMIT_S,
    KEPT_BUFFER_BYTES,
    LoadedFacts,
    MemoryUse,
    PromptForward,
    SequenceState,
)
from kakeya.fleet.placement.ring import RingSplit
from kakeya.mlx.batch.batch import BATCH_ROWS, at_once, hand_over, launch_together
from kakeya.mlx.batch.places import PlaceAssignment
from kakeya.mlx.batch.prompts import LayeredForward, WholePiece, can_split
from kakeya.mlx.batch.shared_prefix_probe import sharing_check
from kakeya.mlx.device import ends_with_device, working_set_bytes
from kakeya.mlx.drafts import Drafter
from kakeya.mlx.findings import Findings, FindingsFile, Speeds
from kakeya.mlx.kv import layers as kv_layers
from kakeya.mlx.kv.blocks import KvBlocks, plan_blocks
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.lora import AdapterSlots
from kakeya.mlx.numerics.grid import Grid, exactness, is_row_exact, nominal_grid
from kakeya.mlx.probe import SpeedProbe
from kakeya.mlx.verifier import MlxVerifier

_log = logging.getLogger(__name__)
_UNKNOWN_CHUNK_TOKENS = 64
"""Of a model without blocks, before pieces were timed."""
_CHECKED_AT_ONCE_BYTES = 64 << 20
"""Smaller models are checked in less time than the start of their engine takes."""


@ends_with_device
class MlxModel:
    """Implements `engine.model.Model`; every method runs on the thread that loaded it."""

    def __init__(
        self,
        loaded: LoadedModel,
        load_s: float,
        blas_accelerated: bool,
        *,
        findings: Path | None = None,
    ) -> None:
        """Findings are kept in a folder; None = nowhere."""
        self._loaded = loaded
        mx.set_cache_limit(KEPT_BUFFER_BYTES)
        hand_over(loaded.network)
        self._file = FindingsFile(findings, loaded)
        self._found = self._file.read()
        self._blocks = None
        if loaded.ring is None:  # a block would hold the KV of one rank
            self._blocks = _blocks(loaded, is_tried=self._found.are_blocks_tried)
        self._assignment: PlaceAssignment | None = None
        self._memory_bytes: int | None = None
        self._facts = self._first_facts(load_s, blas_accelerated)
        self._apply(self._found)
        if self._blocks is not None and not self._found.are_blocks_tried:
            self._find(replace(self._found, are_blocks_tried=True))
        is_small = loaded.weight_bytes <= _CHECKED_AT_ONCE_BYTES
        # All ranks of a ring check at the same time, which is now.
        if self._found.sharing is None and (is_small or loaded.ring is not None):
            at_once(self._check())
        self._tidy_up()
        self._drafter = Drafter(loaded, self._facts.prefill_chunk_tokens)
        event(
            _log,
            "model loaded",
            model=loaded.model_id,
            chunk=self._facts.prefill_chunk_tokens,
            last_chunk=self._facts.prefill_chunk_at(loaded.context_tokens),
            seconds=load_s,
        )

    def _first_facts(self, load_s: float, blas_accelerated: bool) -> LoadedFacts:
        """Facts that need no measurement."""
        loaded, blocks = self._loaded, self._blocks
        state = MlxVerifier(loaded)
        logits = state.step(mx.array([0], dtype=mx.int32))
        mx.eval(logits)
        grid: Grid = ()
        chunk_tokens = _UNKNOWN_CHUNK_TOKENS
        if blocks is not None:
            nominal = nominal_grid(loaded, blocks)
            chunk_tokens = nominal[0][1]
            grid = () if is_row_exact(loaded, blocks) else nominal
        if not grid:
            chunk_tokens = _timed_chunk(self._found.speeds, chunk_tokens, blocks)
        # Only a piece alone, in one part, tells its hidden states.
        parts = len(state.cache) if can_split(loaded) and loaded.tap is None else 1
        if loaded.ring is not None and loaded.ring.split is RingSplit.PIPELINE:
            parts = 1  # ranks have other numbers of layers
        return LoadedFacts(
            model_id=loaded.model_id,
            model_path=str(loaded.path),
            vocab_size=int(logits.shape[-1]),
            context_tokens=loaded.context_tokens,
            eos_token_ids=loaded.eos_token_ids,
            quantization=loaded.quantization,
            dtype=loaded.dtype,
            weight_bytes=loaded.weight_bytes,
            kv_bytes_per_token=state.nbytes_per_token(),
            kv_windows=kv_layers.windows(state.cache),
            sequence_state_bytes=kv_layers.state_bytes(state.cache),
            mlx_version=version("mlx"),
            load_s=load_s,
            prefill_chunk_tokens=chunk_tokens,
            prefill_grid=grid,
            vocabulary_digest=loaded.vocabulary_digest,
            device=str(mx.default_device().type).removeprefix("DeviceType."),
            blas_accelerated=blas_accelerated,
            adapter_slots=loaded.adapters.count if loaded.adapters else 0,
            adapter_rank=loaded.adapters.max_rank if loaded.adapters else 0,
            base_fingerprint=loaded.fingerprint,
            prefill_parts=parts,
            states_for=loaded.tap.drafter_id if loaded.tap else "",
            kv_block_tokens=blocks.block_tokens if blocks else 0,
            kv_block_bytes=blocks.block_tokens * blocks.row_bytes if blocks else 0,
            kv_state_bytes=blocks.state_bytes if blocks else 0,
            kv_layout=blocks.layout if blocks else "",
            kv_exactness=exactness(loaded, grid) if blocks else "",
            weights_state=loaded.weights_state,
            working_set_bytes=working_set_bytes(),
        )

    def _apply(self, found: Findings) -> None:
        """Go by these findings from now on."""
        self._found = found
        speeds, facts = found.speeds, self._facts
        sharing = found.sharing
        if sharing is not None and sharing.in_slabs and self._assignment is None:
            self._assignment = PlaceAssignment()
            self._assignment.limit_bytes = self._memory_bytes
            self._assignment.shares_from = sharing.prefix_from
        self._facts = replace(
            facts,
            batch_rows=BATCH_ROWS if sharing is not None and not sharing.turns_reason else 1,
            shares_pieces_from=sharing.pieces_from if sharing and not self._loaded.tap else 0,
            forward_costs_s=speeds.forwards_s,
            tokens_per_second=speeds.tokens_per_second,
            prefill_tokens_per_second=speeds.prefill_tokens_per_second(facts.prefill_chunk_tokens),
            prefill_context_s=speeds.context_s,
        )

    def chores(self) -> Iterator[float]:
        """Checks and measurements that are missing, a slice for each `next`."""
        if self._found.sharing is None:
            for _ in self._check():
                yield 0.0
        if self._found.speeds.forwards_s and self._found.speeds.pieces_s:
            return
        probe = SpeedProbe(
            self._loaded,
            self._facts.vocab_size,
            known=self._found.speeds,
            opened=self.open,
            has_room=self._has_room,
        )
        event(_log, "speed is measured while no request waits", model=self._loaded.model_id)
        for pause_s in probe.slices():
            self._learn(probe.speeds)
            yield pause_s
        self._learn(probe.speeds)
        if not probe.speeds.forwards_s:
            event(_log, "speed not measured: never quiet enough", model=self._loaded.model_id)
        self._tidy_up()

    def _check(self) -> Generator[None, None, None]:
        """Find out whether sequences may share forwards, and read a shared prefix once."""
        sharing = yield from sharing_check(self._loaded)
        self._find(replace(self._found, sharing=sharing))
        if sharing.turns_reason:
            event(
                _log,
                "sequences take turns",
                level=logging.WARNING,
                model=self._loaded.model_id,
                reason=sharing.turns_reason,
            )

    def _learn(self, speeds: Speeds) -> None:
        """Take new measurements; those of pieces choose none before the next load."""
        if speeds == self._found.speeds:
            return
        self._find(replace(self._found, speeds=speeds))
        event(
            _log,
            "speed measured",
            model=self._loaded.model_id,
            tokens_per_s=self._facts.tokens_per_second or "-",
            prefill_per_s=self._facts.prefill_tokens_per_second or "-",
            costs_ms={rows: round(cost * 1000, 2) for rows, cost in speeds.forwards_s.items()},
        )

    def _find(self, found: Findings) -> None:
        self._apply(found)
        self._file.write(found)

    def _has_room(self, size: int) -> bool:
        return self._memory_bytes is None or mx.get_active_memory() + size <= self._memory_bytes

    def _tidy_up(self) -> None:
        """Give buffers of chores back: they would count as the model's."""
        mx.clear_cache()
        trim_heap()

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

    def begin_prompts(
        self, states: Sequence[SequenceState], pieces: Sequence[Sequence[int]], parts: int
    ) -> PromptForward:
        """Begin to append a piece to each sequence."""
        rows = cast("Sequence[MlxVerifier]", states)
        if self._facts.prefill_parts == 1:
            return WholePiece(rows[0], pieces[0])
        return LayeredForward(self._loaded, rows, pieces, parts)

    def launch_together(
        self, states: Sequence[SequenceState], tokens: Sequence[int | None]
    ) -> None:
        """Start a plain step of each sequence in one forward."""
        rows = cast("Sequence[MlxVerifier]", states)
        launch_together(self._loaded, rows, tokens, self._assignment)

    def draft(
        self,
        prefix: Sequence[int],
        size: int,
        seed: int | None,
        temperature: float,
        steps: int = 1,
        states: HiddenStates | None = None,
    ) -> Draft:
        """Draft `size` tokens after `prefix`; nothing is refined."""
        return self._drafter.draft(prefix, size, seed, temperature)

    def memory(self) -> MemoryUse:
        """Bytes that mlx holds."""
        return MemoryUse(
            active_bytes=mx.get_active_memory(),
            peak_bytes=self._drafter.meter.process_peak_bytes,
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
            self._memory_bytes = memory_bytes
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


def _blocks(loaded: LoadedModel, *, is_tried: bool) -> KvBlocks | None:
    """The model's blocks of KV; None, with a reason in the log, where it has none."""
    try:
        return plan_blocks(loaded, is_tried=is_tried)
    except Exception as refusal:  # noqa: BLE001 - whatever a model does that is not known
        event(
            _log,
            "KV of the model cannot leave this engine",
            level=logging.WARNING,
            model=loaded.model_id,
            reason=refusal.message if isinstance(refusal, KakeyaError) else repr(refusal),
        )
        return None


def _timed_chunk(speeds: Speeds, usual: int, blocks: KvBlocks | None) -> int:
    """The largest piece in which a cancellation is noticed in time, for models whose bits do not
    depend on it; `usual` where no pieces were timed."""
    if not speeds.pieces_s:
        return usual
    swift = [size for size, seconds in speeds.pieces_s.items() if seconds <= CHUNK_LIMIT_S]
    chunk = max(swift, default=min(speeds.pieces_s))
    return min(chunk, blocks.block_tokens) if blocks else chunk
