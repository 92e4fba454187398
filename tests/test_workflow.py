"""The workflow for hosted Macs, as far as it can be read here: YAML, and bash in each step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

FILE = Path(__file__).parents[1] / ".github" / "workflows" / "mac.yml"
JOB = yaml.safe_load(FILE.read_text())["jobs"]["mac"]
STEPS = [step for step in JOB["steps"] if "run" in step]


def test_each_system_runs_with_each_python() -> None:
    matrix = JOB["strategy"]["matrix"]
    assert matrix["os"] == ["macos-14", "macos-15", "macos-26"]
    assert matrix["python"] == ["3.11", "3.13", "3.14"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.get("name", "step"))
def test_bash_reads_a_step(step: dict[str, str]) -> None:
    read = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True)
    assert (read.returncode, read.stderr) == (0, "")
