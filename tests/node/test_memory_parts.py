"""What a node's models are lent, its budget, when models come back, and what is told of it."""

from __future__ import annotations

import io
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.console import Console

from kakeya.backends.sizes import (
    FIRST_KV_TOKENS,
    UNKNOWN_KV_BYTES,
    LeaseSize,
    lease_size,
    lease_sizes,
    node_budget,
)
from kakeya.cli.memory_tables import show_memory
from kakeya.config.config import load
from kakeya.core import errors
from kakeya.core.host import unified_memory_bytes
from kakeya.core.units import GIB, MIB
from kakeya.generation.spec import EMBEDDED_FOLDER
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.comeback import CALM_S, LONGEST_S, SETTLED_S, Comeback
from kakeya.memory.arbiter.events import (
    Evicted,
    LoadFailure,
    MemoryPressure,
    ModelLoad,
    ModelUnload,
    RequestRefused,
)
from kakeya.memory.arbiter.plan import Reason, Snapshot
from kakeya.memory.arbiter.policy import PressureLevel, Rung, Tenant
from kakeya.memory.arbiter.resident import ResidentKey
from kakeya.memory.config import MemoryConfig
from kakeya.memory.estimate.estimate import Estimate
from kakeya.memory.estimate.history import SizeHistory
from kakeya.memory.figures import describe_memory
from kakeya.memory.log import KEPT, MemoryLog
from kakeya.memory.machine.panics import NORMAL, Profile
from kakeya.memory.machine.pressure import FootprintPressure
from kakeya.memory.pressure_sources import footprint, read_level
from tests.memory.worlds import MANY, ask

KEY = ResidentKey("draft", "small")
BIG = 1 << 40


def estimate(base_bytes: int, per_token: int, windows: int = 0) -> Estimate:
    return Estimate(
        base_bytes=base_bytes,
        weights_bytes=base_bytes // 2,
        kv_bytes=FIRST_KV_TOKENS * per_token + windows,
        kv_bytes_per_token=per_token,
        source="headers",
    )


# Leases


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
def test_what_is_lent_holds_the_engine_and_stays_within_what_is_free(
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


# Configuration


def test_memory_is_configured_by_file_variable_and_flag(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        "[memory]\nbudget_mb = 500\nreserve_mb = 64\nstay_warm_s = 5\nunload_after_s = 60\n"
        'pinned = ["a"]\nsizes_mb = ["org/a=700", "b=1"]\n'
        '[leases]\nstore = "redis://127.0.0.1:6379/0"\n'
    )
    memory = load(["--config", str(file)], {}).memory
    assert memory.budget_bytes == 500 * MIB
    assert memory.reserve_bytes == 64 * MIB
    assert (memory.stay_warm_s, memory.unload_after_s, memory.pinned) == (5, 60, ("a",))
    assert memory.stated_bytes == (("org/a", 700 * MIB), ("b", MIB))
    assert memory.lease_store == "redis://127.0.0.1:6379/0"
    environ = {"KAKEYA_MEMORY_BUDGET_MB": "600"}
    assert load(["--config", str(file)], environ).memory.budget_bytes == 600 * MIB
    flags = ["--config", str(file), "--memory-budget", "700"]
    assert load(flags, environ).memory.budget_bytes == 700 * MIB
    plain = load([], {}).memory
    assert (plain.budget_bytes, plain.unload_after_s, plain.lease_store) == (None, None, "")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"KAKEYA_MEMORY_BUDGET_MB": "-1"}, "out of range"),
        ({"KAKEYA_MEMORY_UNLOAD_AFTER_S": "60"}, "less than memory.stay_warm_s, 300 s"),
        ({"KAKEYA_MEMORY_SIZES_MB": "kakeya-tiny"}, "give MODEL=MB"),
        ({"KAKEYA_MEMORY_SIZES_MB": "kakeya-tiny=big"}, "not a number"),
        ({"KAKEYA_LEASE_STORE": "http://x"}, "no address of a lease store"),
    ],
)
def test_memory_that_cannot_be_meant_is_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(errors.ConfigError, match=sentence):
        load([], environ)


# Coming back


def test_a_model_comes_back_when_it_was_calm_for_a_while() -> None:
    comeback = Comeback()
    assert comeback.may(KEY, 0.0), "nothing ever pressed"
    comeback.pressed(PressureLevel.LOW, 10.0)
    comeback.taken(KEY, 11.0)
    assert not comeback.may(KEY, 11.0 + SETTLED_S)
    comeback.pressed(PressureLevel.NOMINAL, 1000.0)
    assert not comeback.may(KEY, 1000.0 + CALM_S - 0.1)
    assert comeback.may(KEY, 1000.0 + CALM_S)


def test_who_is_taken_again_and_again_comes_back_later_each_time() -> None:
    comeback, now, pauses = Comeback(), 0.0, []
    for _ in range(9):
        comeback.pressed(PressureLevel.LOW, now)
        comeback.taken(KEY, now)
        comeback.pressed(PressureLevel.NOMINAL, now)
        since = now
        while not comeback.may(KEY, now):
            now += 1.0
        pauses.append(now - since)
    assert pauses[:4] == [CALM_S, 2 * CALM_S, 4 * CALM_S, 8 * CALM_S]
    assert max(pauses) == LONGEST_S
    now += SETTLED_S
    comeback.taken(KEY, now)
    assert comeback.may(KEY, now + CALM_S), "it stayed for long, so it begins anew"


# What is told


def test_the_log_keeps_the_last_things_and_says_why() -> None:
    log = MemoryLog(lambda: 5.0)
    log.take(ModelLoad(key=KEY, load_s=1.0, estimate_bytes=MIB, measured_bytes=2 * MIB))
    log.take(MemoryPressure(level=PressureLevel.LOW, source="os"))
    log.take(Evicted(key=KEY, reason=Reason.PRESSURE, bytes=MIB))
    log.take(Evicted(key=KEY, reason=Reason.SWAP, bytes=MIB, room_for=ResidentKey("text", "big")))
    log.take(LoadFailure(key=KEY, error=errors.LoadFailed("a broken file")))
    log.take(RequestRefused(key=KEY, error=errors.MemoryRefused("no room")))
    assert [(one.what, one.why) for one in log.last()] == [
        ("loaded", "1.0 s, estimated 1.0 MiB, lent 2.0 MiB"),
        ("pressure low", "by os"),
        ("evicted", "gave 1.0 MiB: pressure was low by os"),
        ("evicted", "gave 1.0 MiB to big (swap)"),
        ("load failed", "a broken file"),
        ("refused", "no room"),
    ]
    job = ResidentKey("job", "train-1")
    log.take(ModelLoad(key=job, load_s=0.0, estimate_bytes=MIB, measured_bytes=MIB))
    log.take(ModelUnload(key=job, reason=Reason.RELEASE))
    assert [(one.what, one.model) for one in log.last()[-2:]] == [
        ("leased", "train-1"),
        ("lease ended", "train-1"),
    ]
    before = len(log.last())
    for _ in range(9):
        log.take(RequestRefused(key=KEY, error=errors.MemoryRefused("no room")))
        log.take(RequestRefused(key=job, error=errors.MemoryRefused("full", retry_after_s=10.0)))
    assert len(log.last()) == before + 1, "what is said again is told once, and who waits waits on"
    for level in (PressureLevel.NOMINAL, PressureLevel.LOW) * KEPT:
        log.take(MemoryPressure(level=level, source="os"))
    assert len(log.last()) == KEPT


def test_evictions_stay_to_be_seen_however_many_are_refused_since() -> None:
    log = MemoryLog(lambda: 5.0)
    log.take(Evicted(key=KEY, reason=Reason.SWAP, bytes=MIB, room_for=ResidentKey("text", "big")))
    for free in range(KEPT):
        log.take(RequestRefused(key=KEY, error=errors.MemoryRefused(f"{free} B are free")))
    assert {one.what for one in log.last()} == {"refused"}
    assert [(one.what, one.why) for one in log.evictions()] == [
        ("evicted", "gave 1.0 MiB to big (swap)")
    ]
    status = describe_memory(
        Arbiter(100).snapshot(),
        log,
        now=6.0,
        profile=NORMAL,
        plugins=(),
        engines={},
        leases={},
    )
    shown = Console(record=True, width=120, file=io.StringIO())
    show_memory(status, shown)
    text = shown.export_text()
    assert text.count("refused") == 6
    assert text.count("evicted small: gave 1.0 MiB to big (swap)") == 1


def test_the_table_says_which_leases_wait_and_why_none_is_given() -> None:
    held = {"state": "granted", "name": "held", "bytes": MIB}
    waits = {"state": "waiting", "name": "train", "bytes": 3 * MIB, "note": "2.0 MiB are free"}
    leases = {"problem": "no store", "is_drained": True, "leases": [held, waits]}
    console = Console(width=200, record=True, file=io.StringIO())
    show_memory({"budget_bytes": MIB, "leases": leases}, console)
    text = console.export_text()
    assert "waiting  train for a lease of 3.0 MiB: 2.0 MiB are free" in text
    assert "not given now: no store" in text
    assert "drained" in text
    assert "held" not in text


def test_names_stay_whole_in_a_narrow_window() -> None:
    size = 266 * MIB + MIB // 2
    resident = {
        "model": "kakeya-tiny",
        "role": "text-target",
        "state": "ready",
        "estimate_bytes": size,
        "measured_bytes": size,
        "lent_bytes": size,
        "leases": 0,
        "idle_s": 123.0,
        "is_pinned": True,
    }
    console = Console(width=80, record=True, file=io.StringIO())
    show_memory({"budget_bytes": MIB, "residents": [resident]}, console)
    text = console.export_text()
    for word in (
        "kakeya-tiny ",
        "text-target ",
        "ready, pinned ",
        "estimated",
        "266.5 MiB",
        "123 s",
    ):
        assert word in text, text


def test_levels_are_known_by_their_names_and_by_those_of_systems() -> None:
    assert read_level("low") is PressureLevel.LOW
    assert read_level("UIApplicationDidReceiveMemoryWarning") is PressureLevel.CRITICAL
    with pytest.raises(errors.InvalidArgument, match="no level of memory pressure"):
        read_level("LOW")


async def test_a_node_presses_when_it_occupies_more_than_its_budget_not_by_one_lease() -> None:
    """What an engine occupies above its own lease is its own matter while the budget holds."""

    def ledger(committed: int, unfilled: int) -> Snapshot:
        return Snapshot(
            budget_bytes=1000,
            committed_bytes=committed,
            unfilled_bytes=unfilled,
            free_bytes=0,
            available_bytes=None,
            level=PressureLevel.NOMINAL,
            residents=(),
            tenants=(),
            foreign={},
            waiting=(),
        )

    seen = []
    for figures in [(1000, 400), (1030, 0), (1200, 0)]:
        reading = await FootprintPressure(lambda of=figures: footprint(ledger(*of))).read()  # type: ignore[misc]
        assert reading is not None
        seen.append((reading.level.name, reading.spare_bytes))
    assert seen == [("NOMINAL", 350), ("LOW", -80), ("CRITICAL", -250)]


@pytest.mark.parametrize("at", ["before", "planned", "loading", "bounded", "after"])
async def test_what_there_is_to_spare_after_a_load_does_not_depend_on_when_it_was_read(
    at: str,
) -> None:
    """A load counts once, as what is lent or as what is occupied, never as both."""
    arbiter = Arbiter(1000)
    arbiter.report(Tenant(name="pages", rung=Rung.PAGES, held_bytes=0))
    source = FootprintPressure(lambda: footprint(arbiter.snapshot()))

    async def read(now: str) -> None:
        if now == at:
            reading = await source.read()
            assert reading is not None
            spare = reading.spare_bytes
            arbiter.observe(reading.level, 10**6, 0, spare_bytes=spare)

    await read("before")
    wish = ask("text", MANY, 600)
    (plan,) = arbiter.ask(wish, 0)[1].plans
    await read("planned")
    assert arbiter.begin_load(plan, 0)[0]
    await read("loading")
    arbiter.measure(wish.key, 620, 0, unfilled_bytes=620)
    await read("bounded")
    arbiter.loaded(wish.key, 620, 0, unfilled_bytes=400)
    await read("after")
    assert not arbiter.may_grow("pages", 950 - 620 + 1)
    assert arbiter.may_grow("pages", 950 - 620)
