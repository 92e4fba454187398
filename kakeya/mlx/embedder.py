"""A loaded encoder, as the engine of embeddings sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from kakeya.core.errors import ConfigError
from kakeya.core.process import trim_heap
from kakeya.core.units import ENCODER_CPU_TOKENS, ENCODER_TOKENS
from kakeya.core.weight_files import weight_files
from kakeya.engine.model import KEPT_BUFFER_BYTES, MemoryUse
from kakeya.generation.facts import ModelFacts
from kakeya.generation.progress import LoadPhase
from kakeya.mlx.device import ends_with_device, forbid_wired_limit, working_set_bytes
from kakeya.mlx.encoder import EncoderConfig, EncoderNetwork, read_config, renamed
from kakeya.mlx.loader import WeightReading, resolve_folder, weights_fingerprint
from kakeya.mlx.numerics.blas import is_openblas, threads_for, use_threads
from kakeya.mlx.numerics.openblas import suit


@ends_with_device
class MlxEncoder:
    """Implements `engine.embedding.worker.TextEncoder`; every method runs on the thread that made
    it."""

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
        self._config = read_config(folder)
        is_cpu = mx.default_device().type == mx.DeviceType.cpu
        self._network = _read(folder, self._config, widens=is_cpu)
        parameters = [value for _, value in tree_flatten(self._network.parameters())]
        reading = WeightReading(sum(value.nbytes for value in parameters), told)
        try:
            if is_cpu and is_openblas():
                use_threads(blas_threads or threads_for(sum(value.size for value in parameters)))
                # In strips only products of a few rows are faster.
                suit(self._network, reading.has, in_strips=False)
            parameters = [value for _, value in tree_flatten(self._network.parameters())]
            reading.finish(parameters)
        except RuntimeError as failure:
            raise ConfigError(f"weights in {str(folder)!r} are damaged: {failure}") from failure
        mx.set_cache_limit(KEPT_BUFFER_BYTES)
        self.batch_tokens = ENCODER_CPU_TOKENS if is_cpu else ENCODER_TOKENS
        self.facts = ModelFacts(
            model_id=model_id,
            model_path=str(folder),
            vocab_size=self._config.vocab_size,
            context_tokens=self._config.text_tokens,
            eos_token_ids=(),
            dtype=str(self._network.words.weight.dtype).removeprefix("mlx.core."),
            weight_bytes=sum(value.nbytes for value in parameters),
            base_fingerprint=weights_fingerprint(folder),
            mlx_version=version("mlx"),
            device="cpu" if is_cpu else "gpu",
            blas_accelerated=blas_accelerated,
            load_s=time.perf_counter() - started,
            working_set_bytes=working_set_bytes(),
            vector_size=self._config.hidden_size,
            nested_sizes=self._config.nested_sizes,
        )
        told(LoadPhase.CHECK, 0, 0)
        self.encode([[0]], [0])

    def encode(self, texts: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[bytes]:
        """The vectors of texts in one forward; see `TextEncoder`."""
        length = max(map(len, texts))
        tokens = np.zeros((len(texts), length), dtype=np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        lengths = mx.array([len(text) for text in texts], dtype=mx.int32)
        vectors = np.array(self._network(mx.array(tokens), lengths), dtype="<f4")
        return [
            self._cut(vector, size).tobytes() for vector, size in zip(vectors, sizes, strict=True)
        ]

    def _cut(self, vector: np.ndarray, size: int) -> np.ndarray:
        """The first `size` numbers, 0 = all, normalized where the model's vectors are."""
        vector = vector[: size or None]
        if not self._config.normalizes:
            return vector
        length = np.linalg.norm(vector)
        return vector / max(length, np.float32(1e-12))

    def memory(self) -> MemoryUse:
        """Bytes that mlx holds."""
        return MemoryUse(
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            cache_bytes=mx.get_cache_memory(),
        )

    def tidy(self) -> None:
        """Give buffers that no array uses back to the system."""
        mx.clear_cache()
        trim_heap()

    def limit(self, memory_bytes: int | None, cache_bytes: int | None) -> None:
        """Bound the memory of mlx, and its unused buffers; None = unchanged."""
        if memory_bytes is not None:
            mx.set_memory_limit(memory_bytes)
        if cache_bytes is not None:
            mx.set_cache_limit(cache_bytes)


def _read(folder: Path, config: EncoderConfig, *, widens: bool) -> EncoderNetwork:
    """Make the network; its weights are read when they are used. Raises ConfigError."""
    tensors: dict[str, mx.array] = {}
    network = EncoderNetwork(config)
    try:
        for file in weight_files(folder):
            tensors |= cast("dict[str, mx.array]", mx.load(str(file)))
        found = renamed(tensors)
        if widens:
            found = {name: value.astype(mx.float32) for name, value in found.items()}
        network.load_weights(list(found.items()))
    except (RuntimeError, ValueError) as failure:
        raise ConfigError(
            f"model folder {str(folder)!r} cannot be loaded: {failure}; its weights must be those "
            "that config.json describes"
        ) from failure
    return network
