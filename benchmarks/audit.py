"""What a simulated fleet shows against what is true: who is missed, who haunts, how old cards get.

The truth is known here: which nodes run, since when, and which edges carry messages. Each view is
looked at four times an interval. A node counts as falsely absent where it and the viewer have run
for a while, could reach each other, and the viewer does not show it; as a ghost where a viewer
still shows it long after its TTL ran out.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import numpy as np

from benchmarks.virtual_fleet import VirtualFleet, VirtualNode
from kakeya.fleet.view.beats import Floats

LOOKS_PER_INTERVAL = 4
SETTLE_ROUNDS = 12
"""A start, an end or a healed split is news for so long; what is missing meanwhile is not false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Counts over all looks. `p9999_age_s` is the age that one card in 10,000 exceeds."""

    pairs: int
    absent_pairs: int
    nodes_ever_absent: int
    doubted_pairs: int
    ghosts: int
    task_failures: int
    oldest_age_s: float
    p9999_age_s: float

    @property
    def absent_share(self) -> float:
        """Share of the pairs that were falsely absent."""
        return self.absent_pairs / self.pairs if self.pairs else 0.0

    @property
    def doubted_share(self) -> float:
        """Share of the pairs in which the viewer would give a living node no work."""
        return self.doubted_pairs / self.pairs if self.pairs else 0.0


class Audit:
    """Looks at the views of one fleet while it runs."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self._fleet = fleet
        self._settle_s = SETTLE_ROUNDS * fleet.pace.interval_s
        self._pairs = self._absent = self._doubted = self._ghosts = 0
        self._ever_absent: set[str] = set()
        self._failures: dict[str, int] = {}
        self._oldest_s = 0.0
        self._by_age = np.zeros(math.ceil(2 * fleet.pace.ttl_s) + 1, dtype=np.int64)

    async def watch(self) -> None:
        """Look at one view after the other, for ever."""
        pace = self._fleet.pace.interval_s / LOOKS_PER_INTERVAL
        while True:
            up = self._fleet.up()
            for node in up:
                await asyncio.sleep(pace / len(up))
                self._look(node)

    def findings(self) -> Findings:
        """What was found so far."""
        total = int(self._by_age.sum())
        tail = np.searchsorted(np.cumsum(self._by_age), 0.9999 * total)
        return Findings(
            pairs=self._pairs,
            absent_pairs=self._absent,
            nodes_ever_absent=len(self._ever_absent),
            doubted_pairs=self._doubted,
            ghosts=self._ghosts,
            task_failures=sum(self._failures.values()),
            oldest_age_s=self._oldest_s,
            p9999_age_s=float(tail),
        )

    def _look(self, viewer: VirtualNode) -> None:
        settled_before = asyncio.get_running_loop().time() - self._settle_s
        if not viewer.is_up or viewer.changed_at > settled_before:
            return
        self._failures[viewer.name] = viewer.task_failures()
        if not self._fleet.is_whole(since=settled_before):
            self._compare(viewer, settled_before)
            return
        ages = viewer.ages()  # of the dead and the cut off, cards do get old
        self._note_ages(ages)
        if np.count_nonzero(ages <= self._fleet.pace.ttl_s) + 1 == len(self._fleet.nodes):
            self._pairs += len(self._fleet.nodes)
            self._doubted += len(viewer.doubted())
        else:
            self._compare(viewer, settled_before)

    def _compare(self, viewer: VirtualNode, settled_before: float) -> None:
        now, nodes = asyncio.get_running_loop().time(), self._fleet.nodes
        live = viewer.live()
        expected = self._fleet.reachable(viewer, since=settled_before)
        absent = expected - live
        self._pairs += len(expected)
        self._absent += len(absent)
        self._ever_absent |= absent
        self._doubted += len(expected & viewer.doubted())
        late = self._fleet.pace.ttl_s + 2 * self._fleet.pace.interval_s
        self._ghosts += sum(
            not nodes[name].is_up and now - nodes[name].changed_at > late
            for name in live - expected
        )

    def _note_ages(self, ages: Floats) -> None:
        self._oldest_s = max(self._oldest_s, float(ages.max()))
        bins = np.clip(np.ceil(ages), 0, len(self._by_age) - 1).astype(np.int64)
        self._by_age += np.bincount(bins, minlength=len(self._by_age))
