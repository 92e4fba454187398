"""What adapters look like from outside: how long they took to be had by where they were, metrics,
status."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kakeya.adapters.slot_queue import AdapterLine
from kakeya.adapters.tiers import AdapterTable, Tier

BOUNDS_S = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSnapshot:
    """An adapter at one moment: where it is, who uses it now, and how often in the last minute."""

    tier: Tier
    leases: int
    uses: int


class AcquireTimes:
    """Counts of one tier, by how long it took."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(self.counts)


def line_status(table: AdapterTable, base: str, line: AdapterLine, now: float) -> dict[str, object]:
    """One model's slots, who is in them, and how many wait, as JSON."""
    return {
        "slots": line.slots,
        "hot": [
            {
                "adapter": adapter.adapter_id,
                "leases": adapter.leases,
                "uses": table.uses(adapter, now),
            }
            for adapter in table.hot(base)
        ],
        "waiting": line.waiting,
    }


def adapter_metrics(
    table: AdapterTable,
    bases: Mapping[str, int],
    times: Mapping[Tier, AcquireTimes],
    moves: Mapping[Tier, int],
) -> Iterator[Metric]:
    """What lies where, and how it got there; `bases` are the models, with who waits for each."""
    tiers = GaugeMetricFamily("kakeya_adapters", "Adapters by where they are", labels=["tier"])
    hot = sum(len(table.hot(base)) for base in bases)
    warm = sum(not adapter.is_hot for adapter in table.warm())
    for tier, count in ((Tier.HOT, hot), (Tier.WARM, warm), (Tier.COLD, len(table) - hot - warm)):
        tiers.add_metric([tier.name.lower()], count)
    waiting = GaugeMetricFamily(
        "kakeya_adapter_waiting", "Requests that wait for an adapter", labels=["model"]
    )
    for base, count in bases.items():
        waiting.add_metric([base], count)
    acquires = CounterMetricFamily(
        "kakeya_adapter_acquires", "Adapters leased, by where they were", labels=["tier"]
    )
    latency = HistogramMetricFamily(
        "kakeya_adapter_acquire_seconds",
        "Time until a request could go on with its adapter",
        labels=["tier"],
    )
    bounds = [*map(repr, BOUNDS_S), "+Inf"]
    for tier, taken in times.items():
        acquires.add_metric([tier.name.lower()], taken.total)
        latency.add_metric(
            [tier.name.lower()],
            buckets=list(zip(bounds, accumulate(taken.counts), strict=True)),
            sum_value=taken.sum_s,
        )
    moved = CounterMetricFamily("kakeya_adapter_moves", "Moves between tiers", labels=["to"])
    for tier, count in moves.items():
        moved.add_metric([tier.name.lower()], count)
    yield from (tiers, waiting, acquires, latency, moved)
