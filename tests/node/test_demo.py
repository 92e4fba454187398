"""`kakeya demo` as a person runs it."""

from __future__ import annotations

import json
from typing import Any

from tests.node.nodes import run_cli


def test_the_demo_shows_identical_output_in_every_mode() -> None:
    ended = run_cli("demo", "--json")
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["identical"] is True
    ways = {(row["text"], row["way"]) for row in report["rows"]}
    assert len(ways) == len(report["rows"]) == 8
    for row in report["rows"]:
        # Whether drafting pays is a matter of this minute's speed; that drafts came is not.
        assert bool(row["drafted"] + row["shadowed"]) == (row["way"] != "plain greedy"), row
        assert row["verified"] == 0 or row["way"] != "plain greedy"
