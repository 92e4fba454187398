"""Metrics of the ledger and of adapters, and the files that draw and watch them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest

from kakeya.adapters.figures import BOUNDS_S, adapter_figures
from kakeya.adapters.tiers import AdapterTable, Tier
from kakeya.core import errors
from kakeya.core.figures import Durations, Figure
from kakeya.memory.arbiter.events import (
    CapabilityRun,
    Evicted,
    LoadFailure,
    ModelLoad,
    RequestRefused,
)
from kakeya.memory.arbiter.plan import Exhausted, Reason, Snapshot
from kakeya.memory.arbiter.policy import PressureLevel, Rung, Tenant
from kakeya.memory.arbiter.resident import (
    TEXT_TARGET,
    LeaseId,
    RequestPriority,
    Resident,
    ResidentKey,
    State,
)
from kakeya.memory.figures import MemoryCounters, memory_figures
from kakeya.memory.leases.rules import JOB as JOB_ROLE
from tests.scrapes import DASHBOARD, Samples, drawn, made_by, problems, queries_about, scraped

TEXT = ResidentKey("text", "kakeya-tiny")
LEDGER = Snapshot(
    budget_bytes=1000,
    committed_bytes=700,
    free_bytes=250,
    available_bytes=900,
    level=PressureLevel.LOW,
    residents=(
        Resident(
            key=TEXT,
            role=TEXT_TARGET,
            state=State.READY,
            estimate_bytes=300,
            measured_bytes=400,
            unfilled_bytes=50,
            leases={LeaseId(1): RequestPriority.NORMAL, LeaseId(2): RequestPriority.LOW},
        ),
        Resident(
            key=ResidentKey("job", "train"), role=JOB_ROLE, state=State.READY, estimate_bytes=0
        ),
    ),
    tenants=(Tenant(name="pages", rung=Rung.PAGES, held_bytes=200, spare_bytes=80),),
    foreign={"job train": 100},
    waiting=(TEXT, TEXT, TEXT),
)


def counted() -> MemoryCounters:
    counters = MemoryCounters()
    for load_s in (0.05, 0.1, 3.0, 999.0):
        counters.take(ModelLoad(key=TEXT, load_s=load_s, estimate_bytes=1, measured_bytes=None))
    counters.take(LoadFailure(key=TEXT, error=errors.LoadFailed("no")))
    counters.take(Evicted(key=TEXT, reason=Reason.FIT, bytes=5))
    for error in (errors.MemoryRefused("no"), errors.DrainTimeout("no")):
        counters.take(RequestRefused(key=ResidentKey("text", "whatever was asked"), error=error))
    counters.take(Exhausted(level=PressureLevel.LOW, kept=()))
    counters.take(CapabilityRun(key=TEXT, run_s=1.0, is_failed=False))
    return counters


def of_adapters() -> Iterator[Figure]:
    table = AdapterTable()
    table.add("a", "kakeya-tiny")
    times = {tier: Durations(BOUNDS_S) for tier in Tier}
    for tier, taken in times.items():
        taken.add(0.001 * (1 + tier))
    places = SimpleNamespace(moves=dict.fromkeys(Tier, 1), rounded=1)
    return adapter_figures(table, {"kakeya-tiny": 2}, times, places)  # type: ignore[arg-type]


@pytest.fixture
def samples() -> Samples:
    all_parts = (memory_figures(LEDGER, is_careful=True), counted().figures(), of_adapters())
    return scraped(lambda: chain(*all_parts))


def test_every_figure_is_what_the_ledger_says(samples: Samples) -> None:
    def value(name: str, **labels: str) -> float:
        return samples[f"kakeya_memory_{name}", tuple(sorted(labels.items()))]

    states = {state: value("bytes", state=state) for state in ("budget", "committed", "free")}
    assert states == {"budget": 1000.0, "committed": 700.0, "free": 250.0}
    assert value("bytes", state="resident") == 400.0
    assert value("available_bytes") == 900.0
    assert value("pressure_level") == 1.0
    assert value("careful") == 1.0
    assert value("waiting") == 3.0
    text = {"model": "kakeya-tiny", "capability": "text", "role": "text-target"}
    assert value("resident_bytes", **text, kind="estimate") == 300.0
    assert value("resident_bytes", **text, kind="counted") == 400.0
    assert value("resident_bytes", **text, kind="unfilled") == 50.0
    assert value("resident_leases", **text) == 2.0
    assert value("tenant_bytes", tenant="pages", kind="held") == 200.0
    assert value("tenant_bytes", tenant="pages", kind="spare") == 80.0
    assert value("foreign_bytes", holder="job train") == 100.0


def test_every_event_is_counted(samples: Samples) -> None:
    def value(name: str, **labels: str) -> float:
        return samples[f"kakeya_memory_{name}", tuple(sorted(labels.items()))]

    text = {"model": "kakeya-tiny", "capability": "text"}
    assert value("loads_total", **text, outcome="loaded") == 4.0
    assert value("loads_total", **text, outcome="failed") == 1.0
    assert value("evictions_total", capability="text", reason="fit") == 1.0
    assert value("refusals_total", code="memory_refused") == 1.0
    assert value("refusals_total", code="drain_timeout") == 1.0
    assert value("exhausted_total") == 1.0
    assert value("load_seconds_bucket", le="0.1") == 2.0
    assert value("load_seconds_bucket", le="5.0") == 3.0
    assert value("load_seconds_bucket", le="+Inf") == value("load_seconds_count") == 4.0
    assert value("load_seconds_sum") == pytest.approx(1002.15)


def test_counts_begin_at_zero_for_each_label_that_can_be() -> None:
    """`increase()` does not see a series that is born at 1."""
    models = [TEXT, ResidentKey("draft", "small")]
    found = scraped(lambda: MemoryCounters().figures(models))

    def born(name: str) -> set[tuple[str, ...]]:
        series = {pairs: one for (full, pairs), one in found.items() if full == name}
        assert set(series.values()) == {0.0}
        return {tuple(value for _, value in pairs) for pairs in series}

    assert born("kakeya_memory_loads_total") == {
        (kind, model, outcome)
        for kind, model in (("text", "kakeya-tiny"), ("draft", "small"), ("job", "jobs"))
        for outcome in ("loaded", "failed")
    }
    assert born("kakeya_memory_evictions_total") == {
        (kind, why) for kind in ("text", "draft") for why in ("swap", "fit", "pressure")
    }
    assert born("kakeya_memory_refusals_total") > {("memory_refused",), ("drain_timeout",)}


def test_the_panel_of_memory_held_outside_shows_jobs() -> None:
    (panel,) = [one for one in DASHBOARD["panels"] if one["title"] == "Held outside"]
    job = ResidentKey("job", "train")
    lent = Resident(key=job, role=JOB_ROLE, state=State.READY, estimate_bytes=7, measured_bytes=9)
    shown = scraped(lambda: memory_figures(replace(LEDGER, residents=(lent,), foreign={})))
    drawn = [problems(target["expr"], shown) for target in panel["targets"]]
    assert [] in drawn


def test_names_that_callers_choose_are_no_labels(samples: Samples) -> None:
    assert not any("whatever was asked" in value for _, pairs in samples for _, value in pairs)


def test_each_job_is_another_and_none_of_them_is_a_label_or_a_load() -> None:
    counters = MemoryCounters()
    for number in range(100):
        job = ResidentKey("job", f"train-{number}")
        counters.take(ModelLoad(key=job, load_s=9.0, estimate_bytes=1, measured_bytes=1))
    assert counters.loads == {("jobs", "job", "loaded"): 100}
    assert counters.load_times.sum_s == counters.load_times.total == 0


def test_a_machine_that_nobody_measures_has_no_available_bytes() -> None:
    ledger = Snapshot(
        budget_bytes=1,
        committed_bytes=0,
        free_bytes=1,
        available_bytes=None,
        level=PressureLevel.NOMINAL,
        residents=(),
        tenants=(),
        foreign={},
        waiting=(),
    )
    found = scraped(lambda: chain(memory_figures(ledger), MemoryCounters().figures()))
    assert ("kakeya_memory_available_bytes", ()) not in found
    assert found["kakeya_memory_exhausted_total", ()] == 0.0


@pytest.mark.parametrize("expression", queries_about("kakeya_memory_", "kakeya_adapter"))
def test_every_query_asks_for_what_there_is(expression: str, samples: Samples) -> None:
    assert problems(expression, samples) == []


def test_every_metric_is_drawn(samples: Samples) -> None:
    assert made_by(samples) <= drawn()
