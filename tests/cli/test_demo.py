"""`kakeya demo`: whole as a person runs it, and in shorter runs with each commit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.node.nodes import run_cli

SHORT = """
import sys
from kakeya.cli import demo
demo.ROUNDS, demo.NEW_TOKENS = 1, 96
sys.exit(demo.run_demo(as_json=True))
"""


def check(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["identical"] is True
    ways = {(row["text"], row["way"]) for row in report["rows"]}
    assert len(ways) == len(report["rows"]) == 8
    for row in report["rows"]:
        # Whether drafting pays is a matter of this minute's speed; that drafts came is not.
        assert bool(row["drafted"] + row["shadowed"]) == (row["way"] != "plain greedy"), row
        assert row["verified"] == 0 or row["way"] != "plain greedy"


def is_without_drafts(ended: subprocess.CompletedProcess[str]) -> bool:
    """Whether a peer's drafts were all too late for a text, as in a moment without a processor."""
    rows = json.loads(ended.stdout)["rows"] if ended.returncode == 0 else []
    return any(
        row["way"].startswith("remote") and not row["drafted"] + row["shadowed"] for row in rows
    )


@pytest.mark.alone
def test_the_demo_shows_identical_output_in_every_mode() -> None:
    """Two real nodes and every row of the table, each from one short run."""
    command = [sys.executable, "-c", SHORT]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    ended = run()
    check(run() if is_without_drafts(ended) else ended)


@pytest.mark.slow
def test_the_whole_demo_ends_within_its_limit() -> None:
    check(run_cli("demo", "--json"))
