"""Metrics of the arena, and the files that draw and watch them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kakeya.core.errors import PageFreed
from kakeya.core.units import KIB
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.figures import page_figures
from kakeya.memory.pages.shared_arena import PageArena
from tests.scrapes import Samples, drawn, made_by, problems, queries_about, scraped


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    config = PageConfig(page_bytes=512 * KIB, slab_pages=8, total_pages=8)
    ticks = iter(range(1000))
    with PageArena(
        config, folder=tmp_path, rng=random.Random(str(tmp_path)), timer=lambda: next(ticks) * 4e-5
    ) as arena:
        arena.at(1.0)
        arena.grow()
        agent, engine = arena.pool.holder("agent"), arena.pool.holder("engine")
        kv = arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        adapters = arena.pool.tenant(ContentType.LORA_WEIGHT, "adapters")
        fillings = [arena.prepare(kv, 1, agent) for _ in range(4)]
        for filling in fillings:
            filling.commit()
        refs = [filling.ref for filling in fillings]
        arena.prepare(adapters, 1024 * KIB, agent).commit()
        arena.hold(refs[0], engine).pin()
        gone = arena.hold(refs[1], agent).block
        arena.pool.free(gone)
        with pytest.raises(PageFreed):
            arena.hold(refs[1], agent)
        arena.pool.mark_dirty(arena.hold(refs[2], agent).block)
        arena.prepare(kv, 1, engine)
        arena.pool.holder("other")
        arena.close_holder(engine)
        again = arena.pool.holder("engine")
        arena.hold(refs[0], again).pin()
        arena.at(50.0)
        arena.pool.evict_one()
        return scraped(lambda: page_figures(arena.snapshot()))


def test_every_figure_is_what_the_arena_did(samples: Samples) -> None:
    def value(name: str, **labels: str) -> float:
        return samples[f"kakeya_{name}", tuple(sorted(labels.items()))]

    states = {state: value("page_pool_pages", state=state) for state in STATES}
    assert states == {"free": 5.0, "evictable": 1.0, "pinned": 1.0, "dirty": 1.0}
    assert value("page_pool_utilization") == 3 / 8
    assert value("page_pool_fragmentation_ratio") == 0.8
    assert value("page_pool_bytes") == 8 * 512 * KIB + 16 * KIB
    assert value("page_pool_overdue_pins") == 1.0
    assert value("pages_evicted_total") == 2.0
    assert value("pages_evicted_ahead_total") == 0.0
    assert value("page_fillings_rolled_back_total") == 1.0
    assert value("page_holds_total", outcome="stale") == 1.0
    assert value("page_holds_total", outcome="opened") == 4.0
    assert value("page_pool_content_pages", content="kv_cache") == 3.0
    assert value("page_pool_content_pages", content="lora_weight") == 0.0
    latency = "page_allocation_latency_seconds"
    assert value(f"{latency}_bucket", le="1e-05") == 0.0
    assert value(f"{latency}_bucket", le="0.0001") == 5.0
    assert value(f"{latency}_bucket", le="+Inf") == value(f"{latency}_count") == 5.0
    assert value(f"{latency}_sum") == pytest.approx(4e-4)


STATES = ("free", "evictable", "pinned", "dirty")


def test_an_empty_arena_has_figures_too(tmp_path: Path) -> None:
    with PageArena(PageConfig(), folder=tmp_path, rng=random.Random(str(tmp_path))) as arena:
        found = scraped(lambda: page_figures(arena.snapshot()))
    assert found["kakeya_page_pool_utilization", ()] == 0.0
    assert found["kakeya_page_pool_fragmentation_ratio", ()] == 1.0


@pytest.mark.parametrize("expression", queries_about("kakeya_page"))
def test_every_query_asks_for_what_there_is(expression: str, samples: Samples) -> None:
    assert problems(expression, samples) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("sum(kakeya_page_pool_pages", "do not match"),
        ("kakeya_pages_lost > 0", "no metric"),
        ('kakeya_page_pool_pages{state="lost"}', "has no state lost"),
        ("summe(kakeya_page_pool_pages)", "unknown word"),
    ],
)
def test_a_wrong_query_is_noticed(wrong: str, says: str, samples: Samples) -> None:
    assert any(says in problem for problem in problems(wrong, samples))


def test_every_metric_is_drawn(samples: Samples) -> None:
    assert made_by(samples) <= drawn()
