"""A cold prompt up to its first token: cut on the engine's grid, and as mlx-lm cuts it by default.

One process, in turns; mlx-lm's `generate_step` takes 2048 tokens at once, on a network as mlx-lm
loads it, and with its own attention.

    .venv/bin/python -m benchmarks.prefill
"""

from __future__ import annotations

import time
from unittest.mock import patch

from kakeya.mlx.numerics.blas import preload_blas

IS_FAST = preload_blas(threads=1)

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import base, qwen3  # noqa: E402

from benchmarks.models import random_model  # noqa: E402
from benchmarks.plain import plain_network  # noqa: E402
from benchmarks.report import emit, interleaved, median  # noqa: E402
from kakeya.mlx.loader import load  # noqa: E402
from kakeya.mlx.model import MlxModel  # noqa: E402

GOAL = 1.15
LENGTHS = (1000, 4000)
ATTENTION = "scaled_dot_product_attention"


class Bench:
    """One model, loaded for both ways to its first token."""

    def __init__(self, folder: str) -> None:
        self._plain = plain_network(folder)
        self._model = MlxModel(load(folder, "bench"), 0.0, IS_FAST)
        self.facts = self._model.facts

    def ours(self, ids: list[int]) -> float:
        """Seconds on the engine's grid."""
        started = time.perf_counter()
        state, last = self._model.open(), len(ids) - 1
        while state.length < last:
            chunk = self.facts.prefill_chunk_at(state.length)
            state.prefill(ids[state.length : min(last, (state.length // chunk + 1) * chunk)])
        state.launch(ids[-1])
        state.collect()
        return time.perf_counter() - started

    def theirs(self, ids: list[int]) -> float:
        """Seconds as mlx-lm does it."""
        with patch.object(qwen3, ATTENTION, getattr(base, ATTENTION)):
            started = time.perf_counter()
            steps = generate_step(mx.array(ids), self._plain, max_tokens=1)
            next(iter(steps))
            return time.perf_counter() - started


def main() -> None:
    bench = Bench(str(random_model("3m")))
    for length in LENGTHS:
        ids = [(7919 * position) % bench.facts.vocab_size for position in range(length)]
        taken = interleaved(
            {"ours": lambda ids=ids: bench.ours(ids), "theirs": lambda ids=ids: bench.theirs(ids)}
        )
        ours, theirs = median(taken["ours"]), median(taken["theirs"])
        emit(
            f"cold prefill of {length} tokens and one step, ms, 3m",
            ours=1000 * ours,
            baseline=1000 * theirs,
            ratio=theirs / ours,
            goal=f">= {GOAL}x mlx-lm's default pieces",
            met=theirs / ours >= GOAL,
            grid=bench.facts.prefill_grid or bench.facts.prefill_chunk_tokens,
            blas=bench.facts.blas_accelerated,
        )


if __name__ == "__main__":
    main()
