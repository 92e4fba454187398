"""`kakeya demo` as a person runs it."""

from __future__ import annotations

import json
from typing import Any

from tests.node.nodes import run_cli


def run_demo() -> dict[str, Any]:
    """One demo; its tokens must be identical each time."""
    ended = run_cli("demo", "--json")
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["identical"] is True
    return report


def test_the_demo_shows_identical_output_in_every_mode() -> None:
    for _ in range(3):
        # A peer whose answers all come too late for one run is asked again in the next.
        report = run_demo()
        if all(
            row["drafted"] + row["shadowed"] for row in report["rows"] if "n-gram" in row["way"]
        ):
            break
    ways = {(row["text"], row["way"]) for row in report["rows"]}
    assert len(ways) == len(report["rows"]) == 8
    by_way = {row["way"]: row for row in report["rows"] if row["text"] == "code"}
    assert by_way["plain greedy"]["verified"] == 0
    for way in ("local n-gram", "remote n-gram"):
        # Whether drafting pays is a matter of this minute's speed; that drafts came is not.
        assert by_way[way]["drafted"] + by_way[way]["shadowed"] > 0, way
