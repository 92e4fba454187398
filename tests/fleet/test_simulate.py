"""The command line of the simulation, small."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.outcome import Outcome, table

TOP = Path(__file__).resolve().parents[2]
COMMAND = "from benchmarks.simulate import main; raise SystemExit(main())"


def _simulate(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--nodes", "3", "--hours", "0.1", "--jobs", "1", *options],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_outcomes_are_printed_for_machines_and_can_be_shown_again() -> None:
    lines = _simulate("--loss", "0.1", "--seeds", "2", "--partition", "200", "--json")
    outcomes = [Outcome.from_line(line) for line in lines.splitlines()]
    assert [o.case.control for o in outcomes] == ["", "fanout 1", "30 s, fanout 3", "no memory"]
    assert [outcome.to_line() for outcome in outcomes] == lines.splitlines()
    ours = outcomes[0]
    assert ours.hours is not None
    assert ours.share_within_goal("heal") == 1.0
    assert outcomes[-1].share_within_goal("heal") == 0.0
    assert table(outcomes).row_count == 4


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib, which the simulate extra installs")
    picture = tmp_path / "plot.png"
    shown = _simulate("--loss", "0", "--seeds", "1", "--no-controls", "--plot", str(picture))
    assert "oldest" in shown
    assert 10_000 < picture.stat().st_size < 200_000
