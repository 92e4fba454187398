"""Whether engines that come and go leave anything behind in the agent: a soak, not a benchmark.

Each cycle is an engine as a node runs it: a real child is started, loads the embedded draft model,
decodes a few tokens and is ended. What the agent's own process holds is sampled after each cycle,
when none of its engines lives:

    rss_kb     resident memory; its slope is taken over the second half of the samples, since the
               allocator and the libraries take what they need in the first
    files      open files, sockets and pipes
    tasks      asyncio tasks
    threads    threads of the process
    shm        entries of /dev/shm
    children   child processes, dead ones that nobody waited for included

    .venv/bin/python -m benchmarks.leak_drill --cycles 1000 --together 2
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

import kakeya
from benchmarks.memory_sight import children
from kakeya.backends.engine.backend import EngineBackend
from kakeya.core.process import resident_bytes
from kakeya.generation.frames import Tokens
from kakeya.generation.request import DecodeRequest

MODEL = Path(kakeya.__file__).parent / "models" / "kakeya-tiny-draft"
READY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the agent's process holds after a cycle."""

    rss_kb: int
    files: int
    tasks: int
    threads: int
    shm: int
    children: int


async def sample() -> Sample:
    """Look at this process. Needs /proc."""
    gc.collect()
    return await asyncio.to_thread(_look, len(asyncio.all_tasks()))


def _look(tasks: int) -> Sample:
    shm = Path("/dev/shm")
    return Sample(
        rss_kb=(resident_bytes() or 0) // 1024,
        files=len(list(Path("/proc/self/fd").iterdir())),
        tasks=tasks,
        threads=threading.active_count(),
        shm=len(list(shm.iterdir())) if shm.exists() else 0,
        children=len(children(os.getpid())),
    )


def slope_kb(samples: Sequence[Sample]) -> float:
    """KiB of resident memory that a cycle adds, by least squares over the second half."""
    values = [one.rss_kb for one in samples[len(samples) // 2 :]]
    count = len(values)
    if count < 2:
        return 0.0
    middle, mean = (count - 1) / 2, sum(values) / count
    above = sum((at - middle) * (value - mean) for at, value in enumerate(values))
    return above / sum((at - middle) ** 2 for at in range(count))


async def cycle(number: int) -> None:
    """One engine from its start to its end, used in between."""

    def command(socket: Path) -> Sequence[str]:
        child = (sys.executable, "-m", "kakeya.node.engine_main", "--socket", str(socket))
        return (*child, "--model", str(MODEL), "--model-id", "draft")

    async with EngineBackend("draft", command) as backend:
        await backend.ready(READY_S)
        tokens = 0
        asked = DecodeRequest(token_ids=[1 + number % 50, 7, 9], max_tokens=8, kv_key="drill")
        async with aclosing(backend.decode(asked)) as frames:
            async for frame in frames:
                tokens += len(frame.token_ids) if isinstance(frame, Tokens) else 0
        if tokens == 0:
            raise RuntimeError("an engine decoded nothing")


async def drill(cycles: int, together: int = 1, limit_s: float = float("inf")) -> list[Sample]:
    """Run cycles, `together` at a time, until all are done or time is up; a sample after each
    round."""
    samples = [await sample()]
    until = time.monotonic() + limit_s
    done = 0
    while done < cycles and time.monotonic() < until:
        size = min(together, cycles - done)
        await asyncio.gather(*(cycle(done + at) for at in range(size)))
        done += size
        samples.append(await sample())
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--together", type=int, default=1, help="engines that live at one time")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args()
    began = time.monotonic()
    samples = asyncio.run(drill(options.cycles, options.together, options.limit_s))
    cycles = min(options.cycles, (len(samples) - 1) * options.together)
    line = {
        "what": "engines started and ended",
        "cycles": cycles,
        "seconds_per_cycle": round((time.monotonic() - began) / max(1, cycles), 2),
        "rss_slope_kb_per_cycle": round(slope_kb(samples) / options.together, 3),
        "first": asdict(samples[min(1, len(samples) - 1)]),
        "middle": asdict(samples[len(samples) // 2]),
        "last": asdict(samples[-1]),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
