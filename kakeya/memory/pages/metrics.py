"""What an arena counts, as Prometheus metrics, read at each scrape.

`docs/page-arena-dashboard.json` draws them and `docs/page-arena-alerts.json` watches them; a test
holds both against the names made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kakeya.memory.pages.shared_arena import LATENCY_BOUNDS_S, ArenaSnapshot


def page_metrics(arena: ArenaSnapshot) -> Iterator[Metric]:
    """Utilisation, fragmentation, pins, evictions and allocation latency of one arena."""
    pool = arena.pool
    yield _gauge("utilization", "Share of pages that hold something", pool.utilisation)
    yield _gauge(
        "fragmentation_ratio",
        "Longest free range against the longest there could be; 1 is no fragmentation",
        pool.contiguity,
    )
    yield _gauge("bytes", "Shared memory of all slabs", arena.slab_bytes)
    yield _gauge("overdue_pins", "Pins that outlived their scope", arena.overdue_pins)
    held = pool.pinned_pages + pool.dirty_pages
    states = {
        "free": pool.free_pages,
        "evictable": pool.total_pages - pool.free_pages - held,
        "pinned": pool.pinned_pages,
        "dirty": pool.dirty_pages,
    }
    pages = GaugeMetricFamily("kakeya_page_pool_pages", "Pages by state", labels=["state"])
    for state, count in states.items():
        pages.add_metric([state], count)
    contents = GaugeMetricFamily(
        "kakeya_page_pool_content_pages", "Pages in use by content", labels=["content"]
    )
    for content, count in pool.by_content:
        contents.add_metric([content], count)
    holds = CounterMetricFamily(
        "kakeya_page_holds", "Blocks that were asked for, by what came of it", labels=["outcome"]
    )
    holds.add_metric(["opened"], arena.holds_asked - arena.holds_stale)
    holds.add_metric(["stale"], arena.holds_stale)
    yield from (pages, contents, holds)
    yield CounterMetricFamily(
        "kakeya_pages_evicted", "Pages taken to make room", value=pool.evicted_pages
    )
    yield CounterMetricFamily(
        "kakeya_page_fillings_rolled_back",
        "Blocks that were being filled when their holder ended",
        value=arena.rolled_back,
    )
    yield _latency(arena)


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kakeya_page_pool_{name}", meaning, value=value)


def _latency(arena: ArenaSnapshot) -> HistogramMetricFamily:
    bounds = [*map(repr, LATENCY_BOUNDS_S), "+Inf"]
    return HistogramMetricFamily(
        "kakeya_page_allocation_latency_seconds",
        "Time to allocate a block, eviction included",
        buckets=list(zip(bounds, accumulate(arena.latency_counts), strict=True)),
        sum_value=arena.latency_sum_s,
    )
