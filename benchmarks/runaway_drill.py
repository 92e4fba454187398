"""Engines that take memory without end, and that hang in native code: how soon the node ends them.

grow    a thread of the engine takes 8 MiB each 10 ms
hang    native code that holds the interpreter writes 3 GiB, without a pause
still   native code that holds the interpreter waits for ever, beyond the lease; then the budget
        falls below what the engine holds

Each in a real engine with a stream in it, beside the real arbiter and the real watch of engines.
Counted: ends within 1 s of the budget's crossing with at most 5 % above it, streams that went on in
the next engine or got a typed error, and next engines that run one sequence at a time.

.venv/bin/python -m benchmarks.runaway_drill [--times 20] [--modes grow,hang,still] [--limit-s 200]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import mmap
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import EMBEDDED
from benchmarks.report import emit, median
from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engine.restart import RestartPolicy
from kakeya.backends.engine.watch import EngineWatch
from kakeya.core.clock import SystemClock
from kakeya.core.errors import KakeyaError
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from kakeya.gateway.http.edge import status_of
from kakeya.generation.facts import ModelState
from kakeya.generation.frames import Tokens
from kakeya.generation.request import DecodeRequest, Sampling
from kakeya.memory.api import MemoryArbiter

MODEL = EMBEDDED
MODES = ("grow", "hang", "still")
SHARE, WITHIN_S = 0.05, 1.0
LEASE_MORE, BUDGET_MORE = 64 * MIB, 800 * MIB
"""Above what the engine occupies after its load."""
PIECE, MOST = 8 * MIB, 3 << 30
SAMPLE_S = 0.002
WAIT_S = 60.0
TOKENS = 1500


# The engine.


def child() -> None:
    """The real engine, with a thread that waits for the file of its mode and then misbehaves."""
    from kakeya.node.engine_main import main as engine_main

    folder = Path(sys.argv[2])
    threading.Thread(target=misbehave, args=(folder,), daemon=True).start()
    engine_main(sys.argv[3:])


def misbehave(folder: Path) -> None:
    files = {mode: folder / mode for mode in MODES}
    while True:
        for mode, file in files.items():
            if file.exists():
                file.unlink()
                if mode == "grow":
                    grow()
                # Calls by PyDLL keep the interpreter, as extension modules may.
                native = ctypes.PyDLL(None)
                fill(native, MOST if mode == "hang" else LEASE_MORE + 100 * MIB)
                native.sleep(1000)
        time.sleep(0.01)


def grow() -> None:
    taken = []
    while len(taken) * PIECE < MOST:
        taken.append(mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        taken[-1].write(b"x" * PIECE)
        time.sleep(0.01)


def fill(native: ctypes.PyDLL, size: int) -> None:
    native.malloc.restype = ctypes.c_void_p
    native.malloc.argtypes = [ctypes.c_size_t]
    native.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    native.memset(native.malloc(size), 1, size)


# The node's side.


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One end. `took_s` is from the first look beyond the budget to the end of the process."""

    is_ended: bool
    took_s: float
    over_share: float
    answer: str
    is_careful: bool

    @property
    def is_good(self) -> bool:
        """Whether all was as it should be."""
        in_time = self.took_s <= WITHIN_S and self.over_share <= SHARE
        is_told = self.answer == "went on" or self.answer.endswith(" 503")
        return self.is_ended and in_time and self.is_careful and is_told


@dataclass(slots=True)
class Seen:
    """The memory of the engine, sampled in a thread: the drill's own loop is the watch's."""

    pid: int
    budget: int
    began_mono: float | None = None
    highest: int = 0
    ended_mono: float | None = None

    def watch(self) -> None:
        """Sample until the process has no memory, or WAIT_S are over."""
        until = time.monotonic() + WAIT_S
        while (now := time.monotonic()) < until:
            size = resident_bytes(self.pid)
            if not size:
                self.ended_mono = now
                return
            self.highest = max(self.highest, size)
            if size > self.budget and self.began_mono is None:
                self.began_mono = now
            time.sleep(SAMPLE_S)


async def answer_of(backend: EngineBackend) -> str:
    """What becomes of a stream that runs meanwhile."""
    asked = DecodeRequest(
        token_ids=(1, 7, 9), max_tokens=TOKENS, sampling=Sampling(temperature=1.0, seed=5)
    )
    pid = backend.pid
    try:
        async with aclosing(backend.decode(asked)) as frames:
            async for frame in frames:
                if isinstance(frame, Tokens) and backend.pid not in (None, pid):
                    return "went on"
    except KakeyaError as error:
        return f"{type(error).__name__} {status_of(error)}"
    return "was over before"


async def until(condition: Callable[[], bool]) -> bool:
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        return False
    return True


async def run_once(mode: str, folder: Path) -> Run:
    def command(socket: Path) -> Sequence[str]:
        own = (sys.executable, "-m", "benchmarks.runaway_drill", "--child", str(folder))
        return (*own, "--socket", str(socket), "--model", str(MODEL), "--model-id", "drill")

    clock = SystemClock()
    options = EngineOptions(restart=RestartPolicy(max_deaths=100))
    async with (
        MemoryArbiter(budget=1 << 40, clock=clock) as arbiter,
        EngineBackend("drill", command, options=options) as backend,
        EngineWatch(arbiter, clock) as watch,
    ):
        await backend.ready(WAIT_S)
        pid = backend.pid or 0
        size = await asyncio.to_thread(resident_bytes, pid) or 0
        seen = Seen(pid, size + BUDGET_MORE)
        arbiter.set_budget(seen.budget)
        watch.attach("drill", backend, size + LEASE_MORE)
        stream = asyncio.create_task(answer_of(backend))
        await until(lambda: backend.running == 1)
        await asyncio.to_thread((folder / mode).touch)
        if mode == "still":
            now = 0
            while now < (now := await asyncio.to_thread(resident_bytes, pid) or 0):  # noqa: ASYNC110
                await asyncio.sleep(1.5)  # until it has grown: what is left is the silence
            seen.budget = int(now / (1 + SHARE / 2))
            arbiter.set_budget(seen.budget)
        await asyncio.to_thread(seen.watch)
        answer = await stream
        is_back = await until(lambda: backend.state is ModelState.READY and backend.pid != pid)
        is_careful = is_back and watch.status()["drill"]["max_running"] == 1
    return Run(
        is_ended=seen.ended_mono is not None,
        took_s=(seen.ended_mono or float("inf")) - (seen.began_mono or seen.ended_mono or 0.0),
        over_share=max(0.0, seen.highest / seen.budget - 1),
        answer=answer,
        is_careful=is_careful,
    )


async def drill(modes: Sequence[str], times: int, limit_s: float) -> None:
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    until_mono = time.monotonic() + limit_s
    for _ in range(times):
        for mode in modes:
            if time.monotonic() < until_mono:
                with tempfile.TemporaryDirectory() as folder:
                    runs[mode].append(one := await run_once(mode, Path(folder)))
                    print(mode, one, file=sys.stderr, flush=True)
    for mode, done in runs.items():
        if done:
            report(mode, done)


def report(mode: str, done: Sequence[Run]) -> None:
    good = sum(one.is_good for one in done)
    emit(
        f"engines ended within {WITHIN_S:g} s and {SHARE:.0%} of the budget ({mode})",
        ours=good,
        baseline=len(done),
        ratio=good / len(done),
        goal="all",
        met=good == len(done),
        seconds_median=round(median([one.took_s for one in done]), 3),
        seconds_most=round(max(one.took_s for one in done), 3),
        over_budget_median=round(median([one.over_share for one in done]), 4),
        over_budget_most=round(max(one.over_share for one in done), 4),
        answers=dict(Counter(one.answer for one in done)),
        careful_after=sum(one.is_careful for one in done),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin none after this")
    options = parser.parse_args()
    asyncio.run(drill(options.modes.split(","), options.times, options.limit_s))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child()
    else:
        main()
