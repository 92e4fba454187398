"""What the fetches of a node have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.weights.index import WeightIndex
from kakeya.weights.peers import WeightsPeers
from kakeya.weights.schedule import RateBound


@dataclass(slots=True, kw_only=True)
class PullTools:
    """What every fetch of a node uses. `make_room` frees the budget for the fetch into a folder of
    this name; `changed` hears of each model that came."""

    folder: Path
    index: WeightIndex
    peers: WeightsPeers
    bound: RateBound
    clock: Clock
    make_room: Callable[[str], Awaitable[None]]
    changed: Callable[[], Awaitable[None]]
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        """Count for the figures."""
        self.counts[what] = self.counts.get(what, 0) + number
