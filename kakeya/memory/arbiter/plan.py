"""What the arbiter is asked, and what it answers: values without behaviour.

An `ArbiterOutcome` is all that follows from one event, for the keeper to perform: leases to hand
out, requests to refuse, plans to carry out. A plan is frozen: what it names has been taken out of
everybody else's reach when it was made, so its room cannot be robbed while it is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kakeya.core import errors
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
    """A wish to use one model. `may_displace_text` lets it take the room of idle text models."""

    key: ResidentKey
    role: Role
    estimate_bytes: int
    priority: RequestPriority = RequestPriority.NORMAL
    warmth: Warmth = COLD
    deadline_mono: float = FOREVER
    may_displace_text: bool = False

    def __post_init__(self) -> None:
        if self.estimate_bytes < 0:
            raise errors.InvalidArgument(
                f"{self.key} is estimated at {self.estimate_bytes} bytes; 0 or more is needed",
                param="estimate_bytes",
            )


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease is held from now on."""

    lease: LeaseId
    key: ResidentKey


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that waited will not be served."""

    lease: LeaseId
    error: errors.KakeyaError
    key: ResidentKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentEviction:
    """A resident that nobody uses goes, and gives back so many bytes."""

    key: ResidentKey
    reason: Reason
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """First the shrinks, then the evictions, then the load.

    `asked_bytes` is what had to become free, `short_bytes` what the plan cannot give.
    """

    plan_id: int
    evict: tuple[ResidentEviction, ...] = ()
    shrink: tuple[ShrinkTenant, ...] = ()
    load: ResidentKey | None = None
    is_preload: bool = False
    """Loads although no request waits for it."""
    asked_bytes: int = 0
    short_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """Pressure lasts, and nothing can be taken: what is left is in use, pinned or text."""

    level: PressureLevel
    kept: tuple[ResidentKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArbiterOutcome:
    """What follows from one event."""

    grants: tuple[Grant, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    plans: tuple[Plan, ...] = ()
    exhausted: Exhausted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The ledger as status and card show it. Estimates and measurements stand side by side."""

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
    """What those want who were refused, and whose places in the line are kept for a while."""
    unfilled_bytes: int = 0
    """What of the committed bytes is lent and not used yet."""
    spare_bytes: int = 0
    """What of the free bytes may be had by who can do without."""
    promised_bytes: int = 0
    """What of the free bytes tenants are still going to give up, or not."""
