"""What every benchmark shares: interleaved repeats, medians, and one JSON line at the end.

A goal is a ratio of two things measured in turns in one run, because a shared machine moves by
half between runs. Nothing here asserts: the line says what was measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

REFERENCE_APPEND_NS = 152.0
"""A list append under a lock on the machine that the goals were set on."""
_APPENDS, _BATCHES = 1_000, 30


def machine_factor() -> float:
    """How many times slower than the reference machine this one is now; 8 ms.

    A locked list append, the fastest of some batches. Where it moves within a run, take the
    median of calls between the measures. It is for reading a figure on a slow day: what was
    measured decides whether a goal is met.
    """
    lock, kept = threading.Lock(), list[int]()
    fastest_ns = math.inf
    for _ in range(_BATCHES):
        kept.clear()
        began_ns = time.perf_counter_ns()
        for number in range(_APPENDS):
            with lock:
                kept.append(number)
        fastest_ns = min(fastest_ns, (time.perf_counter_ns() - began_ns) / _APPENDS)
    return fastest_ns / REFERENCE_APPEND_NS


def at_reference(ours: float, machine_x: float) -> dict[str, float]:
    """What a line says of a time on the reference machine: the factor, and the time in the unit
    of `ours`."""
    return {"machine_x": _short(machine_x), "at_reference": _short(ours / machine_x)}


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
