"""Figures of the memory ledger, and the tables that status shows beside them.

`docs/dashboard.json` draws the figures and `docs/alerts.json` watches them; a test
holds both against the names made here. Ages are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from kakeya.core import errors
from kakeya.core.figures import (
    Durations,
    Figure,
    Json,
    as_json,
    counter,
    from_zero,
    gauge,
    histogram,
)
from kakeya.memory.arbiter.events import Event, Evicted, LoadFailure, ModelLoad, RequestRefused
from kakeya.memory.arbiter.plan import Exhausted, Reason, Snapshot
from kakeya.memory.arbiter.resident import Resident, ResidentKey
from kakeya.memory.leases.rules import CAPABILITY as JOB
from kakeya.memory.leases.rules import waits_on
from kakeya.memory.log import Happening, MemoryLog
from kakeya.memory.machine.panics import Profile
from kakeya.memory.plugins import PluginReport

LOAD_BOUNDS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0)
"""From a small model in the page cache to a large one from a slow disk."""
_JOBS = ("jobs", JOB)
"""The labels of all leases together, since each has a name of its own."""
_OUTCOMES = ("loaded", "failed")
_EVICTIONS = (Reason.SWAP.value, Reason.FIT.value, Reason.PRESSURE.value)
_REFUSALS = tuple(
    sorted(
        error.code
        for error in (
            errors.MemoryRefused,
            errors.DrainTimeout,
            errors.LeaseRefused,
            errors.DeadlineExceeded,
            errors.ModelLoading,
            errors.Refused,
            errors.LoadFailed,
            errors.PeerUnavailable,
            errors.NotFound,
        )
    )
)
"""Codes with which the queue refuses, or a load fails."""


class MemoryCounters:
    """Counts of events since the start; a listener of the arbiter."""

    def __init__(self) -> None:
        self.loads: Counter[tuple[str, str, str]] = Counter()
        self.evictions: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.exhausted = 0
        self.load_times = Durations(LOAD_BOUNDS_S)

    def take(self, happened: Event) -> None:
        """Count one event."""
        match happened:
            case ModelLoad():
                self.loads[*_load_labels(happened.key), "loaded"] += 1
                if happened.key.capability != JOB:  # a lease waits for no disk
                    self.load_times.add(happened.load_s)
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

    def figures(self, models: Iterable[ResidentKey] = ()) -> Iterator[Figure]:
        """Count loads, evictions and refusals; `models` are those that can be loaded."""
        known = {_load_labels(key) for key in models} | {(one, kind) for one, kind, _ in self.loads}
        capabilities = {kind for _, kind in known - {_JOBS}}
        loads = {(*labels, outcome): 0 for labels in known | {_JOBS} for outcome in _OUTCOMES}
        yield counter(
            "kakeya_memory_loads{model,capability,outcome}",
            "Loads by outcome",
            loads | self.loads,
        )
        yield counter(
            "kakeya_memory_evictions{capability,reason}",
            "Models that had to leave",
            from_zero(self.evictions, capabilities, _EVICTIONS),
        )
        yield counter(
            "kakeya_memory_refusals{code}",
            "Requests that were refused",
            from_zero(self.refusals, _REFUSALS),
        )
        yield counter(
            "kakeya_memory_exhausted", "Times that pressure found nothing to take", self.exhausted
        )
        yield histogram("kakeya_memory_load_seconds", "Time to load a model", self.load_times)


def _load_labels(key: ResidentKey) -> tuple[str, str]:
    return _JOBS if key.capability == JOB else (key.model_key, key.capability)


def memory_figures(ledger: Snapshot, *, is_careful: bool = False) -> Iterator[Figure]:
    """Budget, residents, tenants and foreign holders at one moment."""
    yield gauge(
        "kakeya_memory_bytes{state}",
        "Totals of the memory ledger",
        {
            "budget": ledger.budget_bytes,
            "committed": ledger.committed_bytes,
            "free": ledger.free_bytes,
            "resident": sum(one.bytes for one in ledger.residents),
        },
        {"budget": "budget_bytes", "committed": "committed_bytes"},
    )
    if ledger.available_bytes is not None:
        yield gauge(
            "kakeya_memory_available_bytes",
            "Bytes that the machine can still give",
            ledger.available_bytes,
        )
    yield gauge("kakeya_memory_pressure_level", "0 nominal, 1 low, 2 critical", ledger.level.value)
    yield gauge("kakeya_memory_waiting", "Requests in line for memory", len(ledger.waiting))
    yield gauge("kakeya_memory_careful", "1 while recent panics call for care", float(is_careful))
    yield from _residents(ledger.residents)
    yield gauge(
        "kakeya_memory_tenant_bytes{tenant,kind}",
        "Bytes of caches, pages and sessions",
        {
            (tenant.name, kind): size
            for tenant in ledger.tenants
            for kind, size in (
                ("held", tenant.held_bytes),
                ("spare", tenant.spare_bytes),
                ("expired", tenant.expired_bytes),
            )
        },
    )
    yield gauge(
        "kakeya_memory_foreign_bytes{holder}",
        "Bytes held outside of the node's models",
        ledger.foreign,
        "foreign.{}",
    )


def _residents(residents: tuple[Resident, ...]) -> Iterator[Figure]:
    by_label = {(one.key.model_key, one.key.capability, one.role.name): one for one in residents}
    yield gauge(
        "kakeya_memory_resident_bytes{model,capability,role,kind}",
        "Bytes of a model: estimated before its load, and counted now",
        {
            (*labels, kind): size
            for labels, one in by_label.items()
            for kind, size in (
                ("estimate", one.estimate_bytes),
                ("counted", one.bytes),
                ("unfilled", one.unfilled_bytes),
            )
        },
    )
    yield gauge(
        "kakeya_memory_resident_leases{model,capability,role}",
        "Users of a model in memory at this moment",
        {labels: len(one.leases) for labels, one in by_label.items()},
    )


def describe_memory(
    ledger: Snapshot,
    log: MemoryLog,
    *,
    now: float,
    profile: Profile,
    plugins: Sequence[PluginReport],
    engines: Mapping[str, object],
    leases: Mapping[str, object],
) -> Json:
    """Describe the ledger and the last events as JSON; `now` is monotonic."""
    return as_json(memory_figures(ledger)) | {
        "free_bytes": max(0, ledger.free_bytes),
        "available_bytes": ledger.available_bytes,
        "level": ledger.level.name.lower(),
        "source": log.source,
        "profile": {"name": profile.name, "reason": profile.reason},
        "residents": [_resident(one, now) for one in ledger.residents if not one.role.is_room],
        "tenants": [
            {**asdict(tenant), "rung": tenant.rung.name.lower()} for tenant in ledger.tenants
        ],
        "waiting": [_named(key) for key in ledger.waiting],
        "kept_places": [_named(key) for key in ledger.kept],
        "last_events": [_happening(one, now) for one in reversed(log.last())],
        "last_evictions": [_happening(one, now) for one in reversed(log.evictions())],
        "engines": dict(engines),
        "plugins": [asdict(report) for report in plugins],
        "leases": dict(leases),
    }


def _happening(one: Happening, now: float) -> Json:
    age_s = round(now - one.at_mono, 1)
    return {"what": one.what, "model": one.model, "why": one.why, "age_s": age_s}


def _named(key: ResidentKey) -> Json:
    return {"model": key.model_key, "capability": key.capability}


def _resident(resident: Resident, now: float) -> Json:
    measured = resident.measured_bytes
    return {
        "model": resident.key.model_key,
        "capability": resident.key.capability,
        "role": resident.role.name,
        "state": "leaving" if resident.is_leaving else resident.state.value,
        "estimate_bytes": resident.estimate_bytes,
        "measured_bytes": None if measured is None else measured - resident.unfilled_bytes,
        "lent_bytes": resident.bytes,
        "leases": len(resident.leases),
        "idle_s": 0.0 if resident.leases else round(max(0.0, now - resident.last_used_mono), 1),
        "warm_s": round(max(0.0, resident.idle_since_mono + resident.warmth.stay_warm_s - now), 1),
        "is_pinned": resident.warmth.is_pinned,
    }
