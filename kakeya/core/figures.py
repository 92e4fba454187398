"""Figures: the numbers that a part tells of itself, each spelled once and read twice.

    /metrics          all figures, by name and labels; `gateway/figures.py` writes them
    /api/v1/status    the figures that have a key there, beside facts that are no numbers: `as_json`

A name ends in its unit (`_bytes`, `_seconds`) where it has one. Names, labels and keys are public:
dashboards and scripts read them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, product
from typing import Literal, TypeVar

Json = dict[str, object]
Labels = tuple[str, ...]
Label = TypeVar("Label", bound=str | Labels)
FigureKind = Literal["gauge", "counter", "histogram"]


@dataclass(slots=True)
class Durations:
    """Durations counted by upper bounds in seconds; the last count is of those beyond."""

    bounds_s: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds_s) + 1)

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> Durations:
        """Copy the counts of this moment."""
        return replace(self, counts=list(self.counts))

    @property
    def total(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with the number of durations up to it."""
        bounds = [*map(repr, self.bounds_s), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


Number = float | Durations


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, or a number for each value of some labels.

    `key` is the path in JSON, with dots; `{}` stands for the label. A mapping gives the paths of
    some labels, and the others are not in JSON.
    """

    kind: FigureKind
    name: str
    help: str
    values: Mapping[Labels, Number]
    by: Labels
    key: str | Mapping[str, str]

    def lay(self, told: Json) -> None:
        """Lay the values that have a path into nested JSON."""
        if isinstance(self.key, str) and self.key.endswith(".{}"):
            _lay(told, self.key.split(".")[:-1], {})  # there without values, too
        for labels, value in self.values.items():
            key = self.key if isinstance(self.key, str) else self.key.get("".join(labels), "")
            if key:
                # Labels may have dots, so they are filled in behind the split.
                _lay(told, [part.format(*labels) for part in key.split(".")], value)


def _figure(
    kind: FigureKind,
    spelled: str,
    help: str,
    value: Number | Mapping[Label, Number],
    key: str | Mapping[str, str] = "",
) -> Figure:
    """Make a figure, spelled `name` or `name{label,other}`: then `value` is by these labels."""
    name, *labels = re.findall(r"\w+", spelled)
    told = value if isinstance(value, Mapping) else {(): value}
    values = {(str(at),) if isinstance(at, str) else tuple(at): one for at, one in told.items()}
    return Figure(kind, name, help, values, tuple(labels), key)


def from_zero(counts: Mapping[Label, float], *by: Iterable[str]) -> dict[Labels, float]:
    """Counts with a 0 for each label that can be, so that `increase()` sees the first one; `by` are
    the values of each label."""
    found: dict[Labels, float] = dict.fromkeys(product(*by), 0)
    for at, count in counts.items():
        found[(str(at),) if isinstance(at, str) else tuple(at)] = count
    return found


gauge = partial(_figure, "gauge")
counter = partial(_figure, "counter")
"""Prometheus adds `_total` to its name."""
histogram = partial(_figure, "histogram")


def as_json(figures: Iterable[Figure], facts: Mapping[str, object] | None = None) -> Json:
    """Lay figures into nested JSON, and facts, which are given by path."""
    told: Json = {}
    for figure in figures:
        figure.lay(told)
    for key, fact in (facts or {}).items():
        _lay(told, key.split("."), fact)
    return told


def _lay(told: Json, path: Sequence[str], value: object) -> None:
    *parents, last = path
    for name in parents:
        inner = told.setdefault(name, {})
        assert isinstance(inner, dict), f"{'.'.join(path)}: {name} is a figure itself"
        told = inner
    told.setdefault(last, value)
