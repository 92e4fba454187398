"""What a node did ahead of requests, at one moment: for status and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kakeya.prefix.warm.slots import SlotStatus
from kakeya.prefix.warm.warming import PrewarmStats

Json = dict[str, object]


def describe_precache(
    slots: Mapping[str, SlotStatus], conversations: int, warmed: PrewarmStats, *, prompts: int
) -> Json:
    """Slots by model, and prefixes by what became of them, as JSON."""
    return {
        "conversations": conversations,
        "slots": [
            {
                "model_id": one.model_id,
                "parallel": one.parallel,
                "loads": list(one.loads),
                "high_water": one.high_water,
                "recommended": one.recommended,
                "warning": _crowded(one),
            }
            for one in slots.values()
        ],
        "prewarms": {outcome.value: count for outcome, count in warmed.outcomes.items()},
        "cached_tokens": warmed.cached_tokens,
        "computed_tokens": warmed.computed_tokens,
        "refreshed": warmed.refreshed,
        "queued": warmed.queued,
        "running": warmed.running,
        "kept": warmed.kept,
        "kept_tokens": warmed.kept_tokens,
        "declared": prompts,
    }


def precache_metrics(slots: Mapping[str, SlotStatus], warmed: PrewarmStats) -> Iterator[Metric]:
    """The same for Prometheus."""
    opened = GaugeMetricFamily(
        "kakeya_conversations", "Open conversations that have a slot", labels=["model"]
    )
    parallel = GaugeMetricFamily("kakeya_conversation_slots", "Slots", labels=["model"])
    wanted = GaugeMetricFamily(
        "kakeya_conversation_slots_recommended",
        "Slots that the most conversations so far would need",
        labels=["model"],
    )
    for one in slots.values():
        opened.add_metric([one.model_id], sum(one.loads))
        parallel.add_metric([one.model_id], one.parallel)
        wanted.add_metric([one.model_id], one.recommended)
    prewarms = CounterMetricFamily(
        "kakeya_prewarms", "Prefixes by what became of them", labels=["outcome"]
    )
    for outcome, count in warmed.outcomes.items():
        prewarms.add_metric([outcome.value], count)
    tokens = CounterMetricFamily(
        "kakeya_prewarm_tokens", "Tokens of warmed prefixes", labels=["kind"]
    )
    tokens.add_metric(["cached"], warmed.cached_tokens)
    tokens.add_metric(["computed"], warmed.computed_tokens)
    yield from (opened, parallel, wanted, prewarms, tokens)
    yield GaugeMetricFamily("kakeya_prewarms_queued", "Prefixes that wait", value=warmed.queued)
    yield GaugeMetricFamily(
        "kakeya_prefixes_kept_warm", "Prefixes that are looked after", value=warmed.kept
    )


def _crowded(one: SlotStatus) -> str:
    if not one.is_crowded:
        return ""
    seen = f"{one.high_water} conversations were open at once on {one.parallel} slots; "
    if one.recommended >= one.high_water:
        return f"{seen}precache.parallel = {one.recommended} would give each its own"
    if one.recommended > one.parallel:
        return f"{seen}memory holds precache.parallel = {one.recommended}, the others use blocks"
    return f"{seen}memory holds no more, the others use blocks"
