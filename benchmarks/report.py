"""What every benchmark shares: interleaved repeats, medians, and one JSON line at the end.

A goal is a ratio of two things measured in turns in one run, because a shared machine moves by
half between runs. Nothing here asserts: the line says what was measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path


def interleaved(
    measures: Mapping[str, Callable[[], float]], repeats: int = 5
) -> dict[str, list[float]]:
    """Run every measure in turns, `repeats` times; what each returned, in order."""
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            taken[name].append(measure())
    return taken


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def emit(
    what: str, *, ours: float, baseline: float, ratio: float, goal: str, met: bool, **more: object
) -> None:
    """Print the JSON line of one goal. `ours` and `baseline` in the unit that `what` names."""
    line = {
        "what": what,
        "ours": _short(ours),
        "baseline": _short(baseline),
        "ratio": _short(ratio),
        "goal": goal,
        "met": met,
        **more,
        "machine": f"{platform.system()} {platform.machine()} {os.cpu_count()} cores",
        "commit": _commit(),
    }
    print(json.dumps(line), flush=True)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
