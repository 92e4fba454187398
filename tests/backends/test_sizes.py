"""The leases of a node's models, and its budget."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kakeya.backends.sizes import (
    FIRST_KV_TOKENS,
    UNKNOWN_KV_BYTES,
    LeaseSize,
    lease_size,
    lease_sizes,
    node_budget,
)
from kakeya.core import errors
from kakeya.core.host import unified_memory_bytes
from kakeya.core.units import GIB, MIB
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.memory.config import MemoryConfig
from kakeya.memory.estimate.estimate import Estimate
from kakeya.memory.estimate.history import SizeHistory
from kakeya.memory.machine.panics import NORMAL, Profile

BIG = 1 << 40


def estimate(base_bytes: int, per_token: int, windows: int = 0) -> Estimate:
    return Estimate(
        base_bytes=base_bytes,
        weights_bytes=base_bytes // 2,
        kv_bytes=FIRST_KV_TOKENS * per_token + windows,
        kv_bytes_per_token=per_token,
        source="headers",
    )


def test_a_lease_has_room_for_the_first_tokens_whatever_the_budget() -> None:
    assert lease_size(estimate(4 * GIB, 100_000), BIG).kv_bytes == FIRST_KV_TOKENS * 100_000
    assert lease_size(estimate(4 * GIB, 100_000), 4 * GIB).kv_bytes == FIRST_KV_TOKENS * 100_000
    gemma = estimate(4 * GIB, 20_000, 150 * MIB)
    assert lease_size(gemma, BIG).kv_bytes == FIRST_KV_TOKENS * 20_000 + 150 * MIB


def test_a_model_of_unknown_layers_gets_a_guess_within_the_budget() -> None:
    assert lease_size(estimate(4 * GIB, 0), BIG).kv_bytes == UNKNOWN_KV_BYTES
    assert lease_size(estimate(4 * GIB, 0), 4 * GIB + MIB).kv_bytes == MIB


@given(
    base=st.integers(0, 10_000),
    kv=st.integers(0, 10_000),
    occupied=st.none() | st.integers(0, 30_000),
    free=st.integers(-1000, 30_000),
)
def test_a_lease_holds_the_engine_and_stays_within_the_free_memory(
    base: int, kv: int, occupied: int | None, free: int
) -> None:
    size = LeaseSize(estimate(base, 1), kv)
    lent = size.lent(occupied, free)
    assert lent.bytes >= max(base, occupied or 0) + lent.kv_bytes
    assert min(kv, FIRST_KV_TOKENS) <= lent.kv_bytes <= kv
    assert 0 <= lent.unfilled_bytes <= lent.bytes
    if lent.kv_bytes > size.least_kv_bytes:
        assert lent.bytes <= size.bytes + max(0, free), "more only where that was free"


def test_one_model_that_is_too_large_is_named_with_both_sizes_but_not_by_its_name_alone() -> None:
    folder = str(EMBEDDED_FOLDER / "kakeya-tiny")

    def sizes(budget: int, source: str) -> dict[str, LeaseSize]:
        return lease_sizes(
            {"model": (source, "text")}, budget, history=SizeHistory(), hub=None, platform="linux"
        )

    assert sizes(GIB, folder)["model"].estimate.kv_bytes_per_token == 4096
    with pytest.raises(errors.ConfigError, match=r"model model needs .* budget is 64.0 MiB"):
        sizes(64 * MIB, folder)
    assert sizes(64 * MIB, "some/Model-70B")["model"].bytes > 64 * MIB


def test_a_stated_size_counts_before_all_that_is_estimated() -> None:
    folder = str(EMBEDDED_FOLDER / "kakeya-tiny")

    def sizes(source: str, **stated_mb: int) -> LeaseSize:
        stated = {model: mb * MIB for model, mb in stated_mb.items()}
        plain = {"history": SizeHistory(), "hub": None, "platform": "linux"}
        return lease_sizes({"m": (source, "text")}, GIB, stated_bytes=stated, **plain)["m"]

    told, plain = sizes(folder, m=700), sizes(folder)
    assert told.estimate.source == "stated"
    assert told.estimate.base_bytes == 700 * MIB + plain.estimate.work_bytes
    assert told.estimate.kv_bytes_per_token == plain.estimate.kv_bytes_per_token
    assert sizes("some/Model-70B", m=300).bytes < GIB
    with pytest.raises(errors.ConfigError, match="model m needs"):
        sizes("some/Model-1B", m=2000)
    with pytest.raises(errors.ConfigError, match=r"memory.sizes_mb names 'other'"):
        sizes(folder, other=1)


def test_the_budget_is_the_machine_less_a_reserve_and_no_more_than_metal_or_the_owner_allows() -> (
    None
):
    def settings(budget_mb: int | None = None) -> MemoryConfig:
        return MemoryConfig(
            budget_bytes=budget_mb * MIB if budget_mb else None,
            reserve_bytes=100 * MIB,
            stay_warm_s=0,
            unload_after_s=None,
            lease_store="",
        )

    total = unified_memory_bytes()
    careful = Profile(name="careful", reserve_factor=2.0)
    assert node_budget(settings(200), NORMAL, platform="linux") == 200 * MIB
    plain = node_budget(settings(), NORMAL, platform="mac-like")
    assert plain == total - 100 * MIB
    assert node_budget(settings(), careful, platform="mac-like") == plain - 100 * MIB

    def on_mac(
        owners_limit_mb: int, working_set_bytes: int | None, profile: Profile = NORMAL
    ) -> int:
        return node_budget(
            settings(),
            profile,
            platform="darwin",
            working_set_bytes=working_set_bytes,
            owners_limit_mb=lambda: owners_limit_mb,
        )

    assert on_mac(300, None) == on_mac(300, 200 * MIB) == 300 * MIB
    assert on_mac(0, 200 * MIB) == 200 * MIB
    assert 0.6 < on_mac(0, None) / total < 0.8
    for limits in ((300, None), (0, 200 * MIB), (0, None)):
        assert on_mac(*limits, careful) == on_mac(*limits) - 100 * MIB
    with pytest.raises(errors.ConfigError, match="the memory budget is"):
        node_budget(
            MemoryConfig(
                budget_bytes=None,
                reserve_bytes=BIG,
                stay_warm_s=0,
                unload_after_s=None,
                lease_store="",
            ),
            NORMAL,
            platform="linux",
        )
