"""`kakeya demo` as a person runs it."""

from __future__ import annotations

import json

from tests.node.nodes import run_cli


def test_the_demo_shows_identical_output_in_every_mode() -> None:
    ended = run_cli("demo", "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["identical"] is True
    ways = {(row["text"], row["way"]) for row in report["rows"]}
    assert len(ways) == len(report["rows"]) == 8
    by_way = {row["way"]: row for row in report["rows"] if row["text"] == "code"}
    assert by_way["plain greedy"]["verified"] == 0
    for way in ("local n-gram", "remote n-gram"):
        # Whether drafting pays is a matter of this minute's speed; that drafts came is not.
        assert by_way[way]["drafted"] + by_way[way]["shadowed"] > 0, way
