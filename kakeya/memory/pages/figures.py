"""Figures of a page arena, read at each scrape.

`docs/dashboard.json` draws them and `docs/alerts.json` watches them; a test
holds both against the names made here.
"""

from __future__ import annotations

from collections.abc import Iterator

from kakeya.core.figures import Figure, counter, gauge, histogram
from kakeya.memory.pages.shared_arena import ArenaSnapshot


def page_figures(arena: ArenaSnapshot) -> Iterator[Figure]:
    """Utilisation, fragmentation, pins, evictions and allocation latency of one arena."""
    pool = arena.pool
    yield gauge(
        "kakeya_page_pool_utilization", "Share of pages that hold something", pool.utilisation
    )
    yield gauge(
        "kakeya_page_pool_fragmentation_ratio",
        "Longest free range against the longest there could be; 1 is no fragmentation",
        pool.contiguity,
    )
    yield gauge("kakeya_page_pool_bytes", "Shared memory of all slabs", arena.slab_bytes)
    yield gauge(
        "kakeya_page_pool_overdue_pins", "Pins that outlived their scope", arena.overdue_pins
    )
    held = pool.pinned_pages + pool.dirty_pages
    yield gauge(
        "kakeya_page_pool_pages{state}",
        "Pages by state",
        {
            "free": pool.free_pages,
            "evictable": pool.total_pages - pool.free_pages - held,
            "pinned": pool.pinned_pages,
            "dirty": pool.dirty_pages,
        },
        {"free": "free", "evictable": "evictable", "pinned": "pinned", "dirty": "dirty"},
    )
    yield gauge(
        "kakeya_page_pool_content_pages{content}", "Pages in use by content", dict(pool.by_content)
    )
    yield counter(
        "kakeya_page_holds{outcome}",
        "Blocks that were asked for, by what came of it",
        {"opened": arena.holds_asked - arena.holds_stale, "stale": arena.holds_stale},
    )
    yield counter("kakeya_pages_evicted", "Pages taken to make room", pool.evicted_pages)
    yield counter(
        "kakeya_pages_evicted_ahead",
        "Pages freed in the background, before an allocation needed them",
        pool.evicted_ahead_pages,
    )
    yield counter(
        "kakeya_page_fillings_rolled_back",
        "Blocks that were being filled when their holder ended",
        arena.rolled_back,
    )
    yield histogram(
        "kakeya_page_allocation_latency_seconds",
        "Time to prepare and commit a block, eviction included",
        arena.latency,
    )
