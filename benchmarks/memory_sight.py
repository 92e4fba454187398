"""What a node's memory looks like from outside, while it runs: ledger, processes, events.

For drills and soaks. Linux only: processes are read from /proc.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kakeya.cli.child import NodeProcess
from kakeya.core.errors import KakeyaError
from kakeya.core.process import resident_bytes

SAMPLE_S = 0.25


def children(pid: int) -> list[int]:
    """The processes that a process started and that live, or that nobody waited for."""
    found = []
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += map(int, (folder / "children").read_text().split())
        except OSError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. `engines_bytes` is what all engine processes occupy together, shared pages left
    out: whoever made those counts them."""

    at_mono: float
    committed_bytes: int
    budget_bytes: int
    engines_bytes: int
    engines: int
    level: str


@dataclass(slots=True)
class Sight:
    """Looks at a node again and again; keeps samples, and each event of its memory once."""

    node: NodeProcess
    samples: list[Sample] = field(default_factory=list)
    events: dict[tuple[str, str, str, int], dict[str, Any]] = field(default_factory=dict)
    unreadable: int = 0
    told_over: list[dict[str, Any]] = field(default_factory=list)
    """All that the node said of its memory whenever that was more than the budget."""

    async def watch(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(SAMPLE_S)

    async def look(self) -> dict[str, Any]:
        """Take one sample; what the node said of its memory, {} when it did not answer."""
        try:
            status = await asyncio.to_thread(self.node.api.get, "/api/v1/status")
        except KakeyaError:
            self.unreadable += 1
            return {}
        now = time.monotonic()
        memory: dict[str, Any] = status["memory"]  # type: ignore[assignment]
        pids = await asyncio.to_thread(children, self.node.pid)
        sizes = await asyncio.to_thread(lambda: [resident_bytes(pid) or 0 for pid in pids])
        self.samples.append(
            Sample(
                now,
                memory["committed_bytes"],
                memory["budget_bytes"],
                sum(sizes),
                sum(size > 0 for size in sizes),
                memory["level"],
            )
        )
        if memory["committed_bytes"] > memory["budget_bytes"]:
            self.told_over.append(memory)
        for one in memory["last_events"]:
            # The age is rounded: the same event may seem to be at one of two times.
            at = round((now - one["age_s"]) / 2)
            places = [(one["what"], one["model"], one["why"], at + step) for step in (-1, 0, 1)]
            if not any(place in self.events for place in places):
                self.events[places[1]] = one
        return memory

    def over_budget(self) -> list[Sample]:
        """The samples at which the ledger had promised more than the budget."""
        return [one for one in self.samples if one.committed_bytes > one.budget_bytes]

    def too_large(self) -> list[Sample]:
        """The samples at which the engines occupied more than the budget."""
        return [one for one in self.samples if one.engines_bytes > one.budget_bytes]

    def named(self, what: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [one for one in self.events.values() if one["what"] == what]


def metrics(text: str) -> dict[str, float]:
    """Samples of a scrape by their names with labels, as they are written."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            found[name] = float(value)
    return found


def total(samples: dict[str, float], name: str, *parts: str) -> float:
    """The sum of a metric over the labels that hold all `parts`."""
    return sum(
        value
        for key, value in samples.items()
        if key.partition("{")[0] == name and all(part in key for part in parts)
    )
