"""A prompt of 1000 tokens on the 3m model: its KV in pages, its prefill, and taking it over.

What the benchmarks of imports share. The model thread's work only: no agent, no messages.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.models import random_model
from kakeya.core.units import KIB
from kakeya.engine.kv.blocks import KvExports, plan_take, take
from kakeya.engine.model import Model
from kakeya.engine.steps.pieces import Pieces
from kakeya.generation.kv import KvPages
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.shared_arena import Filling, PageArena

TOKENS = 1000
"""That are prefilled; the prompt has one more."""
_CONFIG = PageConfig(page_bytes=512 * KIB, slab_pages=128, total_pages=128)


class Prompt:
    """The prompt, an arena, and blocks of the prompt's KV that were exported to it."""

    def __init__(self, model: Model, arena: PageArena) -> None:
        self.model = model
        self.arena = arena
        self.facts = model.facts
        self.ids = [(7919 * position) % self.facts.vocab_size for position in range(TOKENS)]
        self._pieces = Pieces(self.facts, TOKENS)
        self._tenant = arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        self._holder = arena.pool.holder("engine")
        fillings, self.blocks = self.prepared()
        if self._compute(self.blocks) != len(self.blocks):
            raise SystemExit("not all blocks were exported")
        for filling in fillings:
            filling.commit()

    def lengths(self) -> list[int]:
        """Tokens of each block, a tail at the end."""
        size = self.facts.kv_block_tokens
        return [min(size, TOKENS - start) for start in range(0, TOKENS, size)]

    def prepared(self) -> tuple[list[Filling], list[KvPages]]:
        """Fresh pages for all blocks; end each filling."""
        fillings, pages = [], []
        size = self.facts.kv_block_tokens
        for index, tokens in enumerate(self.lengths()):
            length = self.facts.kv_block_bytes * tokens // size
            filling = self.arena.prepare(self._tenant, length, self._holder)
            fillings.append(filling)
            pages.append(KvPages(index=index, pages=filling.ref, tokens=tokens % size))
        return fillings, pages

    def payloads(self) -> list[bytes]:
        """The bytes of each block."""
        found = []
        for block in self.blocks:
            holder = self.arena.hold(block.pages, self._holder)
            found.append(bytes(self.arena.view(holder.block, block.pages.length)))
        return found

    def take(self, blocks: Sequence[KvPages]) -> float:
        """Take the prompt over into a fresh sequence; seconds."""
        started = time.perf_counter()
        plan = plan_take(blocks, self.facts, self._pieces)
        state = self.model.open()
        if not take(state, plan, self.facts) or state.length != TOKENS:
            raise SystemExit(f"{state.length} tokens were taken, {TOKENS} lie in the pages")
        return time.perf_counter() - started

    def prefill(self) -> float:
        """Compute it; seconds."""
        started = time.perf_counter()
        self._compute([])
        return time.perf_counter() - started

    def prefill_and_export(self) -> float:
        """Compute it, and copy all blocks into fresh pages; seconds."""
        fillings, pages = self.prepared()
        started = time.perf_counter()
        self._compute(pages)
        seconds = time.perf_counter() - started
        for filling in fillings:
            filling.rollback()
        return seconds

    def _compute(self, pages: Sequence[KvPages]) -> int:
        """Prefill and export; how many blocks were whole."""
        state, whole = self.model.open(), 0
        exports = KvExports(pages, self.facts, self._pieces)
        while state.length < TOKENS:
            state.prefill(self.ids[state.length : self._pieces.end(state.length)])
            whole += sum(1 for _ in exports.computed(state, state.length))
        return whole


@contextmanager
def prompt() -> Iterator[Prompt]:
    """Load the model and compute the prompt once."""
    model = _load()
    with (
        tempfile.TemporaryDirectory() as folder,
        PageArena(_CONFIG, folder=Path(folder), rng=random.Random(folder)) as arena,
    ):
        arena.grow()
        yield Prompt(model, arena)


def _load() -> Model:
    from kakeya.mlx.numerics.blas import preload_blas

    is_fast = preload_blas(1)
    from kakeya.mlx.loader import load
    from kakeya.mlx.model import MlxModel

    return MlxModel(load(str(random_model("3m")), "3m"), 0.0, is_fast)
