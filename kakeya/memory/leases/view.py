"""One lease as JSON, as status and `kakeya lease list` show it."""

from __future__ import annotations

from kakeya.memory.leases.lease import ProcessLease

_TOLERANCE = 1.1
"""By how much a holder may use more than it leased before people are told."""


def is_over(lease: ProcessLease, used_bytes: int) -> bool:
    """Whether a holder uses clearly more than it leased."""
    return used_bytes > lease.wish.size_bytes * _TOLERANCE


def describe_lease(lease: ProcessLease, used_bytes: int | None, now: float) -> dict[str, object]:
    """`used_bytes` None = not measured here: what the book says; `now` is monotonic."""
    used = lease.used_bytes if used_bytes is None else used_bytes
    since = lease.asked_mono if lease.granted_mono is None else lease.granted_mono
    return {
        "id": lease.lease_id,
        "name": lease.wish.name,
        "state": lease.state.value,
        "priority": lease.wish.priority.name.lower(),
        "bytes": lease.wish.size_bytes,
        "used_bytes": used,
        "is_over": is_over(lease, used),
        "resources": list(lease.wish.resources),
        "pid": lease.pid,
        "for_s": round(max(0.0, now - since), 1),
        "note": lease.no.message if lease.no else lease.note,
    }
