"""What Prometheus and Grafana would make of our metrics and files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kakeya.core.figures import Figure
from kakeya.gateway.figures import FigureCollector

DOCS = Path(__file__).parents[2] / "docs"
FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile"}
WORDS = FUNCTIONS | {"by", "on", "and"}
DURATION = re.compile(r"\d+[smhd]")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(figures: Callable[[], Iterator[Figure]]) -> Samples:
    """What Prometheus itself would read, by name and labels."""
    registry = CollectorRegistry()
    registry.register(FigureCollector(figures))
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((DOCS / name).read_text("utf-8"))
    return fields


def rules_of(alerts: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in alerts["groups"] for rule in group["rules"]]


def queries_of(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def drawn_by(dashboard: dict[str, Any]) -> set[str]:
    return {name for query in queries_of(dashboard) for name in re.findall(r"kakeya_\w+", query)}


def made_by(samples: Samples) -> set[str]:
    return {name for name, _ in samples if not name.endswith(("_sum", "_count", "_created"))}


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


def check_dashboard(dashboard: dict[str, Any]) -> None:
    """Hold a dashboard against the model that Grafana documents for its import."""
    assert dashboard["title"]
    assert re.fullmatch(r"[\w-]{1,40}", dashboard["uid"])
    assert dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
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
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
    assert used == variables


def check_alerts(alerts: dict[str, Any]) -> None:
    """Hold a file of alerts against the form of Prometheus rules."""
    assert set(alerts) == {"groups"}
    rules = rules_of(alerts)
    for group in alerts["groups"]:
        assert set(group) <= {"name", "interval", "rules"}
        assert DURATION.fullmatch(group["interval"])
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[A-Z]\w+", rule["alert"])
        assert DURATION.fullmatch(rule["for"])
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        for text in rule["annotations"].values():
            assert text.count("{{") == text.count("}}")
