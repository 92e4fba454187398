"""Figures of adapters: tiers, waits of requests for them, and moves; with tables for status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kakeya.adapters.places import AdapterPlaces
from kakeya.adapters.slot_queue import SlotQueue
from kakeya.adapters.tiers import AdapterTable, Tier
from kakeya.core.figures import Durations, Figure, Json, counter, gauge, histogram

BOUNDS_S = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 10.0)
"""From an adapter in a slot to one that is read from disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSnapshot:
    """An adapter at one moment: where it is, its users now, and its requests in the last minute."""

    tier: Tier
    leases: int
    uses: int


def queue_status(table: AdapterTable, base: str, queue: SlotQueue, now: float) -> Json:
    """One model's slots, the adapters in them, and the number of waiting requests, as JSON."""
    return {
        "slots": queue.slots,
        "hot": [
            {
                "adapter": adapter.adapter_id,
                "leases": adapter.leases,
                "uses": table.uses(adapter, now),
            }
            for adapter in table.hot(base)
        ],
        "waiting": queue.waiting,
    }


def adapter_figures(
    table: AdapterTable,
    waiting: Mapping[str, int],
    times: Mapping[Tier, Durations],
    places: AdapterPlaces,
) -> Iterator[Figure]:
    """Adapters by tier and how they moved; `waiting` requests are counted by base model."""
    hot = sum(len(table.hot(base)) for base in waiting)
    warm = sum(not adapter.is_hot for adapter in table.warm())
    yield gauge(
        "kakeya_adapters{tier}",
        "Adapters by where they are",
        {"hot": hot, "warm": warm, "cold": len(table) - hot - warm},
    )
    yield gauge("kakeya_adapter_waiting{model}", "Requests that wait for an adapter", waiting)
    yield counter(
        "kakeya_adapter_acquires{tier}",
        "Adapters leased, by where they were",
        {tier.name.lower(): taken.total for tier, taken in times.items()},
        "acquired.{}",
    )
    yield histogram(
        "kakeya_adapter_acquire_seconds{tier}",
        "Time until a request could go on with its adapter",
        {tier.name.lower(): taken for tier, taken in times.items()},
    )
    yield counter(
        "kakeya_adapter_moves{to}",
        "Moves between tiers",
        {tier.name.lower(): count for tier, count in places.moves.items()},
    )
    yield counter(
        "kakeya_adapters_rounded", "Idle exact adapters whose pages were rounded", places.rounded
    )
