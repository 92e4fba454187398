"""A block-diffusion drafter as the model of an engine: it drafts, and generates nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import mlx.core as mx
from mlx.utils import tree_flatten

from kakeya.core.errors import ConfigError, Unsupported
from kakeya.core.ids import BLOCK_DIFFUSION
from kakeya.core.process import trim_heap
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.engine.model import (
    KEPT_BUFFER_BYTES,
    LoadedFacts,
    MemoryUse,
    PromptForward,
    SequenceState,
)
from kakeya.generation.progress import LoadPhase
from kakeya.mlx.device import ends_with_device, forbid_wired_limit, working_set_bytes
from kakeya.mlx.diffusion.drafter import BlockDiffusionDrafter
from kakeya.mlx.diffusion.network import read_network
from kakeya.mlx.loader import (
    WeightReading,
    resolve_folder,
    vocabulary_digest,
    weights_fingerprint,
)
from kakeya.mlx.numerics.blas import is_openblas, threads_for, use_threads

_TIMED_DRAFTS = 3


def is_block_diffusion(folder: Path) -> bool:
    """Whether a folder, which exists, holds such a model."""
    try:
        return json.loads((folder / "config.json").read_text("utf-8"))["model_type"] == (
            BLOCK_DIFFUSION
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


@ends_with_device
class DiffusionModel:
    """Implements `engine.model.Model` as far as a drafter does; belongs to the model thread."""

    adapters = None

    def __init__(
        self,
        id_or_path: str,
        model_id: str,
        *,
        blas_threads: int = 1,
        blas_accelerated: bool = True,
        told: Callable[[LoadPhase, int, int], None] = lambda *_: None,
    ) -> None:
        """Load the weights; parameters and errors are those of `loader.load`."""
        started = time.perf_counter()
        forbid_wired_limit()
        folder = resolve_folder(id_or_path, told)
        network = read_network(folder)
        parameters = [value for _, value in tree_flatten(network.parameters())]
        if mx.default_device().type == mx.DeviceType.cpu and is_openblas():
            use_threads(blas_threads or threads_for(sum(value.size for value in parameters)))
        reading = WeightReading(sum(value.nbytes for value in parameters), told)
        try:
            reading.finish(parameters)
        except RuntimeError as failure:
            raise ConfigError(f"weights in {str(folder)!r} are damaged: {failure}") from failure
        mx.set_cache_limit(KEPT_BUFFER_BYTES)
        told(LoadPhase.CHECK, 0, 0)
        fingerprint = weights_fingerprint(folder)
        self._drafter = BlockDiffusionDrafter(network, model_id, fingerprint)
        config = network.config
        self.facts = LoadedFacts(
            model_id=model_id,
            model_path=str(folder),
            vocab_size=config.vocab_size,
            context_tokens=config.max_position_embeddings,
            eos_token_ids=(),
            dtype=str(network.model.embed_tokens.weight.dtype).removeprefix("mlx.core."),
            weight_bytes=sum(value.nbytes for value in parameters),
            # A text costs its window, however long it is.
            sequence_state_bytes=2 * config.window_tokens * config.kv_bytes_per_token,
            mlx_version=version("mlx"),
            tokens_per_second=self._speed(config.block_tokens),
            prefill_chunk_tokens=2 * config.window_tokens,
            vocabulary_digest=vocabulary_digest(folder),
            device=str(mx.default_device().type).removeprefix("DeviceType."),
            blas_accelerated=blas_accelerated,
            base_fingerprint=fingerprint,
            working_set_bytes=working_set_bytes(),
            load_s=time.perf_counter() - started,
        )
        self.tidy()
        trim_heap()

    def _speed(self, size: int) -> float:
        """Tokens per second of drafts of one pass."""
        seconds = []
        for number in range(_TIMED_DRAFTS):
            started = time.perf_counter()
            self._drafter.draft(range(16 + number), size, 1, None, 0.0)
            seconds.append(time.perf_counter() - started)
        self._drafter.shed(1 << 62)
        return size / min(seconds)

    def open(self) -> NoReturn:
        """Refuse: raises Unsupported."""
        raise Unsupported(
            f"{self.facts.model_id} only drafts; give it as --proposer, beside a --model"
        )

    def begin_prompts(
        self, states: Sequence[SequenceState], pieces: Sequence[Sequence[int]], parts: int
    ) -> PromptForward:
        """Refuse, as `open`."""
        self.open()

    def launch_together(
        self, states: Sequence[SequenceState], tokens: Sequence[int | None]
    ) -> None:
        """Refuse, as `open`."""
        self.open()

    def draft(
        self,
        prefix: Sequence[int],
        size: int,
        seed: int | None,
        temperature: float,
        steps: int = 1,
        states: HiddenStates | None = None,
    ) -> Draft:
        """Draft at most `size` tokens after `prefix`, in at most `steps` passes."""
        return self._drafter.draft(prefix, size, steps, seed, temperature, states)

    def chores(self) -> Iterator[float]:
        """None."""
        return iter(())

    def memory(self) -> MemoryUse:
        """Bytes that mlx holds."""
        return MemoryUse(
            active_bytes=mx.get_active_memory(),
            peak_bytes=self._drafter.meter.process_peak_bytes,
            cache_bytes=mx.get_cache_memory(),
        )

    def tidy(self) -> None:
        """Give buffers that no array uses back to the system."""
        mx.clear_cache()

    def limit(self, memory_bytes: int | None, cache_bytes: int | None) -> None:
        """Bound the memory of mlx, and its unused buffers; None = unchanged."""
        if memory_bytes is not None:
            mx.set_memory_limit(memory_bytes)
        if cache_bytes is not None:
            mx.set_cache_limit(cache_bytes)

    def idle_bytes(self) -> int:
        """Bytes of keys and values of recent texts."""
        return self._drafter.held_bytes

    def shed(self, size: int) -> None:
        """Forget texts, oldest first, until `size` bytes are gone."""
        self._drafter.shed(size)
