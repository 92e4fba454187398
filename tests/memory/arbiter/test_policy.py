from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core import errors
from kakeya.core.units import MIB
from kakeya.memory.arbiter import policy
from kakeya.memory.arbiter.policy import PressureLevel, Rules, Rung, ShrinkTenant, Tenant
from kakeya.memory.arbiter.resident import (
    ROLES,
    LeaseId,
    RequestPriority,
    Resident,
    State,
    Warmth,
)
from tests.memory.worlds import ROLE_OF, key


def resident(
    name: str,
    role: str = "vision",
    *,
    size: int = 10,
    priority: RequestPriority = RequestPriority.NORMAL,
    used: float = 0.0,
    stay_warm_s: float = 0.0,
    leases: int = 0,
) -> Resident:
    return Resident(
        key=key(name),
        role=ROLE_OF[role],
        state=State.READY,
        estimate_bytes=size,
        last_priority=priority,
        last_used_mono=used,
        warmth=Warmth(stay_warm_s=stay_warm_s),
        leases={LeaseId(n): priority for n in range(leases)},
    )


def order(key_of: object, residents: list[Resident], now: float = 0.0) -> list[str]:
    return [r.key.capability for r in sorted(residents, key=lambda r: key_of(r, now))]  # type: ignore[operator]


def test_pressure_goes_by_role_then_urgency_then_disuse() -> None:
    warm = 1e9
    urgent, low = RequestPriority.URGENT, RequestPriority.LOW
    residents = [
        resident("asr", "asr", priority=low, stay_warm_s=warm),
        resident("urgent", priority=urgent, stay_warm_s=warm),
        resident("late", priority=low, used=2, stay_warm_s=warm),
        resident("early", priority=low, used=1, stay_warm_s=warm),
        resident("draft", "drafter", priority=urgent, stay_warm_s=warm),
    ]
    assert order(policy.pressure_key, residents) == ["draft", "early", "late", "urgent", "asr"]
    assert order(policy.fit_key, residents) == ["early", "late", "asr", "draft", "urgent"]


def test_idleness_costs_a_class_for_each_stay_warm_and_leases_none() -> None:
    urgent = RequestPriority.URGENT
    idle = resident("idle", priority=urgent, stay_warm_s=10)
    assert [policy.resident_rank(idle, now) for now in (0, 9, 10, 35, 1e9)] == [0, 0, 1, 3, 4]
    held = resident("held", priority=urgent, stay_warm_s=10, leases=1)
    assert policy.resident_rank(held, 1e9) == 0


@given(
    st.floats(0, 1000), st.floats(0, 1000), st.sampled_from([0.0, 10.0, 300.0]), st.floats(0, 4000)
)
def test_one_that_a_caller_keeps_warm_yields_to_no_equal_until_then_and_to_one_later(
    used: float, kept: float, stay_warm_s: float, now: float
) -> None:
    one = replace(resident("a", used=used, stay_warm_s=stay_warm_s), kept_warm_mono=kept)
    rank = RequestPriority.NORMAL.rank
    is_warm = now < max(used + stay_warm_s, kept)
    if abs(now - max(used + stay_warm_s, kept)) > 1e-6:
        assert policy.yields_to(one, rank, now) is not is_warm
    if is_warm:
        assert policy.yields_to(one, RequestPriority.HIGH.rank, now)


def test_waiting_gains_a_class_each_time_without_end() -> None:
    ranks = [
        policy.ticket_rank(RequestPriority.BATCH, waited, Rules(age_s=5)) for waited in (0, 5, 26)
    ]
    assert ranks == [4, 3, -1]


@pytest.mark.parametrize(
    ("own", "stay_warm_s", "asks", "yields"),
    [("LOW", 300, "NORMAL", True), ("NORMAL", 300, "NORMAL", False), ("NORMAL", 1, "LOW", True),
     ("NORMAL", 10, "NORMAL", True), ("HIGH", 300, "NORMAL", False)],
)  # fmt: skip
def test_who_yields_to_whom_after_ten_idle_seconds(
    own: str, stay_warm_s: float, asks: str, yields: bool
) -> None:
    one = resident("x", priority=RequestPriority[own], stay_warm_s=stay_warm_s)
    assert policy.yields_to(one, RequestPriority[asks].rank, 10.0) is yields


def test_the_budget_is_the_least_of_three() -> None:
    """D11."""
    total = 16_384 * MIB
    assert policy.budget_bytes(total_bytes=total) == (16_384 - 1536) * MIB
    assert policy.budget_bytes(total_bytes=total, configured_bytes=MIB) == MIB
    assert policy.budget_bytes(total_bytes=total, metal_limit_bytes=10_000 * MIB) == 10_000 * MIB
    with pytest.raises(errors.ConfigError, match=r"reserve 1\.5 GiB"):
        policy.budget_bytes(total_bytes=1024 * MIB)


def test_what_never_yields_must_leave_room() -> None:
    policy.check_fixed({"text": 60, "pinned": 30}, 100)
    with pytest.raises(errors.ConfigError, match="pinned 30 B, text 70 B"):
        policy.check_fixed({"text": 70, "pinned": 30}, 100)


def test_a_tenant_cannot_offer_more_than_it_holds() -> None:
    with pytest.raises(errors.InvalidArgument, match="no more than it holds"):
        Tenant(name="x", rung=Rung.PAGES, held_bytes=10, expired_bytes=5, spare_bytes=6)


residents_st = st.lists(
    st.builds(
        resident,
        st.from_regex(r"[a-z]{1,4}", fullmatch=True),
        st.sampled_from([role.name for role in ROLES]),
        size=st.integers(0, 50),
        priority=st.sampled_from(list(RequestPriority)),
        used=st.floats(0, 100),
        leases=st.integers(0, 2),
    ),
    unique_by=lambda one: one.key,
    max_size=8,
)
tenants_st = st.lists(
    st.builds(
        lambda name, rung, parts: Tenant(
            name=name, rung=rung, held_bytes=sum(parts), expired_bytes=parts[0],
            spare_bytes=parts[1],
        ),
        st.from_regex(r"[a-z]{1,3}", fullmatch=True),
        st.sampled_from(list(Rung)),
        st.tuples(*[st.integers(0, 50)] * 3),
    ),
    unique_by=lambda one: one.name,
    max_size=4,
)  # fmt: skip


@given(st.integers(-50, 500), residents_st, tenants_st)
def test_what_is_freed_and_what_is_short_reach_what_is_asked(
    need: int, residents: list[Resident], tenants: list[Tenant]
) -> None:
    taken = policy.fit(need, residents, tenants, lambda one: policy.fit_key(one, 200.0))
    freed = sum(one.bytes for one in taken.victims) + sum(one.bytes for one in taken.shrinks)
    assert freed + taken.short_bytes >= need
    assert taken.short_bytes == max(0, need - freed)
    for victim in taken.victims:
        assert freed - victim.bytes < need, "none is superfluous"
    assert not taken.shrinks or freed <= need, "nor is a byte of pages"
    caches_and_pages = sum(one.expired_bytes + one.spare_bytes for one in tenants)
    assert not taken.victims or need > caches_and_pages, "no model goes for what holds many things"
    offered = policy.shrink_by(need, tenants)
    assert {one.name for one in taken.shrinks} <= {one.name for one in offered}
    if any(victim.leases for victim in taken.victims):
        idle = sum(one.bytes for one in residents if not one.leases)
        assert idle + sum(one.bytes for one in offered) < need, "idle ones first"


def test_pages_stay_where_the_model_that_goes_makes_room_enough() -> None:
    """Two models swap, and what was computed of their prompts stays; caches go before pages."""
    tenants = [
        Tenant(name="cache", rung=Rung.CACHE, held_bytes=10, expired_bytes=4, spare_bytes=6),
        Tenant(name="pages", rung=Rung.PAGES, held_bytes=40, spare_bytes=40),
    ]

    def taken(need: int) -> tuple[list[str], tuple[ShrinkTenant, ...]]:
        found = policy.fit(
            need, [resident("a", size=100)], tenants, lambda one: policy.fit_key(one, 200.0)
        )
        return [one.key.capability for one in found.victims], found.shrinks

    assert taken(50) == ([], (ShrinkTenant("cache", 10), ShrinkTenant("pages", 40)))
    assert taken(90) == (["a"], ())
    assert taken(107) == (["a"], (ShrinkTenant("cache", 7),))
    assert taken(130) == (["a"], (ShrinkTenant("cache", 10), ShrinkTenant("pages", 20)))


@given(
    residents_st, tenants_st, st.sampled_from(list(PressureLevel)), st.none() | st.integers(0, 300)
)
def test_pressure_takes_nothing_in_use_nor_text_and_of_pages_and_kv_no_more_than_it_wants(
    residents: list[Resident], tenants: list[Tenant], level: PressureLevel, wanted: int | None
) -> None:
    taken = policy.relieve(
        level, residents, tenants, wanted_bytes=wanted, now=200.0, rules=Rules(low_step_bytes=16)
    )
    freed = sum(one.bytes for one in taken.victims) + sum(one.bytes for one in taken.shrinks)
    if level is not PressureLevel.NOMINAL:
        assert taken.short_bytes == max(0, (wanted or 0) - freed)
    assert all(one.is_idle and one.role.yields for one in taken.victims)
    by_name = {tenant.name: tenant for tenant in tenants}
    for shrink in taken.shrinks:
        tenant = by_name[shrink.name]
        assert 0 < shrink.bytes <= tenant.expired_bytes + tenant.spare_bytes
    if level is PressureLevel.NOMINAL:
        assert not taken.victims
        assert not taken.shrinks
    if level is PressureLevel.LOW:
        assert len(taken.victims) <= 1
    idle = {one.key for one in residents if one.is_idle and one.role.yields}
    if level is PressureLevel.CRITICAL:
        assert {one.key for one in taken.victims} == idle
    given = {shrink.name: shrink.bytes for shrink in taken.shrinks}
    expired = {one.name: one.expired_bytes for one in tenants if one.expired_bytes}
    if level is PressureLevel.LOW and wanted is not None and wanted <= sum(expired.values()):
        assert (taken.victims, given) == ((), expired), "what expired is all that is wanted"
    kept = [one for one in tenants if one.rung is not Rung.CACHE]
    spared = sum(max(0, given.get(one.name, 0) - one.expired_bytes) for one in kept)
    if wanted is not None:
        assert spared == 0 or freed <= wanted, "what is of use goes only as far as it is wanted"
    if level is PressureLevel.CRITICAL and wanted is None:
        assert spared == sum(one.spare_bytes for one in kept)
    if level is PressureLevel.CRITICAL and wanted is not None and freed < wanted:
        assert spared == sum(one.spare_bytes for one in kept), "short only when all has gone"
