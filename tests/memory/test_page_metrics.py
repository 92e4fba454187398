"""Metrics of the arena, and the files that draw and watch them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kakeya.core.errors import PageFreed
from kakeya.core.units import KIB
from kakeya.memory.arena import ArenaSnapshot, PageArena
from kakeya.memory.content import ContentType, PageConfig
from kakeya.memory.page_metrics import page_metrics

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "page-arena-dashboard.json").read_text("utf-8"))
ALERTS = json.loads((DOCS / "page-arena-alerts.json").read_text("utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]

FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile"}
WORDS = FUNCTIONS | {"by", "on", "and"}
DURATION = re.compile(r"\d+[smhd]")


class Scrape(Collector):
    def __init__(self, snapshot: ArenaSnapshot) -> None:
        self.snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return page_metrics(self.snapshot)


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(snapshot: ArenaSnapshot) -> Samples:
    """What Prometheus itself would read, by name and labels."""
    registry = CollectorRegistry()
    registry.register(Scrape(snapshot))
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    config = PageConfig(page_bytes=512 * KIB, slab_pages=8, total_pages=8)
    ticks = iter(range(1000))
    with PageArena(
        config, folder=tmp_path, rng=random.Random(2), timer=lambda: next(ticks) * 5e-5
    ) as arena:
        arena.at(1.0)
        arena.grow()
        agent, engine = arena.pool.holder("agent"), arena.pool.holder("engine")
        kv = arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        adapters = arena.pool.tenant(ContentType.LORA_WEIGHT, "adapters")
        refs = [arena.prepare(kv, 1, agent).commit() for _ in range(4)]
        arena.prepare(adapters, 1024 * KIB, agent).commit()
        arena.hold(refs[0], engine).pin()
        gone = arena.hold(refs[1], agent).block
        arena.pool.free(gone)
        with pytest.raises(PageFreed):
            arena.hold(refs[1], agent)
        arena.pool.mark_dirty(arena.hold(refs[2], agent).block)
        arena.prepare(kv, 1, engine)
        arena.pool.holder("other")
        arena.close_holder(engine)
        again = arena.pool.holder("engine")
        arena.hold(refs[0], again).pin()
        arena.at(50.0)
        arena.pool.evict_one()
        return scraped(arena.snapshot())


def test_every_figure_is_what_the_arena_did(samples: Samples) -> None:
    def value(name: str, **labels: str) -> float:
        return samples[f"kakeya_{name}", tuple(sorted(labels.items()))]

    states = {state: value("page_pool_pages", state=state) for state in STATES}
    assert states == {"free": 5.0, "evictable": 1.0, "pinned": 1.0, "dirty": 1.0}
    assert value("page_pool_utilization") == 3 / 8
    assert value("page_pool_fragmentation_ratio") == 0.8
    assert value("page_pool_bytes") == 8 * 512 * KIB + 16 * KIB
    assert value("page_pool_overdue_pins") == 1.0
    assert value("pages_evicted_total") == 2.0
    assert value("page_fillings_rolled_back_total") == 1.0
    assert value("page_holds_total", outcome="stale") == 1.0
    assert value("page_holds_total", outcome="opened") == 4.0
    assert value("page_pool_content_pages", content="kv_cache") == 3.0
    assert value("page_pool_content_pages", content="lora_weight") == 0.0
    latency = "page_allocation_latency_seconds"
    assert value(f"{latency}_bucket", le="1e-05") == 0.0
    assert value(f"{latency}_bucket", le="0.0001") == 6.0
    assert value(f"{latency}_bucket", le="+Inf") == value(f"{latency}_count") == 6.0
    assert value(f"{latency}_sum") == pytest.approx(3e-4)


STATES = ("free", "evictable", "pinned", "dirty")


def test_an_empty_arena_has_figures_too(tmp_path: Path) -> None:
    with PageArena(PageConfig(), folder=tmp_path, rng=random.Random(2)) as arena:
        found = scraped(arena.snapshot())
    assert found["kakeya_page_pool_utilization", ()] == 0.0
    assert found["kakeya_page_pool_fragmentation_ratio", ()] == 1.0


def problems(expression: str, samples: Samples) -> list[str]:
    """What is wrong with a query: brackets, unknown words, metrics or label values."""
    found = []
    names = {name for name, _ in samples}
    bare = re.sub(r'"[^"]*"', '""', expression)
    for opening, closing in ("()", "[]", "{}"):
        if bare.count(opening) != bare.count(closing):
            found.append(f"{opening}{closing} do not match")
    for name, selector in re.findall(r"(kakeya_\w+)(?:\{([^}]*)\})?", expression):
        if name not in names:
            found.append(f"no metric {name}")
        for label, operator, wanted in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector):
            values = {dict(labels).get(label) for n, labels in samples if n == name}
            if label == "instance":  # Prometheus adds it
                continue
            choices = wanted.split("|") if operator == "=~" else [wanted]
            found += [f"{name} has no {label} {v}" for v in choices if v not in values]
    outside = re.sub(r"\{[^}]*\}", "", re.sub(r"\[(\d+[smhd])\]", "", expression))
    labels = {label for _, pairs in samples for label, _ in pairs} | {"instance"}
    for word in re.findall(r"[A-Za-z_]\w*", outside):
        if word not in WORDS | labels and not word.startswith("kakeya_"):
            found.append(f"unknown word {word}")
    return found


@pytest.mark.parametrize("expression", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_every_query_asks_for_what_there_is(expression: str, samples: Samples) -> None:
    assert problems(expression, samples) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("sum(kakeya_page_pool_pages", "do not match"),
        ("kakeya_pages_lost > 0", "no metric"),
        ('kakeya_page_pool_pages{state="lost"}', "has no state lost"),
        ("summe(kakeya_page_pool_pages)", "unknown word"),
    ],
)
def test_a_wrong_query_is_noticed(wrong: str, says: str, samples: Samples) -> None:
    assert any(says in problem for problem in problems(wrong, samples))


def test_every_metric_is_drawn(samples: Samples) -> None:
    drawn = {name for query in QUERIES for name in re.findall(r"kakeya_\w+", query)}
    made = {name for name, _ in samples if not name.endswith(("_sum", "_count", "_created"))}
    assert drawn == made


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24
        mine = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & mine, f"{panel['title']} lies on another panel"
        cells |= mine
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == variables


def test_the_alerts_have_the_form_of_prometheus_rules() -> None:
    assert set(ALERTS) == {"groups"}
    for group in ALERTS["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
        assert DURATION.fullmatch(group["interval"])
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Z]\w+", rule["alert"])
        assert DURATION.fullmatch(rule["for"])
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        for text in rule["annotations"].values():
            assert text.count("{{") == text.count("}}")
