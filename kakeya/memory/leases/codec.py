"""Lines of the book as JSON texts, the same in every store.

A line that does not read back exactly is damaged: `PeerProtocol` names it, and its store decides
what follows. `FORMAT` is raised when an older program would misread a newer one's lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kakeya.core import errors
from kakeya.memory.arbiter.resident import RequestPriority
from kakeya.memory.leases.lease import (
    Book,
    Drain,
    Granter,
    LeaseDenial,
    LeaseState,
    Process,
    ProcessLease,
    Wish,
)

FORMAT = 1


def encode_lease(lease: ProcessLease) -> str:
    """Write one lease."""
    wish, no = lease.wish, lease.no
    fields = {
        "number": lease.number,
        "name": wish.name,
        "bytes": wish.size_bytes,
        "priority": int(wish.priority),
        "resources": wish.resources,
        "boot": lease.boot,
        "processes": [_process(one) for one in lease.processes],
        "asked_mono": lease.asked_mono,
        "beat_mono": lease.beat_mono,
        "state": lease.state,
        "taken": lease.taken,
        "granted_mono": lease.granted_mono,
        "used_bytes": lease.used_bytes,
        "note": lease.note,
        "no": None if no is None else [no.code, no.message, no.retry_after_s],
    }
    return json.dumps(fields)


def decode_lease(lease_id: str, text: str) -> ProcessLease:
    """Read what `encode_lease` wrote. Raises PeerProtocol."""
    try:
        return _lease(lease_id, json.loads(text))
    except (ValueError, KeyError, TypeError, errors.KakeyaError) as problem:
        raise errors.PeerProtocol(f"lease {lease_id!r} in the store: {problem!r}") from problem


def encode_head(book: Book) -> str:
    """Write the fields of the book beside its lines."""
    granter, drain = book.granter, book.drain
    fields = {
        "format": FORMAT,
        "next_number": book.next_number,
        "budget_bytes": book.budget_bytes,
        "granter": granter
        and [granter.node_id, _process(granter.process), granter.boot, granter.beat_mono],
        "drain": drain and [drain.boot, drain.pid, drain.began_at],
    }
    return json.dumps(fields)


def decode_book(head: str | None, lines: Mapping[str, str]) -> tuple[Book, dict[str, str]]:
    """Read a book, and the faults of its unreadable lines, by id.

    Raises StoreFailed for a book of a newer program, PeerProtocol for a head that is none.
    """
    leases: dict[str, ProcessLease] = {}
    damaged: dict[str, str] = {}
    for lease_id, text in lines.items():
        try:
            leases[lease_id] = decode_lease(lease_id, text)
        except errors.PeerProtocol as problem:
            damaged[lease_id] = problem.message
    if head is None:
        highest = max((one.number for one in leases.values()), default=0)
        return Book(leases=leases, next_number=highest + 1), damaged
    try:
        return _book(json.loads(head), leases), damaged
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise errors.PeerProtocol(f"head of the lease book: {problem!r}") from problem


def _book(fields: Mapping[str, Any], leases: Mapping[str, ProcessLease]) -> Book:
    if int(fields["format"]) > FORMAT:
        raise errors.StoreFailed(
            f"the lease book has format {fields['format']}, this program reads up to {FORMAT}; "
            "use the newer kakeya that wrote it"
        )
    budget, granter, drain = fields["budget_bytes"], fields["granter"], fields["drain"]
    return Book(
        leases=leases,
        next_number=int(fields["next_number"]),
        budget_bytes=None if budget is None else int(budget),
        granter=granter
        and Granter(
            node_id=str(granter[0]),
            process=_read_process(granter[1]),
            boot=str(granter[2]),
            beat_mono=_finite(granter[3]),
        ),
        drain=drain and Drain(boot=str(drain[0]), pid=int(drain[1]), began_at=_finite(drain[2])),
    )


def _lease(lease_id: str, fields: Mapping[str, Any]) -> ProcessLease:
    granted, no = fields["granted_mono"], fields["no"]
    wish = Wish(
        name=str(fields["name"]),
        size_bytes=int(fields["bytes"]),
        priority=RequestPriority(fields["priority"]),
        resources=tuple(map(str, fields["resources"])),
    )
    processes = tuple(map(_read_process, fields["processes"]))
    taken = tuple(map(str, fields["taken"]))
    if not processes or taken != wish.resources[: len(taken)]:
        raise ValueError(f"processes {processes}, taken {taken} of {wish.resources}")
    return ProcessLease(
        lease_id=lease_id,
        number=int(fields["number"]),
        wish=wish,
        boot=str(fields["boot"]),
        processes=processes,
        asked_mono=_finite(fields["asked_mono"]),
        beat_mono=_finite(fields["beat_mono"]),
        state=LeaseState(fields["state"]),
        taken=taken,
        granted_mono=None if granted is None else _finite(granted),
        used_bytes=int(fields["used_bytes"]),
        note=str(fields["note"]),
        no=no and LeaseDenial(code=str(no[0]), message=str(no[1]), retry_after_s=no[2]),
    )


def _process(process: Process) -> list[object]:
    return [process.pid, process.started, process.space]


def _read_process(fields: list[Any]) -> Process:
    pid, started, space = fields
    if int(pid) <= 0:
        raise ValueError(f"pid {pid}")
    return Process(int(pid), str(started), str(space))


def _finite(value: Any) -> float:  # noqa: ANN401 - JSON
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no time")
    return number
