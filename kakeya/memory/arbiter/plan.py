"""Requests to the arbiter and its answers: values without behaviour.

An `ArbiterOutcome` is all that follows from one event, for the keeper to perform: leases to hand
out, requests to refuse, plans to carry out. A plan is frozen, and the ledger reserves all that it
names when it is made, so that no other request can take its room while it is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kakeya.core import errors
from kakeya.generation.waiting import WaitTeller
from kakeya.memory.arbiter.policy import PressureLevel, ShrinkTenant, Tenant
from kakeya.memory.arbiter.resident import (
    COLD,
    LeaseId,
    RequestPriority,
    Resident,
    ResidentKey,
    Role,
    Warmth,
)

FOREVER = float("inf")


class Reason(StrEnum):
    """Why a resident leaves."""

    RELEASE = "release"
    SWAP = "swap"
    FIT = "fit"
    PRESSURE = "pressure"
    IDLE = "idle"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request to use one model. `may_displace_text` lets it take the room of idle text models."""

    key: ResidentKey
    role: Role
    estimate_bytes: int
    priority: RequestPriority = RequestPriority.NORMAL
    warmth: Warmth = COLD
    deadline_mono: float = FOREVER
    may_displace_text: bool = False
    load_s: float = 0.0
    """The estimate of its load; 0 = not known."""
    run_s: float = 0.0
    """What it needs after the load, as measured; 0 = not known."""

    def __post_init__(self) -> None:
        if self.estimate_bytes < 0:
            raise errors.InvalidArgument(
                f"{self.key} is estimated at {self.estimate_bytes} bytes; 0 or more is needed",
                param="estimate_bytes",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of a caller for its lease.

    `timeout_s` covers waiting, loading and running. `warmth` overrides the capability's for the
    model from now on. `may_displace_text` lets the load take the room of idle text models. `run_s`
    is what a caller that runs the model by itself needs after a load, as measured; 0 = not known.
    `wait` is told for what the request waits at each moment, until its run begins.
    """

    priority: RequestPriority = RequestPriority.NORMAL
    timeout_s: float = FOREVER
    warmth: Warmth | None = None
    may_displace_text: bool = False
    run_s: float = 0.0
    wait: WaitTeller | None = None


PLAIN = Terms()


@dataclass(frozen=True, slots=True)
class Grant:
    """A request got its lease."""

    lease: LeaseId
    key: ResidentKey


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that waited is not served."""

    lease: LeaseId
    error: errors.KakeyaError
    key: ResidentKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentEviction:
    """An idle resident leaves, and frees so many bytes."""

    key: ResidentKey
    reason: Reason
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Shrinks first, then evictions, then a load.

    `asked_bytes` had to become free; the plan frees `short_bytes` less than that.
    """

    plan_id: int
    evict: tuple[ResidentEviction, ...] = ()
    shrink: tuple[ShrinkTenant, ...] = ()
    load: ResidentKey | None = None
    is_preload: bool = False
    """Loads although no request waits for the model."""
    asked_bytes: int = 0
    short_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """Pressure lasts and nothing could be evicted, at first or for a while: all residents are in
    use, pinned or text."""

    level: PressureLevel
    kept: tuple[ResidentKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArbiterOutcome:
    """All consequences of one event."""

    grants: tuple[Grant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    plans: tuple[Plan, ...] = ()
    exhausted: Exhausted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The ledger at one moment, for status and card. Estimates and measurements stand side by
    side."""

    budget_bytes: int
    committed_bytes: int
    free_bytes: int
    available_bytes: int | None
    level: PressureLevel
    residents: tuple[Resident, ...]
    tenants: tuple[Tenant, ...]
    foreign: Mapping[str, int]
    waiting: tuple[ResidentKey, ...]
    kept: tuple[ResidentKey, ...] = ()
    """The residents that refused requests with a kept place in the queue want."""
    unfilled_bytes: int = 0
    """Committed bytes that are lent and not used yet."""
    spare_bytes: int = 0
    """Free bytes for loads that can be done without."""
    promised_bytes: int = 0
    """Free bytes that tenants still have to give up."""
