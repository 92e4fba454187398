"""Our dashboards in the model that Grafana Labs publish: each is read, nothing of it is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.memory.scrapes import read


def lost(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """Where a part of our JSON is not in what came back."""
    if isinstance(ours, dict):
        there = theirs if isinstance(theirs, dict) else {}
        return [one for k in ours for one in lost(ours[k], there.get(k), f"{place}/{k}")]
    if isinstance(ours, list):
        there = theirs if isinstance(theirs, list) and len(theirs) == len(ours) else [None] * 999
        return [one for n, part in enumerate(ours) for one in lost(part, there[n], f"{place}/{n}")]
    return [] if ours == theirs else [f"{place}: {ours!r} became {theirs!r}"]


@pytest.mark.parametrize("name", ["memory-dashboard.json", "page-arena-dashboard.json"])
def test_grafanas_own_model_reads_all_of_it(name: str) -> None:
    plugins.register_default_plugins()
    ours = read(name)
    model = Dashboard.from_json(ours)
    assert lost(ours, json.loads(JSONEncoder().encode(model))) == []
    assert {type(t).__module__.rpartition(".")[2] for p in model.panels for t in p.targets} == {
        "prometheus"
    }
