"""The two orders of eviction, the ladder of tenants above them, ageing and the budget. All is pure.

    PRESSURE    (role priority, least urgent, longest unused, id)   the machine lacks memory
    FIT         (least urgent, role priority, longest unused, id)   a request needs room

A resident is as urgent as its last request, one class less for each `stay_warm_s` that it idles;
with leases it is as urgent as the most urgent of them. A waiting request gains a class for each
`age_s`, without end, so that it passes any resident at last. Bytes that cost little to get back are
taken before any model:

    expired entries -> live entries of caches -> spare pages -> idle sessions -> models
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from kakeya.core import errors
from kakeya.core.units import MIB, format_bytes
from kakeya.memory.arbiter.resident import (
    WORST_RANK,
    RequestPriority,
    Resident,
    ResidentKey,
    Role,
    State,
)

RESERVE_BYTES = 1536 * MIB
"""Left to the operating system and other programs."""


_ALL = 1 << 62


class PressureLevel(IntEnum):
    """The machine's shortage of memory; of several levels the maximum counts."""

    NOMINAL = 0
    LOW = 1
    CRITICAL = 2


class Rung(IntEnum):
    """The kinds of tenants, in the order in which their spare bytes are asked back.

    Low pressure alone leaves live cache entries where they are.
    """

    CACHE = 1
    PAGES = 2
    SESSIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Bytes of a holder of many small things: a cache, the page arena, the sessions.

    It gives up expired bytes before spare ones; the rest of `held_bytes` is in use. `lent_bytes`
    are beside them, in room that stays lent to an engine: given up, they help a machine that is
    short of memory, and make no room in the ledger.
    """

    name: str
    rung: Rung
    held_bytes: int
    expired_bytes: int = 0
    spare_bytes: int = 0
    lent_bytes: int = 0

    def __post_init__(self) -> None:
        parts = (self.expired_bytes, self.spare_bytes)
        if min(*parts, self.lent_bytes) < 0 or sum(parts) > self.held_bytes:
            raise errors.InvalidArgument(
                f"tenant {self.name!r} holds {self.held_bytes} bytes and would give up "
                f"{self.expired_bytes} + {self.spare_bytes}; it can give up no more than it holds"
            )


@dataclass(frozen=True, slots=True)
class ShrinkTenant:
    """The order to a tenant to give up so many bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers that decisions use."""

    age_s: float = 5.0
    """A waiting request gains a class each time: the longest wait behind idle equals that are
    kept warm."""
    turn_s: float = 5.0
    """After its load a model keeps its room against requests that only age makes more urgent, so
    that requests for it share the load."""
    rest_s: float = 1.0
    """Such a turn ends earlier where the model is not used for so long."""
    drain_limit_s: float = 10.0
    """The longest wait of a request without a deadline for residents in use to drain or for bytes
    that others hold; then it is refused. One with a deadline goes on waiting, but keeps no free
    bytes from the requests behind it after so long a wait for bytes that others hold."""
    return_s: float = 5.0
    """The time after which a request that was refused so is told to come again."""
    place_s: float = 10.0
    """The time that its place is kept: twice `return_s`, since clients are not punctual."""
    shut_s: float = 60.0
    """The longest that a resident in use gives no new leases, for a request that needs its room;
    doubled each time. Half of the default deadline of a request."""
    cooldown_s: float = 5.0
    """Between two evictions under low pressure: one poll, so that the effect is seen first."""
    exhausted_s: float = 60.0
    """Between two reports that pressure finds nothing to evict, and between the last eviction under
    this pressure and such a report."""
    low_step_bytes: int = 32 * MIB
    """The least that low pressure takes of a tenant at once; else half of its spare bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """Shrinks and evictions, and the bytes that they lack."""

    shrinks: tuple[ShrinkTenant, ...] = ()
    victims: tuple[Resident, ...] = ()
    short_bytes: int = 0


def budget_bytes(
    *,
    total_bytes: int,
    configured_bytes: int | None = None,
    metal_limit_bytes: int | None = None,
    reserve_bytes: int = RESERVE_BYTES,
) -> int:
    """The most that all residents may occupy together. Raises ConfigError when that is nothing."""
    limits = [total_bytes - reserve_bytes, configured_bytes, metal_limit_bytes]
    budget = min(limit for limit in limits if limit is not None)
    if budget <= 0:
        raise errors.ConfigError(
            f"the memory budget is {format_bytes(budget)}: machine {format_bytes(total_bytes)}, "
            f"reserve {format_bytes(reserve_bytes)}; configure a smaller reserve or a larger limit"
        )
    return budget


def check_fixed(fixed: Mapping[str, int], budget: int) -> None:
    """Raise ConfigError when pinned and text models alone leave no room in the budget."""
    total = sum(fixed.values())
    if total >= budget:
        named = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(fixed.items()))
        raise errors.ConfigError(
            f"pinned and text models need {format_bytes(total)} ({named}), the budget is "
            f"{format_bytes(budget)}; pin less, or choose smaller models"
        )


def periods(seconds: float, each_s: float) -> int:
    """Count the periods that have passed; a rounding error at the end of one does not hide it."""
    return int(seconds / each_s + 1e-9)


def resident_rank(resident: Resident, now: float) -> int:
    """The urgency of a resident: 0 is the most. It loses a class for each idle `stay_warm_s`."""
    if resident.leases:
        return min(priority.rank for priority in resident.leases.values())
    idle_s = now - resident.idle_since_mono
    stay_warm_s = resident.warmth.stay_warm_s
    decay = periods(max(0.0, idle_s), stay_warm_s) if stay_warm_s > 0 else WORST_RANK
    if idle_s < 0:
        decay = 0
    return min(WORST_RANK, resident.last_priority.rank + decay)


def decay_mono(resident: Resident, now: float) -> float:
    """The next time at which idleness makes a resident less urgent, or no longer kept warm;
    infinite = never."""
    stay_warm_s, idle_s = resident.warmth.stay_warm_s, now - resident.idle_since_mono
    is_last = resident_rank(resident, now) == WORST_RANK and idle_s >= stay_warm_s
    if resident.leases or stay_warm_s <= 0 or is_last:
        return math.inf
    return resident.idle_since_mono + (periods(max(0.0, idle_s), stay_warm_s) + 1) * stay_warm_s


def ticket_rank(priority: RequestPriority, waited_s: float, rules: Rules) -> int:
    """The urgency of a waiting request; below 0 when it waited long."""
    return priority.rank - periods(max(0.0, waited_s), rules.age_s)


def pressure_key(resident: Resident, now: float) -> tuple[int, int, float, ResidentKey]:
    """Sort key of evictions when the machine lacks memory."""
    return (
        resident.role.priority,
        -resident_rank(resident, now),
        resident.last_used_mono,
        resident.key,
    )


def fit_key(resident: Resident, now: float) -> tuple[int, int, float, ResidentKey]:
    """Sort key of evictions when a request needs room."""
    return (
        -resident_rank(resident, now),
        resident.role.priority,
        resident.last_used_mono,
        resident.key,
    )


def yields_to(resident: Resident, rank: int, now: float) -> bool:
    """Whether a request of `rank` may take a resident's room: it is more urgent, or as urgent,
    and the resident idles and is no longer kept warm."""
    own = resident_rank(resident, now)
    is_cold = not resident.leases and now - resident.idle_since_mono >= resident.warmth.stay_warm_s
    return own > rank or (own == rank and is_cold)


def turn_end_mono(resident: Resident, rules: Rules) -> float:
    """The end of a resident's turn."""
    if resident.loaded_mono is None:
        return -math.inf
    end_mono = resident.loaded_mono + rules.turn_s
    return end_mono if resident.leases else min(end_mono, resident.last_used_mono + rules.rest_s)


def may_displace(role: Role, resident: Resident, *, may_displace_text: bool) -> bool:
    """Whether a load in `role` may ever take a resident's room."""
    if resident.warmth.is_pinned:
        return False
    return resident.role.yields or may_displace_text or resident.role.name == role.name


def shrink_by(need_bytes: int, tenants: Iterable[Tenant]) -> tuple[ShrinkTenant, ...]:
    """Climb the ladder of tenants until the need is met or the ladder ends."""
    given: dict[str, int] = {}
    left = need_bytes
    climbing = sorted(tenants, key=lambda tenant: (tenant.rung, tenant.name))
    offers = [(tenant.name, tenant.expired_bytes) for tenant in climbing]
    offers += [(tenant.name, tenant.spare_bytes) for tenant in climbing]
    for name, offered in offers:
        taken = min(offered, left)
        if taken > 0:
            given[name] = given.get(name, 0) + taken
            left -= taken
    return tuple(ShrinkTenant(name, size) for name, size in given.items())


def shrinkable_bytes(tenants: Iterable[Tenant]) -> int:
    """The most bytes that `shrink_by` can free."""
    return sum(shrink.bytes for shrink in shrink_by(_ALL, tenants))


def fit(
    need_bytes: int,
    candidates: Iterable[Resident],
    tenants: Iterable[Tenant],
    key: Callable[[Resident], tuple[int, int, float, ResidentKey]],
) -> Relief:
    """Choose the evictions that free `need_bytes`: caches, then idle models, then models in use,
    first those that drain already.

    All `candidates` may go. Earlier choices that later ones make superfluous stay, models before
    caches and pages. `short_bytes` is missing when all of them went.
    """
    shrinks = shrink_by(need_bytes, tenants)
    left = need_bytes - sum(shrink.bytes for shrink in shrinks)
    victims: list[Resident] = []
    for resident in sorted(candidates, key=lambda one: (*_in_use(one), key(one))):
        if left <= 0:
            break
        victims.append(resident)
        left -= resident.bytes
    for resident in victims[::-1]:
        if left + resident.bytes <= 0:
            victims.remove(resident)
            left += resident.bytes
    shrinks = _without(max(0, -left), shrinks)
    return Relief(shrinks=shrinks, victims=tuple(victims), short_bytes=max(0, left))


def _in_use(resident: Resident) -> tuple[bool, bool]:
    """Whether it is in use, and whether it would have to begin to drain."""
    return bool(resident.leases), resident.state is not State.DRAINING


def _without(surplus_bytes: int, shrinks: Sequence[ShrinkTenant]) -> tuple[ShrinkTenant, ...]:
    """Drop surplus bytes from the end of the ladder."""
    kept = []
    for shrink in reversed(shrinks):
        spared = min(surplus_bytes, shrink.bytes)
        surplus_bytes -= spared
        if spared < shrink.bytes:
            kept.append(ShrinkTenant(shrink.name, shrink.bytes - spared))
    return tuple(reversed(kept))


def relieve(
    level: PressureLevel,
    residents: Iterable[Resident],
    tenants: Sequence[Tenant],
    *,
    wanted_bytes: int | None,
    now: float,
    rules: Rules,
) -> Relief:
    """Choose the evictions that pressure asks for: never a model that is in use, pinned or text.

    Low pressure takes expired bytes and the next thing on the ladder, at most one model. Critical
    pressure takes expired bytes, all caches and all models that can go; then pages and idle
    sessions until `wanted_bytes` are freed (None = the need is not known: all of them).
    """
    idle = sorted(
        (r for r in residents if r.is_idle and r.role.yields and not r.warmth.is_pinned),
        key=lambda resident: pressure_key(resident, now),
    )
    tenants = [_with_lent(tenant) for tenant in tenants]
    match level:
        case PressureLevel.NOMINAL:
            return Relief()
        case PressureLevel.CRITICAL:
            given = {
                t.name: t.expired_bytes + (t.spare_bytes if t.rung is Rung.CACHE else 0)
                for t in tenants
            }
            wanted = _ALL if wanted_bytes is None else wanted_bytes
            wanted -= sum(given.values()) + sum(one.bytes for one in idle)
            kept = (replace(t, expired_bytes=0) for t in tenants if t.rung is not Rung.CACHE)
            for shrink in shrink_by(wanted, kept):
                given[shrink.name] += shrink.bytes
            return _relief(given, idle, wanted_bytes)
        case PressureLevel.LOW:
            given = {t.name: t.expired_bytes for t in tenants}
            spare = [t for t in tenants if t.rung is not Rung.CACHE and t.spare_bytes > 0]
            wanted = _ALL if wanted_bytes is None else wanted_bytes - sum(given.values())
            if wanted <= 0:
                return _relief(given, (), wanted_bytes)
            if not spare:
                return _relief(given, idle[:1], wanted_bytes)
            first = min(spare, key=lambda tenant: (tenant.rung, tenant.name))
            step = max(first.spare_bytes // 2, min(first.spare_bytes, rules.low_step_bytes))
            given[first.name] += min(step, wanted)
            return _relief(given, (), wanted_bytes)


def _with_lent(tenant: Tenant) -> Tenant:
    """Count the lent bytes of a tenant as spare: given up, they help the machine."""
    lent = tenant.lent_bytes
    return replace(
        tenant,
        held_bytes=tenant.held_bytes + lent,
        spare_bytes=tenant.spare_bytes + lent,
        lent_bytes=0,
    )


def _relief(
    given: Mapping[str, int], victims: Sequence[Resident], wanted_bytes: int | None
) -> Relief:
    freed = sum(given.values()) + sum(one.bytes for one in victims)
    return Relief(
        shrinks=tuple(ShrinkTenant(name, size) for name, size in given.items() if size > 0),
        victims=tuple(victims),
        short_bytes=max(0, (wanted_bytes or 0) - freed),
    )
