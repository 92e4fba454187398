"""Cold prompts up to their first token, on the engine's grid and as mlx-lm reads them by default.

One process, in turns; mlx-lm takes 2048 tokens at once, and several prompts together, on a network
as mlx-lm loads it and with its own attention. The pieces of the grid stand beside others: a sweep.

    .venv/bin/python -m benchmarks.prefill
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from benchmarks.models import NAMED, any_model, repeats
from benchmarks.nodes import blas_threads
from kakeya.mlx.numerics.blas import preload_blas

IS_FAST = preload_blas(threads=blas_threads(Path(NAMED)) if NAMED else 1)

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import BatchGenerator, generate_step  # noqa: E402
from mlx_lm.models import base  # noqa: E402

from benchmarks.plain import known_model, plain_network  # noqa: E402
from benchmarks.report import emit, interleaved, median  # noqa: E402
from kakeya.engine.model import CHUNK_LIMIT_S, SequenceState  # noqa: E402

FOLDER = any_model("3m")
GOAL = 1.1 if NAMED else 1.4
LENGTHS = (1000,) if NAMED else (1000, 4000)
SHORT, SHORT_TOKENS = 4, 60
SWEPT = (32, 64, 128, 256, 512)
SWEPT_TOKENS = 512
NEAR = 0.9
"""The least share of the best rate of a sweep that the grid has."""
ATTENTION = "scaled_dot_product_attention"


class Bench:
    """One model, loaded for both ways to its first token."""

    def __init__(self) -> None:
        self._plain = plain_network(str(FOLDER))
        self._model = known_model(str(FOLDER))
        self.facts = self._model.facts
        # The next request of a node that was idle, not the first forward after its checks.
        self.ours([self.ids(100)])
        self.theirs(self.ids(100))

    def ids(self, length: int, first: int = 0) -> list[int]:
        """Made-up tokens."""
        return [(7919 * (first + at)) % self.facts.vocab_size for at in range(length)]

    def ours(self, prompts: Sequence[list[int]]) -> float:
        """Seconds on the engine's grid, up to the first token of all."""
        started = time.perf_counter()
        states = [self._model.open() for _ in prompts]
        while due := [
            (state, ids) for state, ids in zip(states, prompts, strict=True) if left(state, ids)
        ]:
            parts = [state for state, _ in due]
            pieces = [self._piece(state, ids) for state, ids in due]
            least = self.facts.shares_pieces_from
            if len(due) > 1 and not (least and min(map(len, pieces)) >= least):
                parts, pieces = parts[:1], pieces[:1]
            seconds = sum(map(len, pieces)) / (self.facts.prefill_tokens_per_second or 1e9)
            count = self.facts.parts_of(seconds, CHUNK_LIMIT_S)
            forward = self._model.begin_prompts(parts, pieces, count)
            while not forward.advance():
                pass
        last = [ids[-1] for ids in prompts]
        if len(states) > 1:
            self._model.launch_together(states, last)
        else:
            states[0].launch(last[0])
        for state in states:
            state.collect()
        return time.perf_counter() - started

    def theirs(self, ids: list[int]) -> float:
        """Seconds as mlx-lm does it."""
        with self._own_attention():
            started = time.perf_counter()
            next(iter(generate_step(mx.array(ids), self._plain, max_tokens=1)))
            return time.perf_counter() - started

    def theirs_together(self, prompts: Sequence[list[int]]) -> float:
        """Seconds of mlx-lm's batch."""
        with self._own_attention():
            started = time.perf_counter()
            batch = BatchGenerator(self._plain, max_tokens=1)
            waiting = set(batch.insert(list(prompts)))
            while waiting:
                waiting -= {answer.uid for answer in batch.next_generated()}
            return time.perf_counter() - started

    def swept(self, piece: int) -> float:
        """Seconds of a prompt in pieces of so many tokens."""
        state, ids = self._model.open(), self.ids(SWEPT_TOKENS)
        started = time.perf_counter()
        for first in range(0, len(ids), piece):
            state.prefill(ids[first : first + piece])
        return time.perf_counter() - started

    def _piece(self, state: SequenceState, ids: list[int]) -> list[int]:
        first = state.length
        chunk = self.facts.prefill_chunk_at(first)
        return ids[first : min(len(ids) - 1, (first // chunk + 1) * chunk)]

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        module = sys.modules[type(self._plain).__module__]
        with patch.object(module, ATTENTION, getattr(base, ATTENTION)):
            yield


def left(state: SequenceState, ids: list[int]) -> int:
    return len(ids) - 1 - state.length


def compare(bench: Bench, what: str, prompts: Sequence[list[int]], goal: float) -> None:
    def theirs() -> float:
        return bench.theirs(prompts[0]) if len(prompts) == 1 else bench.theirs_together(prompts)

    measures = {"ours": lambda: bench.ours(prompts), "theirs": theirs}
    taken = {name: median(times) for name, times in interleaved(measures, repeats(5)).items()}
    emit(
        f"{what}, ms, {FOLDER.name}",
        ours=1000 * taken["ours"],
        baseline=1000 * taken["theirs"],
        ratio=taken["theirs"] / taken["ours"],
        goal=f">= {goal}x mlx-lm",
        met=taken["theirs"] / taken["ours"] >= goal,
        grid=bench.facts.prefill_grid or bench.facts.prefill_chunk_tokens,
        shares_from=bench.facts.shares_pieces_from,
        blas=IS_FAST,
    )


def sweep(bench: Bench) -> None:
    measures = {str(size): lambda size=size: bench.swept(size) for size in SWEPT}
    taken = {int(name): min(times) for name, times in interleaved(measures, repeats(5)).items()}
    ours = taken[min(bench.facts.prefill_chunk_tokens, SWEPT[-1])]
    emit(
        f"{SWEPT_TOKENS} tokens in pieces of the grid against the best of a sweep, ms, "
        f"{FOLDER.name}",
        ours=1000 * ours,
        baseline=1000 * min(taken.values()),
        ratio=min(taken.values()) / ours,
        goal=f">= {NEAR} of its rate",
        met=min(taken.values()) / ours >= NEAR,
        pieces_ms={size: round(1000 * seconds) for size, seconds in taken.items()},
    )


def main() -> None:
    bench = Bench()
    for length in LENGTHS:
        ids = bench.ids(length)
        compare(bench, f"cold prompt of {length} tokens and one step", [ids], GOAL)
    prompts = [bench.ids(SHORT_TOKENS, first) for first in range(SHORT)]
    compare(bench, f"{SHORT} prompts of {SHORT_TOKENS} tokens together and a step", prompts, 1.0)
    sweep(bench)


if __name__ == "__main__":
    main()
