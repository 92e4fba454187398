"""Slopes of what a process holds, by the median of the slopes of all pairs of samples (Theil and
Sen): a few wild samples do not move it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_POINTS = 400
"""More samples are thinned: the pairs of 400 are 80,000."""
Point = tuple[float, float]
"""Hours, and a value."""


def slope(points: Sequence[Point]) -> float:
    """By how much the value grows in an hour; 0 = fewer than two moments."""
    step = -(-len(points) // MOST_POINTS) or 1
    kept = points[::step]
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0])
        for at, a in enumerate(kept)
        for b in kept[at + 1 :]
        if b[0] > a[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row of the table: what must hold, and what was seen."""

    what: str
    seen: str
    goal: str
    is_met: bool | None
    """None = seen for too short a time to be judged."""

    def __str__(self) -> str:
        mark = {True: "ok", False: "NOT", None: "?"}[self.is_met]
        return f"{mark:<4}{self.what:<50} {self.seen:<34} {self.goal}"


def none_of(what: str, problems: Sequence[str]) -> Verdict:
    """The row of something that must never be seen; the first problem stands in it."""
    seen = "0" if not problems else f"{len(problems)}: {problems[0][:160]}"
    return Verdict(what=what, seen=seen, goal="0", is_met=not problems)


def flat(
    what: str, points: Sequence[Point], most: float, *, unit: str, least_hours: float
) -> Verdict:
    """The row of a value that must not grow by more than `most` an hour, judged where its samples
    span as much as `least_hours`."""
    grows, values = slope(points), [value for _, value in points] or [0.0]
    is_judged = bool(points) and points[-1][0] - points[0][0] >= least_hours
    return Verdict(
        what=f"{what}, {len(points)} samples",
        seen=f"{grows:+.3g} {unit}/h, {min(values):.4g} to {max(values):.4g}",
        goal=f"<= {most:g} {unit}/h" if is_judged else "too short to judge",
        is_met=grows <= most if is_judged else None,
    )
