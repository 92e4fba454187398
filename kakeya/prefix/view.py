"""What the prefixes of a node look like at one moment: for status and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.pages.counts import PrefixCounts, Source
from kakeya.prefix.pages.pages import PrefixPages
from kakeya.prefix.request.endings import PrefixEndings
from kakeya.prefix.request.turns import Turns

Json = dict[str, object]


def prefix_status(
    pages: PrefixPages,
    turns: Turns,
    counts: PrefixCounts,
    store: BlockStore | None,
    endings: PrefixEndings,
) -> Json:
    """Blocks by where they lie, and tokens by where they came from, as JSON."""
    trees = [(shelf.fingerprint.model_id, shelf.tree.stats()) for shelf in pages.shelves()]
    disk = store.stats() if store is not None else None
    return {
        "pages": {
            "blocks": sum(stats.ram_blocks for _, stats in trees),
            "bytes": pages.used_bytes,
            "budget_bytes": pages.budget_bytes,
            "problem": pages.problem,
        },
        "disk": {
            "blocks": disk.blocks,
            "bytes": disk.used_bytes,
            "budget_bytes": disk.cap_bytes,
            "queued": disk.queued,
            "problem": disk.trouble,
        }
        if disk is not None
        else {},
        "logits": {
            "prompts": endings.count,
            "bytes": endings.held_bytes,
            "reused": counts.logits_reused,
        },
        "models": [
            {"model_id": model_id, "blocks": stats.ram_blocks, "on_disk": stats.disk_blocks}
            for model_id, stats in trees
        ],
        "tokens": {source.value: count for source, count in counts.tokens.items()},
        "hit_tokens": counts.hit_tokens,
        "computed_tokens": counts.tokens[Source.COMPUTED],
        "waiting": turns.waiting,
        "waits": counts.waits,
        "takeovers": turns.flights.takeovers,
        "supersedings": turns.flights.supersedings,
        "committed": counts.committed,
        "rolled_back": counts.rolled_back,
        "evicted": counts.evicted,
        "expired": counts.expired,
    }


def prefix_metrics(
    pages: PrefixPages,
    turns: Turns,
    counts: PrefixCounts,
    store: BlockStore | None,
    endings: PrefixEndings,
) -> Iterator[Metric]:
    """The same for Prometheus."""
    blocks = GaugeMetricFamily(
        "kakeya_prefix_blocks", "Blocks of KV by where they lie", labels=["place"]
    )
    size = GaugeMetricFamily("kakeya_prefix_bytes", "Bytes of these", labels=["place"])
    trees = [shelf.tree.stats() for shelf in pages.shelves()]
    blocks.add_metric(["pages"], sum(stats.ram_blocks for stats in trees))
    size.add_metric(["pages"], pages.used_bytes)
    if store is not None:
        disk = store.stats()
        blocks.add_metric(["disk"], disk.blocks)
        size.add_metric(["disk"], disk.used_bytes)
    yield from (blocks, size)
    yield GaugeMetricFamily(
        "kakeya_prefix_logits_bytes",
        "Logits behind whole prompts, in the agent's memory",
        value=endings.held_bytes,
    )
    yield GaugeMetricFamily(
        "kakeya_prefix_waiting",
        "Requests that wait for what another one computes",
        value=turns.waiting,
    )
    yield from counts.metrics()
