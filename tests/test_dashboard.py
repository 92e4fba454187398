"""The dashboard in the model that Grafana Labs publish: it is read, nothing of it is lost."""

from __future__ import annotations

import json
import re
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard, RowPanel

from tests.scrapes import ALERTS, DASHBOARD, DURATION, panels_of, rules_of


def lost(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """Where a part of our JSON is not in what came back."""
    if isinstance(ours, dict):
        there = theirs if isinstance(theirs, dict) else {}
        return [one for k in ours for one in lost(ours[k], there.get(k), f"{place}/{k}")]
    if isinstance(ours, list):
        there = theirs if isinstance(theirs, list) and len(theirs) == len(ours) else [None] * 999
        return [one for n, part in enumerate(ours) for one in lost(part, there[n], f"{place}/{n}")]
    return [] if ours == theirs else [f"{place}: {ours!r} became {theirs!r}"]


def test_grafanas_own_model_reads_all_of_it() -> None:
    plugins.register_default_plugins()
    model = Dashboard.from_json(DASHBOARD)
    assert lost(DASHBOARD, json.loads(JSONEncoder().encode(model))) == []
    panels = [panel for panel in model.panels or () if not isinstance(panel, RowPanel)]
    targets = [target for panel in panels for target in panel.targets or ()]
    assert {type(target).__module__.rpartition(".")[2] for target in targets} == {"prometheus"}


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """Held against what Grafana documents for an import."""
    assert DASHBOARD["title"]
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
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
    for panel in panels_of(DASHBOARD):
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == variables


def test_the_alerts_have_the_form_of_prometheus_rules() -> None:
    assert set(ALERTS) == {"groups"}
    rules = rules_of(ALERTS)
    for group in ALERTS["groups"]:
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
