"""What the processes of a node hold, every ten seconds, and what its status must add up to.

rss_mib   memory of its own: pages that processes share are left out
files     open files, sockets and pipes
threads   threads
leases    of all residents, and pages of the arena in use: of the agent alone

Linux only: processes are read from /proc.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.slopes import Point, Verdict, flat
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from tests.node.soak_sight import adds_up
from tests.node.test_routed_namespaces import get
from tests.node.test_three_namespaces import Mini

SAMPLE_S = 10.0
MOST = {"rss_mib": 1.0, "files": 1.0, "threads": 1.0, "leases": 1.0, "pages": 100.0}
"""By how much each may grow in an hour."""
WARM_SHARE, WARM_S = 0.25, 600.0
JUDGED_HOURS = 1 / 3
"""Slopes of shorter lives, behind the warm-up, say nothing yet: growth comes in steps."""


def status_of(mini: Mini) -> dict[str, Any]:
    """What the node of a machine says of itself; {} while it does not answer."""
    with suppress(ValueError, subprocess.TimeoutExpired):
        found: dict[str, Any] = get(mini, "/api/v1/status")
        return found
    return {}


def process_of(pid: int) -> dict[str, float]:
    """What a process holds; {} once it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        files = len(os.listdir(folder / "fd"))  # noqa: PTH208 - names, not paths
        threads = len(os.listdir(folder / "task"))  # noqa: PTH208
    except OSError:
        return {}
    size = resident_bytes(pid)
    return {} if size is None else {"rss_mib": size / MIB, "files": files, "threads": threads}


@dataclass
class Samples:
    """The samples by machine, process and quantity, written to a file as they come."""

    file: Path
    values: dict[tuple[str, int, str], list[Point]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unanswered: int = 0
    began_mono: float = field(default_factory=time.monotonic)

    async def watch(self, mini: Mini) -> None:
        """Sample a machine for ever."""
        while True:
            began_mono = time.monotonic()
            await asyncio.to_thread(self.take, mini)
            await asyncio.sleep(max(1.0, SAMPLE_S - (time.monotonic() - began_mono)))

    def take(self, mini: Mini) -> None:
        """Take one sample of all processes of a machine."""
        if mini.node is None:
            return
        agent, status = mini.node.pid, status_of(mini)
        self.unanswered += not status
        more: dict[str, float] = {}
        engines: list[int] = []
        if status:
            self.problems += [f"{mini.label}: {one}" for one in adds_up(status)]
            engines = [int(one["pid"]) for one in status["models"] if one.get("pid")]
            pages = status["adapters"]["pages"]
            leases = sum(one["leases"] for one in status["memory"]["residents"])
            more = {"leases": leases, "pages": pages["total"] - pages["free"]}
        self._add(f"{mini.label} agent", agent, process_of(agent) | more)
        for pid in engines:
            self._add(f"{mini.label} engine", pid, process_of(pid))

    def _add(self, name: str, pid: int, held: dict[str, float]) -> None:
        if "rss_mib" not in held:
            return
        hours = (time.monotonic() - self.began_mono) / 3600
        for what, value in held.items():
            self.values.setdefault((name, pid, what), []).append((hours, value))
        line = {"hours": round(hours, 5), "process": name, "pid": pid} | held
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def verdicts(self) -> list[Verdict]:
        """A row for each quantity of the process of each name that lived longest."""
        longest: dict[str, tuple[float, int]] = {}
        for (name, pid, what), points in self.values.items():
            lasted = points[-1][0] - points[0][0]
            if what == "rss_mib" and lasted >= longest.get(name, (-1.0, 0))[0]:
                longest[name] = (lasted, pid)
        rows = []
        for (name, pid, what), points in sorted(self.values.items()):
            if longest.get(name, (0.0, -1))[1] == pid:
                kept = behind_warm_up(points)
                rows.append(
                    flat(f"{name}: {what}", kept, MOST[what], unit=what, least_hours=JUDGED_HOURS)
                )
        return rows


def behind_warm_up(points: Sequence[Point]) -> Sequence[Point]:
    """The samples after a quarter of a life, at most ten minutes."""
    first, last = points[0][0], points[-1][0]
    start = first + min(WARM_S / 3600, (last - first) * WARM_SHARE)
    return [point for point in points if point[0] >= start]


def write_table(file: Path, head: Iterable[str], rows: Iterable[object]) -> None:
    """Write a table anew, so that a reader never meets half of it."""
    text = "\n".join((*head, *map(str, rows))) + "\n"
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)
