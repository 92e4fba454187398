"""The ledger as JSON, for status; ages in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from kakeya.memory.arbiter.plan import Snapshot
from kakeya.memory.arbiter.resident import Resident, ResidentKey
from kakeya.memory.log import Happening, MemoryLog
from kakeya.memory.machine.panics import Profile
from kakeya.memory.plugins import PluginReport

Json = dict[str, object]


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
    """Describe who occupies what, who waits, and what happened lately; `now` is monotonic."""
    return {
        "budget_bytes": ledger.budget_bytes,
        "committed_bytes": ledger.committed_bytes,
        "free_bytes": max(0, ledger.free_bytes),
        "available_bytes": ledger.available_bytes,
        "level": ledger.level.name.lower(),
        "source": log.source,
        "profile": {"name": profile.name, "reason": profile.reason},
        "residents": [_resident(one, now) for one in ledger.residents if not one.role.is_room],
        "tenants": [
            {**asdict(tenant), "rung": tenant.rung.name.lower()} for tenant in ledger.tenants
        ],
        "foreign": dict(ledger.foreign),
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
        "is_pinned": resident.warmth.is_pinned,
    }
