"""Goals 8 and 21: what allocating, pinning and evicting pages costs the process that owns them.

Each figure is the median of many batches, taken in turns with a list append under a lock, the
least that an allocator shared by threads would pay; what the batch itself takes, the same loop
around nothing, is taken off. `alloc` is a page that was freed just before, as in a pool that is in
use, and `fresh_ns` beside it one of a thousand in a row, which come out of the free ranges.
`times_increment` is the figure over adding one to a slot of an object in a method of its own, the
least that a count costs in Python; `at_reference` is the figure over how much slower than the
reference machine this one was meanwhile. The vLLM figures of goal 8 are cited.

    .venv/bin/python -m benchmarks.page_arena
"""

from __future__ import annotations

import gc
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import (
    at_reference,
    emit,
    interleaved,
    machine_factor,
    median,
    percentile,
)
from kakeya.memory.pages.content import ContentType, Fit, PageConfig
from kakeya.memory.pages.pins import Block, Hold
from kakeya.memory.pages.pool import PagePool
from kakeya.memory.pages.shared_arena import PageArena

SLABS, CALLS, REPEATS = 32, 1_000, 31
VLLM_ALLOC_NS, VLLM_HUNDRED_NS = 494.0, 20_715.0


def pool_of(slabs: int, *, fit: Fit = Fit.BEST) -> PagePool:
    pool = PagePool(PageConfig(fit=fit))
    pool.at(1.0)
    for _ in range(slabs):
        pool.grow()
    return pool


def ns_each(work: Callable[[], object], calls: int) -> float:
    started = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - started) / calls


def locked_append() -> Callable[[], float]:
    lock, kept = threading.Lock(), []

    def work() -> None:
        for number in range(CALLS):
            with lock:
                kept.append(number)

    def measure() -> float:
        kept.clear()
        return ns_each(work, CALLS)

    return measure


def allocate_one(*, reused: bool) -> Callable[[], float]:
    """One page each; `reused`: 16 at a time, from what was freed just before, else a thousand."""
    pool = pool_of(SLABS)
    page = pool.tenant(ContentType.KV_CACHE, "bench").page
    batch = 16 if reused else CALLS

    def measure() -> float:
        taken: list[Block] = []
        nothing: list[None] = []
        spent = 0
        for _ in range(CALLS // batch):
            started = time.perf_counter_ns()
            nothing += [None for _ in range(batch)]
            between = time.perf_counter_ns()
            taken += [page() for _ in range(batch)]
            spent += time.perf_counter_ns() - between - (between - started)
            nothing.clear()
            for block in taken:
                pool.free(block)
            taken.clear()
        return spent / (CALLS // batch * batch)

    return measure


def allocate_hundred(*, pair: bool, merged: bool) -> Callable[[], float]:
    """A range of 100; `pair`: with its freeing; `merged`: searched for among ranges each time."""
    pool = pool_of(SLABS)
    tenant = pool.tenant(ContentType.LORA_WEIGHT, "bench")
    holes = [tenant.range(20 + i % 7) for i in range(SLABS)]
    for block in holes[::2]:
        pool.free(block)

    def measure() -> float:
        spent = 0
        for _ in range(CALLS):
            if merged:
                pool.merge()
            started = time.perf_counter_ns()
            block = tenant.range(100)
            middle = time.perf_counter_ns()
            pool.free(block)
            spent += (time.perf_counter_ns() if pair else middle) - started
        return spent / CALLS

    return measure


def held(count: int) -> list[Hold]:
    pool = pool_of(SLABS)
    tenant = pool.tenant(ContentType.KV_CACHE, "bench")
    engine = pool.holder("engine")
    return [engine.hold(tenant.page()) for _ in range(count)]


def pins(*, unpin: bool) -> Callable[[], float]:
    """A pin, or an unpin, of each of many held blocks in turn."""
    holds = held(CALLS)

    def nothing() -> None:
        for _hold in holds:
            pass

    def pin_all() -> None:
        for hold in holds:
            hold.pin()

    def unpin_all() -> None:
        for hold in holds:
            hold.unpin()

    def measure() -> float:
        loop = ns_each(nothing, CALLS)
        first = ns_each(pin_all, CALLS)
        second = ns_each(unpin_all, CALLS)
        return (second if unpin else first) - loop

    return measure


class Counter:
    """The least that a count costs."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """One more."""
        self.count += 1


def increment() -> Callable[[], float]:
    """One more for each of many counters in turn."""
    counters = [Counter() for _ in range(CALLS)]

    def nothing() -> None:
        for _counter in counters:
            pass

    def add_all() -> None:
        for counter in counters:
            counter.add()

    def measure() -> float:
        loop = ns_each(nothing, CALLS)
        return ns_each(add_all, CALLS) - loop

    return measure


def open_hold() -> Callable[[], float]:
    """Opening a hold: what the first pin of a block by its holder costs more."""
    pool = pool_of(SLABS)
    tenant = pool.tenant(ContentType.KV_CACHE, "bench")
    blocks = [tenant.page() for _ in range(CALLS)]
    engine = pool.holder("engine")

    def measure() -> float:
        spent = ns_each(lambda: [engine.hold(block) for block in blocks], CALLS)
        engine.drop_all()
        return spent

    return measure


def evict_one(worst: list[float]) -> Callable[[], float]:
    """One eviction from a full pool with five contents, a tenth of it pinned."""
    pool = pool_of(SLABS)
    tenants = [pool.tenant(content, "bench") for content in ContentType]
    rng = random.Random(7)
    engine = pool.holder("engine")
    for number in range(SLABS * 128):
        if number % 64 == 0:
            pool.at(pool.now.s + 0.1)
        block = rng.choice(tenants).page()
        if number % 10 == 0:
            engine.hold(block).pin()
    pool.evict_until_free(1)

    def measure() -> float:
        spent = []
        for _ in range(200):
            while pool.free_pages:
                rng.choice(tenants).page()
            pool.at(pool.now.s + 0.01)
            started = time.perf_counter_ns()
            pool.evict_one()
            spent.append(float(time.perf_counter_ns() - started))
        worst.append(percentile(spent, 0.99))
        return median(spent)

    return measure


def prepare_and_commit(folder: Path) -> tuple[PageArena, Callable[[], float]]:
    """On real shared memory: prepare and commit one page as a node does, stamps and barrier
    included. Freeing it is not counted."""
    config = PageConfig(page_bytes=512 * 1024, slab_pages=16, total_pages=16)
    arena = PageArena(config, folder=folder, rng=random.Random(1))
    arena.grow()
    arena.at(1.0)
    tenant = arena.pool.tenant(ContentType.KV_CACHE, "bench")
    agent = arena.pool.holder("agent")

    def measure() -> float:
        spent = []
        for _ in range(CALLS):
            started = time.perf_counter_ns()
            filling = arena.prepare(tenant, 1024, agent)
            filling.commit()
            spent.append(float(time.perf_counter_ns() - started))
            arena.pool.free(filling.block)
        return median(spent)

    return arena, measure


def main() -> None:
    gc.disable()  # as a collection in the middle of a batch is not what is measured
    worst: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        arena, on_memory = prepare_and_commit(Path(folder))
        with arena:
            taken = interleaved(
                {
                    "lock": locked_append(),
                    "increment": increment(),
                    "alloc": allocate_one(reused=True),
                    "alloc_fresh": allocate_one(reused=False),
                    "hundred": allocate_hundred(pair=False, merged=False),
                    "hundred_pair": allocate_hundred(pair=True, merged=False),
                    "hundred_searched": allocate_hundred(pair=False, merged=True),
                    "pin": pins(unpin=False),
                    "unpin": pins(unpin=True),
                    "open_hold": open_hold(),
                    "evict": evict_one(worst),
                    "prepare_commit": on_memory,
                    "machine_x": machine_factor,
                },
                repeats=REPEATS,
            )
    ns = {name: median(values) for name, values in taken.items()}
    machine_x = ns.pop("machine_x")
    fresh = {"alloc": {"fresh_ns": round(ns["alloc_fresh"], 1)}}
    goals = {"alloc": 100.0, "hundred": 1_000.0, "pin": 50.0, "unpin": 50.0, "evict": 10_000.0}
    goals["prepare_commit"] = 1_000.0
    for name, goal in goals.items():
        emit(
            f"page arena, {name}, ns",
            ours=ns[name],
            baseline=goal,
            ratio=ns[name] / goal,
            goal=f"< {goal:.0f} ns",
            met=ns[name] < goal,
            times_locked_append=round(ns[name] / ns["lock"], 2),
            times_increment=round(ns[name] / ns["increment"], 2),
            **at_reference(ns[name], machine_x),
            **fresh.get(name, {}),
        )
    emit(
        "page pool against vLLM's BlockPool (cited): alloc 1; 100 and free, ns",
        ours=ns["hundred_pair"],
        baseline=VLLM_HUNDRED_NS,
        ratio=VLLM_HUNDRED_NS / ns["hundred_pair"],
        goal=">= 5x at one page, >= 20x at 100 with freeing",
        met=5 * ns["alloc"] <= VLLM_ALLOC_NS and 20 * ns["hundred_pair"] <= VLLM_HUNDRED_NS,
        times_at_one=round(VLLM_ALLOC_NS / ns["alloc"], 1),
        evict_p99_ns=round(median(worst)),
        others_ns={name: round(value, 1) for name, value in ns.items() if name not in goals},
    )


if __name__ == "__main__":
    main()
