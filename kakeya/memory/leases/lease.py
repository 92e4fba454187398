"""Leases of memory that processes hold: values, and the book that all of them share.

A training job, a tool or any process that needs much memory asks for a lease. The book lists the
waiting and the granted leases, names the node that grants, and says whether leases are given at
all. It lies in a store (`store`); `rules` are its changes. There is one book for one machine:
memory and GPUs are the machine's own.

Stamps are monotonic, which all processes of a machine share until its next boot; those of another
boot mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kakeya.core import errors
from kakeya.core.figures import Json
from kakeya.core.units import MIB
from kakeya.memory.arbiter.resident import RequestPriority

MAX_BYTES = 1 << 50
MAX_NAME = 64
MAX_RESOURCES = 32
_RESOURCE = re.compile(r"[a-z][a-z0-9_-]{0,31}(?::[a-z0-9_.-]{1,32})?")
_MEMORY = "memory"
_TOLERANCE = 1.1
"""A holder that uses more than this times its lease is reported."""


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One process of a machine: a pid alone may be another process by tomorrow.

    `started` is its start as the system counts it. `space` is the boot and the container in which
    the pid is valid.
    """

    pid: int
    started: str
    space: str


class LeaseState(StrEnum):
    """The stages of a lease; a released one is not in the book."""

    WAITING = "waiting"
    GRANTED = "granted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The request for a lease: bytes of memory, and named things like `gpu:0` that have one
    holder each."""

    name: str
    size_bytes: int
    priority: RequestPriority = RequestPriority.NORMAL
    resources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.size_bytes <= MAX_BYTES:
            raise errors.InvalidArgument(
                f"a lease of {self.size_bytes} bytes; 1 MB to {MAX_BYTES // MIB} MB can be asked",
                param="size_bytes",
            )
        if not (0 < len(self.name) <= MAX_NAME and self.name.isprintable() and self.name.strip()):
            raise errors.InvalidArgument(
                f"lease name {self.name[:80]!r}; 1 to {MAX_NAME} printable characters are needed",
                param="name",
            )
        if len(self.resources) > MAX_RESOURCES:
            raise errors.InvalidArgument(
                f"{len(self.resources)} resources; at most {MAX_RESOURCES} can be asked at once",
                param="resources",
            )
        for resource in self.resources:
            if not _RESOURCE.fullmatch(resource) or resource == _MEMORY:
                raise errors.InvalidArgument(
                    f"resource {resource[:80]!r}; a word in lower case is needed, like gpu:0 "
                    "(memory is asked for in MB)",
                    param="resources",
                )
        if tuple(in_order(self.resources)) != self.resources:
            raise errors.InvalidArgument(
                f"resources {self.resources} are not in their order, or twice; see in_order",
                param="resources",
            )


def in_order(resources: Iterable[str]) -> list[str]:
    """The order in which all leases take resources, so that no circle of waits can form: by
    name, with numbers as numbers, each once. Memory comes after all of them."""
    return sorted(set(resources), key=_natural)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    parts = re.split(r"(\d+)", name)
    key = ((1, int(part), part) if part.isdigit() else (0, 0, part) for part in parts if part)
    return tuple(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseDenial:
    """The reason of a refusal, in the words of an error; see `errors` for `code`."""

    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLease:
    """One line of the book.

    `number` is the place in the order of asking. `taken` are the first of the wish's resources,
    which no other lease has. `processes` are the holder and the processes that it started, as far
    as known. `note` tells people the reason of a wait.
    """

    lease_id: str
    number: int
    wish: Wish
    boot: str
    processes: tuple[Process, ...]
    asked_mono: float
    beat_mono: float
    state: LeaseState = LeaseState.WAITING
    taken: tuple[str, ...] = ()
    granted_mono: float | None = None
    used_bytes: int = 0
    note: str = ""
    no: LeaseDenial | None = None

    @property
    def pid(self) -> int:
        """The pid of the process that asked."""
        return self.processes[0].pid

    @property
    def missing(self) -> tuple[str, ...]:
        """The named resources that it has not taken."""
        return self.wish.resources[len(self.taken) :]

    @property
    def held_bytes(self) -> int:
        """The bytes that the machine has to keep for it."""
        is_held = self.state is LeaseState.GRANTED
        return max(self.wish.size_bytes, self.used_bytes) if is_held else 0

    @property
    def unfilled_bytes(self) -> int:
        """The bytes by which its holder may still grow within the lease."""
        return max(0, self.held_bytes - self.used_bytes)

    def is_exceeded_by(self, used_bytes: int) -> bool:
        """Whether the holder uses clearly more than it leased."""
        return used_bytes > self.wish.size_bytes * _TOLERANCE

    def taking(self, resource: str) -> ProcessLease:
        """The lease with its next resource. Raises InvariantBroken out of order."""
        if not self.missing or self.missing[0] != resource:
            raise errors.InvariantBroken(
                "resources are taken in order", f"{self.lease_id} takes {resource}: {self.missing}"
            )
        return replace(self, taken=(*self.taken, resource))


@dataclass(frozen=True, slots=True, kw_only=True)
class Granter:
    """The node that grants, while its process lives."""

    node_id: str
    process: Process
    boot: str
    beat_mono: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A stop of all leases, until the next boot or until an owner ends it."""

    boot: str
    pid: int
    began_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """The state that all processes of a machine share. `budget_bytes` is the last granter's,
    None = none."""

    leases: Mapping[str, ProcessLease] = field(default_factory=dict)
    granter: Granter | None = None
    budget_bytes: int | None = None
    drain: Drain | None = None
    next_number: int = 1

    def put(self, lease: ProcessLease) -> Book:
        """The book with this line."""
        return replace(self, leases={**self.leases, lease.lease_id: lease})

    def without(self, *lease_ids: str) -> Book:
        """The book without some lines."""
        kept = {key: one for key, one in self.leases.items() if key not in lease_ids}
        return replace(self, leases=kept) if len(kept) < len(self.leases) else self

    def of(self, state: LeaseState) -> tuple[ProcessLease, ...]:
        """The leases of a state, in the order of asking."""
        found = (one for one in self.leases.values() if one.state is state)
        return tuple(sorted(found, key=lambda one: one.number))

    def holder_of(self, resource: str) -> ProcessLease | None:
        """The lease that has a named resource."""
        takers = (one for one in self.leases.values() if resource in one.taken)
        return next(takers, None)


def describe_lease(lease: ProcessLease, used_bytes: int | None, now: float) -> Json:
    """Describe a lease as JSON, for status and `kakeya lease list`.

    `used_bytes` None = not measured here, so the book's figure is shown; `now` is monotonic.
    """
    used = lease.used_bytes if used_bytes is None else used_bytes
    since = lease.asked_mono if lease.granted_mono is None else lease.granted_mono
    return {
        "id": lease.lease_id,
        "name": lease.wish.name,
        "state": lease.state.value,
        "priority": lease.wish.priority.name.lower(),
        "bytes": lease.wish.size_bytes,
        "used_bytes": used,
        "is_over": lease.is_exceeded_by(used),
        "resources": list(lease.wish.resources),
        "pid": lease.pid,
        "for_s": round(max(0.0, now - since), 1),
        "note": lease.no.message if lease.no else lease.note,
    }
