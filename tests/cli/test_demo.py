"""`kakeya demo`: whole as a person runs it, and in shorter runs with each commit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.node.nodes import run_cli


def check(ended: subprocess.CompletedProcess[str], *, has_time: bool) -> None:
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["identical"] is True
    ways = {(row["text"], row["way"]) for row in report["rows"]}
    assert len(ways) == len(report["rows"]) == 8
    for row in report["rows"]:
        has_drafts = bool(row["drafted"] + row["shadowed"])
        match row["way"]:
            case "plain greedy":
                assert not has_drafts, row
                assert row["verified"] == 0, row
            case "local n-gram":
                assert has_drafts, row
            case _ if has_time:  # a peer's drafts may all be late where the machine is busy
                assert has_drafts, row


def test_the_demo_shows_identical_output_in_every_mode() -> None:
    """Two real nodes and every row of the table, each from one short run."""
    command = [sys.executable, "-m", "tests.cli.child_demo"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    check(ended, has_time=False)


@pytest.mark.slow
def test_the_whole_demo_ends_within_its_limit() -> None:
    check(run_cli("demo", "--json"), has_time=True)
