"""Taking the KV of a prompt from pages against computing it: the two ways to begin an answer.

One model thread's work on a 3.7 M parameter model with random weights and a prompt of 1001 tokens,
of which 1000 are prefilled: mapping the pages, copying three whole blocks and a tail of 232 tokens
into a fresh sequence and unmapping, against prefill on the engine's own grid. Export is measured
too, as a share of the prefill that it goes along with. In turns, medians.

    python -m benchmarks.kv_import
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from benchmarks.models import random_model
from benchmarks.report import emit, interleaved, median
from kakeya.core.units import KIB
from kakeya.engine.kv import KvExports, plan_take, take
from kakeya.engine.model import LoadedFacts, Model, SequenceState
from kakeya.memory.arena import Filling, PageArena
from kakeya.memory.content import ContentType, PageConfig
from kakeya.precache.kv_pages import KvPages

_TOKENS = 1000
_GOAL = 100.0
_CONFIG = PageConfig(page_bytes=512 * KIB, slab_pages=128, total_pages=128)


def main() -> None:
    model = _load()
    facts = model.facts
    ids = [(7919 * position) % facts.vocab_size for position in range(_TOKENS)]
    with (
        tempfile.TemporaryDirectory() as folder,
        PageArena(_CONFIG, folder=Path(folder), rng=random.Random(folder)) as arena,
    ):
        arena.grow()
        blocks = _exported(model, arena, ids)
        taken = interleaved(
            {
                "import": lambda: _import(model, blocks),
                "prefill": lambda: _prefill(model, ids),
                "prefill and export": lambda: _prefill_and_export(model, arena, ids),
            },
            repeats=15,
        )
    middle = {name: median(values) for name, values in taken.items()}
    ratio = median([p / i for p, i in zip(taken["prefill"], taken["import"], strict=True)])
    emit(
        "import of 1000 tokens of KV from pages against their prefill, ms",
        ours=1000 * middle["import"],
        baseline=1000 * middle["prefill"],
        ratio=ratio,
        goal=f">={_GOAL:.0f}x faster",
        met=ratio >= _GOAL,
        prefill_and_export_ms=round(1000 * middle["prefill and export"], 2),
        best_import_ms=round(1000 * min(taken["import"]), 3),
        best_prefill_ms=round(1000 * min(taken["prefill"]), 2),
        bytes=sum(block.pages.length for block in blocks),
        grid=facts.prefill_grid,
        blas=facts.blas_accelerated,
    )


def _load() -> Model:
    from kakeya.mlx.blas import preload_blas

    is_fast = preload_blas(1)
    from kakeya.mlx.loader import load
    from kakeya.mlx.model import MlxModel

    return MlxModel(load(str(random_model("3m")), "3m"), 0.0, is_fast)


def _import(model: Model, blocks: list[KvPages]) -> float:
    started = time.perf_counter()
    plan = plan_take(blocks, model.facts, _TOKENS)
    state = model.open()
    if not take(state, plan, model.facts) or state.length != _TOKENS:
        raise SystemExit(f"{state.length} tokens were taken, {_TOKENS} lie in the pages")
    return time.perf_counter() - started


def _prefill(model: Model, ids: list[int]) -> float:
    started = time.perf_counter()
    state = model.open()
    while state.length < _TOKENS:
        state.prefill(ids[state.length : _next(model.facts, state)])
    return time.perf_counter() - started


def _prefill_and_export(model: Model, arena: PageArena, ids: list[int]) -> float:
    fillings, pages = _prepared(model.facts, arena)
    started = time.perf_counter()
    _compute(model, ids, pages)
    seconds = time.perf_counter() - started
    for filling in fillings:
        filling.rollback()
    return seconds


def _exported(model: Model, arena: PageArena, ids: list[int]) -> list[KvPages]:
    fillings, pages = _prepared(model.facts, arena)
    if _compute(model, ids, pages) != len(pages):
        raise SystemExit("not all blocks were exported")
    for filling in fillings:
        filling.commit()
    return pages


def _compute(model: Model, ids: list[int], pages: list[KvPages]) -> int:
    """Prefill and export; how many blocks were whole."""
    state, whole = model.open(), 0
    exports = KvExports(pages, model.facts, _TOKENS)
    while state.length < _TOKENS:
        state.prefill(ids[state.length : _next(model.facts, state)])
        whole += sum(1 for _ in exports.computed(state, state.length))
    return whole


def _next(facts: LoadedFacts, state: SequenceState) -> int:
    chunk = facts.prefill_chunk_at(state.length)
    return min(_TOKENS, (state.length // chunk + 1) * chunk)


def _prepared(facts: LoadedFacts, arena: PageArena) -> tuple[list[Filling], list[KvPages]]:
    tenant = arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
    holder = arena.pool.holder("engine")
    size = facts.kv_block_tokens
    fillings, pages = [], []
    for index, start in enumerate(range(0, _TOKENS, size)):
        tokens = min(size, _TOKENS - start)
        filling = arena.prepare(tenant, facts.kv_block_bytes * tokens // size, holder)
        fillings.append(filling)
        pages.append(KvPages(index=index, pages=filling.ref, tokens=tokens % size))
    return fillings, pages


if __name__ == "__main__":
    main()
