"""What a node with one model costs a machine at night: agent and engine together, at rest.

    share      processor time, in percent of one core; goal 0.3
    wakeups    how often in a second one of its threads is woken; goal 30
    written    bytes that went to disk; goal 0

Each start is measured, since gRPC's timers may fall together or apart: a median hides that. Linux
only: threads are read from /proc. On the model of real size, which `scripts/real_model` makes.

    .venv/bin/python -m benchmarks.idle [--starts 3] [--settle 100] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models import REAL
from benchmarks.nodes import wait_ready
from benchmarks.report import emit
from kakeya.cli.child import NodeProcess

SHARE, WAKEUPS = 0.3, 30.0
_WAITED = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)
_WRITTEN = re.compile(r"^write_bytes: (\d+)", re.MULTILINE)


class Sum(NamedTuple):
    """What all threads of some processes have used so far."""

    processor_ns: int
    wakeups: int
    written: int


def used(pids: Iterable[int]) -> Sum:
    """Read it now."""
    processor_ns = wakeups = written = 0
    for process in (Path(f"/proc/{pid}") for pid in pids):
        for thread in (process / "task").iterdir():
            processor_ns += int((thread / "schedstat").read_text().split()[0])
            wakeups += sum(map(int, _WAITED.findall((thread / "status").read_text())))
        written += sum(map(int, _WRITTEN.findall((process / "io").read_text())))
    return Sum(processor_ns, wakeups, written)


async def night(home: Path, settle_s: float, seconds: float) -> None:
    """Start a node, let it come to rest, and measure."""
    async with NodeProcess(home, "--model", str(REAL)) as node:
        await wait_ready(node)
        await asyncio.sleep(settle_s)
        models: Any = node.api.get("/api/v1/status")["models"]
        pids = [node.pid, *(int(one["pid"]) for one in models)]
        lines = len(node.log_file.read_text().splitlines())
        before = used(pids)
        await asyncio.sleep(seconds)
        after = used(pids)
        told = len(node.log_file.read_text().splitlines()) - lines
    share = (after.processor_ns - before.processor_ns) / 1e7 / seconds
    wakeups = (after.wakeups - before.wakeups) / seconds
    written = after.written - before.written
    for what, ours, most in (
        ("idle node: percent of a core", share, SHARE),
        ("idle node: wake-ups a second", wakeups, WAKEUPS),
    ):
        emit(
            what,
            ours=ours,
            baseline=most,
            ratio=ours / most,
            goal=f"at most {most:g}",
            met=ours <= most,
            written=written,
            log_lines=told,
        )


def main() -> None:
    """Measure some starts, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--settle", type=float, default=100.0, help="seconds after the load")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if not REAL.is_dir():
        parser.error("the model of real size is missing: run ./scripts/real_model")
    for _ in range(options.starts):
        with tempfile.TemporaryDirectory() as home:
            asyncio.run(night(Path(home), options.settle, options.seconds))


if __name__ == "__main__":
    main()
