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

DOCS = Path(__file__).parents[1] / "docs"
FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile", "abs"}
WORDS = FUNCTIONS | {"by", "on", "and", "group_left", "up", "job"}
DURATION = re.compile(r"\d+[smhd]")
DASHBOARD: dict[str, Any] = json.loads((DOCS / "dashboard.json").read_text("utf-8"))
ALERTS: dict[str, Any] = json.loads((DOCS / "alerts.json").read_text("utf-8"))
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


def rules_of(alerts: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in alerts["groups"] for rule in group["rules"]]


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries_of(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels_of(dashboard) for target in panel["targets"]]


def queries_about(*beginnings: str) -> list[str]:
    """The queries of dashboard and alerts that read only metrics with names that begin so."""
    rules = [rule["expr"] for rule in rules_of(ALERTS)]
    return [
        query
        for query in (*queries_of(DASHBOARD), *rules)
        if all(name.startswith(beginnings) for name in re.findall(r"kakeya_\w+", query))
    ]


def drawn() -> set[str]:
    """The metrics of the dashboard."""
    return {name for query in queries_of(DASHBOARD) for name in re.findall(r"kakeya_\w+", query)}


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
