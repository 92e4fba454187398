"""What the arbiter's ledger holds and what became of loads, as Prometheus metrics.

`docs/memory-dashboard.json` draws them and `docs/memory-alerts.json` watches them; a test holds
both against the names made here. Counters are fed by the arbiter's events, figures are read at
each scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kakeya.memory.arbiter.events import Event, Evicted, LoadFailure, ModelLoad, RequestRefused
from kakeya.memory.arbiter.plan import Exhausted, Snapshot
from kakeya.memory.arbiter.resident import Resident, ResidentKey
from kakeya.memory.leases.rules import CAPABILITY as JOB
from kakeya.memory.leases.rules import waits_on

LOAD_BOUNDS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0)
"""From a small model in the page cache to a large one from a slow disk."""
_RESIDENT = ("model", "capability", "role")


class MemoryCounters:
    """What happened since the start; a listener of the arbiter's events."""

    def __init__(self) -> None:
        self.loads: Counter[tuple[str, str, str]] = Counter()
        self.evictions: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.exhausted = 0
        self.load_counts = [0] * (len(LOAD_BOUNDS_S) + 1)
        self.load_sum_s = 0.0

    def take(self, happened: Event) -> None:
        """Count one event."""
        match happened:
            case ModelLoad():
                self.loads[*_load_labels(happened.key), "loaded"] += 1
                if happened.key.capability != JOB:  # a lease waits for no disk
                    self.load_counts[bisect_left(LOAD_BOUNDS_S, happened.load_s)] += 1
                    self.load_sum_s += happened.load_s
            case LoadFailure():
                self.loads[*_load_labels(happened.key), "failed"] += 1
            case Evicted():
                self.evictions[happened.key.capability, happened.reason.value] += 1
            case RequestRefused() if not waits_on(happened.key, happened.error):
                # By the error alone: callers may ask for any name.
                self.refusals[happened.error.code] += 1
            case Exhausted():
                self.exhausted += 1
            case _:
                pass


def _load_labels(key: ResidentKey) -> tuple[str, str]:
    """Model and capability; jobs together, since each lease has a name that never comes again."""
    return ("jobs" if key.capability == JOB else key.model_key), key.capability


def memory_metrics(
    ledger: Snapshot, counters: MemoryCounters, *, is_careful: bool = False
) -> Iterator[Metric]:
    """Budget, residents, tenants, holders outside, and what became of requests for memory."""
    totals = GaugeMetricFamily("kakeya_memory_bytes", "The ledger's totals", labels=["state"])
    resident = sum(one.bytes for one in ledger.residents)
    for state, size in (
        ("budget", ledger.budget_bytes),
        ("committed", ledger.committed_bytes),
        ("free", ledger.free_bytes),
        ("resident", resident),
    ):
        totals.add_metric([state], size)
    yield totals
    if ledger.available_bytes is not None:
        yield _gauge("available_bytes", "What the machine can still give", ledger.available_bytes)
    yield _gauge("pressure_level", "0 nominal, 1 low, 2 critical", ledger.level.value)
    yield _gauge("waiting", "Requests in line for memory", len(ledger.waiting))
    yield _gauge("careful", "1 while recent panics call for care", float(is_careful))
    yield from _residents(ledger.residents)
    yield from _holders(ledger)
    yield from _counted(counters)


def _residents(residents: tuple[Resident, ...]) -> Iterator[Metric]:
    sizes = GaugeMetricFamily(
        "kakeya_memory_resident_bytes",
        "What was estimated before the load, and what is counted now",
        labels=[*_RESIDENT, "kind"],
    )
    leases = GaugeMetricFamily("kakeya_memory_resident_leases", "Users now", labels=_RESIDENT)
    for one in residents:
        labels = [one.key.model_key, one.key.capability, one.role.name]
        sizes.add_metric([*labels, "estimate"], one.estimate_bytes)
        sizes.add_metric([*labels, "counted"], one.bytes)
        sizes.add_metric([*labels, "unfilled"], one.unfilled_bytes)
        leases.add_metric(labels, len(one.leases))
    yield from (sizes, leases)


def _holders(ledger: Snapshot) -> Iterator[Metric]:
    tenants = GaugeMetricFamily(
        "kakeya_memory_tenant_bytes", "Caches, pages, sessions", labels=["tenant", "kind"]
    )
    for tenant in ledger.tenants:
        tenants.add_metric([tenant.name, "held"], tenant.held_bytes)
        tenants.add_metric([tenant.name, "spare"], tenant.spare_bytes)
        tenants.add_metric([tenant.name, "expired"], tenant.expired_bytes)
    foreign = GaugeMetricFamily(
        "kakeya_memory_foreign_bytes", "Held outside the node's models", labels=["holder"]
    )
    for holder, size in ledger.foreign.items():
        foreign.add_metric([holder], size)
    yield from (tenants, foreign)


def _counted(counters: MemoryCounters) -> Iterator[Metric]:
    loads = CounterMetricFamily(
        "kakeya_memory_loads", "Loads by outcome", labels=["model", "capability", "outcome"]
    )
    for load, count in counters.loads.items():
        loads.add_metric(list(load), count)
    evictions = CounterMetricFamily(
        "kakeya_memory_evictions", "Models that had to leave", labels=["capability", "reason"]
    )
    for eviction, count in counters.evictions.items():
        evictions.add_metric(list(eviction), count)
    refusals = CounterMetricFamily(
        "kakeya_memory_refusals", "Requests that were refused", labels=["code"]
    )
    for code, count in counters.refusals.items():
        refusals.add_metric([code], count)
    yield from (loads, evictions, refusals)
    yield CounterMetricFamily(
        "kakeya_memory_exhausted",
        "Times that pressure found nothing to take",
        value=counters.exhausted,
    )
    bounds = [*map(repr, LOAD_BOUNDS_S), "+Inf"]
    yield HistogramMetricFamily(
        "kakeya_memory_load_seconds",
        "Time to load a model",
        buckets=list(zip(bounds, accumulate(counters.load_counts), strict=True)),
        sum_value=counters.load_sum_s,
    )


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kakeya_memory_{name}", meaning, value=value)
