"""End engines that outgrow the whole budget, or hang beyond it, before the machine is short.

An engine is here any child that computes for this node, image workers too.

The escalation of `escalation.py` asks an engine first and is slow; the guard asks no engine, which
may hang. It looks in a thread of its own, so that an event loop that is busy or blocked delays no
end. What an engine may occupy comes from the ledger, which belongs to the event loop: the loop
tells the thread at each change of a lease, before the engine learns of it, and every LOOK_S. So an
engine within its lease is never ended, and one beyond it by figures that are LOOK_S old at most.

    loop     allowances, the question whether an engine beyond the budget answers
    thread   memory of the processes against the allowances, SIGKILL; the loop is told
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kakeya.core.clock import Clock
from kakeya.core.process import signal_group
from kakeya.core.tasks import shared_pause_s
from kakeya.core.units import format_bytes
from kakeya.generation.facts import ModelState
from kakeya.memory.api import MemoryArbiter
from kakeya.memory.arbiter.resident import ResidentKey

IDLE_S = 4.0
"""Seconds between two looks, and two allowances, while no engine loads or has a request; such an
engine hardly grows, and its next request is told at once."""
LOOK_S = 0.01
"""The same while one does: memory is written at gigabytes per second. A look takes some 50
microseconds an engine."""
CLOSE_S = 0.002
"""The same while an engine will soon be beyond what it may occupy."""
GROWTH_SHARE = 0.02
GROWTH_S = 1.0
"""An engine that is beyond the budget, and beyond its own highest memory `GROWTH_S` ago by
`GROWTH_SHARE` of its lease, does not stop by itself. Memory that comes and goes is no growth."""
SILENT_S = 0.8
"""An engine that is beyond the budget and whose process answers nothing for so long hangs in native
code. Within the budget it may be slow in peace: the probes of its backend decide."""
TELL_S = 0.1
"""Seconds between two allowances of the event loop while an engine is at work."""


class GuardedBackend(Protocol):
    """The part of a child's owner that the guard uses."""

    on_work: Callable[[], None]
    """Called when there is work; the guard sets it."""

    @property
    def pid(self) -> int | None:
        """The process; None = there is none. Read in the guard's thread too."""
        ...

    @property
    def state(self) -> ModelState:
        """The state of the model."""
        ...

    @property
    def running(self) -> int:
        """The requests that run."""
        ...

    @property
    def waiting(self) -> int:
        """The requests that wait for a place."""
        ...

    async def answers(self, timeout_s: float) -> bool:
        """Whether the process answers in that time, or may be busy in peace."""
        ...

    def kill(self, cause: str) -> None:
        """Kill the process."""
        ...


class GuardedLease(Protocol):
    """A lease of memory, and the owner of the child that has it."""

    @property
    def backend(self) -> GuardedBackend:
        """The owner."""
        ...

    @property
    def bytes(self) -> int:
        """The bytes that the child may occupy now."""
        ...


@dataclass(frozen=True, slots=True)
class EngineAllowance:
    """The bytes of an engine's lease, of the node's budget, and the most that the engine may occupy
    by both: its lease, or all that the budget leaves beside the others, if that is more."""

    lease_bytes: int
    most_bytes: int
    budget_bytes: int

    def excess(self, occupied: int) -> str:
        """Return in words how so many bytes are too many; "" = they are not."""
        if occupied <= self.most_bytes:
            return ""
        return (
            f"grew to {format_bytes(occupied)}, beyond its lease of "
            f"{format_bytes(self.lease_bytes)} and the budget of {format_bytes(self.budget_bytes)}"
        )


@dataclass(slots=True)
class Growth:
    """The memory of one process over the last `GROWTH_S`. Pure, `now` is an argument."""

    peaks: deque[tuple[float, int]] = field(default_factory=deque)
    """The highest memory until each look."""
    last_mono: float = 0.0
    last_bytes: int = 0
    per_s: float = 0.0
    """The growth between the last two looks, in bytes per second."""

    def see(self, occupied: int, now: float) -> int:
        """Take a measurement; return the bytes above the highest ones `GROWTH_S` ago."""
        peaks = self.peaks
        while len(peaks) > 1 and now - peaks[0][0] > GROWTH_S:
            peaks.popleft()
        before = peaks[0][1] if peaks else occupied
        spent_s = now - self.last_mono
        self.per_s = (occupied - self.last_bytes) / spent_s if peaks and spent_s > 0 else 0.0
        peaks.append((now, max(occupied, peaks[-1][1] if peaks else 0)))
        self.last_mono, self.last_bytes = now, occupied
        return occupied - before

    def pause_s(self, most_bytes: int, *, is_at_work: bool) -> float:
        """Return the seconds until the next look: half of those until `most_bytes` are passed, if
        it goes on like this."""
        longest_s = LOOK_S if is_at_work or self.per_s > 0 else IDLE_S
        if self.per_s <= 0:
            return longest_s
        return min(longest_s, max(CLOSE_S, (most_bytes - self.last_bytes) / self.per_s / 2))


@dataclass(slots=True, eq=False)
class GuardedEngine:
    """One engine under guard. The loop sets `allowance`, the thread all below it; the loop sets
    `guarded_bytes` too, of an engine that is silent."""

    key: ResidentKey
    lease: GuardedLease
    parted_bytes: int = 0
    """The idle KV that counts for the tenant and not for the engine. Both are counted in one step,
    since the spare part may change in between."""
    is_asked: bool = False
    """Whether the guard waits for an answer of the process."""
    allowance: EngineAllowance = EngineAllowance(0, 0, 0)
    guarded: int | None = None
    """The process at the guard's last look; `guarded_bytes` is its memory."""
    guarded_bytes: int = 0
    killed: int | None = None
    """The process that the guard killed; the system may take a moment to end it."""
    growth: Growth = field(default_factory=Growth)

    @property
    def is_at_work(self) -> bool:
        """Whether it has requests, or a child of it loads."""
        backend = self.lease.backend
        is_loading = backend.state in (ModelState.LOADING, ModelState.RESTARTING)
        return is_loading or backend.running + backend.waiting > 0


class EngineGuard:
    """See the module. `ended` is called on the event loop for a process that was killed, or is to
    be, with its bytes and the reason in words; `kill` kills one at once, from any thread."""

    def __init__(
        self,
        arbiter: MemoryArbiter,
        clock: Clock,
        *,
        ended: Callable[[GuardedEngine, int, str], None],
        resident: Callable[[int], int | None],
        kill: Callable[[int], None] = signal_group,
    ) -> None:
        self._arbiter = arbiter
        self._clock = clock
        self._ended = ended
        self._resident = resident
        self._kill = kill
        self._engines: tuple[GuardedEngine, ...] = ()
        self._wake, self._work = threading.Event(), asyncio.Event()

    def add(self, engine: GuardedEngine) -> None:
        """Guard an engine."""
        engine.lease.backend.on_work = self._has_work
        self.tell(engine)
        self._engines = (*self._engines, engine)
        self._has_work()

    def _has_work(self) -> None:
        self._wake.set()
        self._work.set()

    def remove(self, engine: GuardedEngine) -> None:
        """Guard an engine no more, if it is guarded."""
        self._engines = tuple(one for one in self._engines if one is not engine)

    @contextmanager
    def loading(self, engine: GuardedEngine) -> Iterator[None]:
        """Guard an engine while it loads."""
        self.add(engine)
        try:
            yield
        finally:
            self.remove(engine)

    async def run(self) -> None:
        """Guard until cancelled. Raises the error that ended the thread."""
        loop, is_over = asyncio.get_running_loop(), threading.Event()
        pool = ThreadPoolExecutor(1, "engine guard")
        looks = loop.run_in_executor(pool, self._look_on, loop, is_over)
        try:
            async with asyncio.TaskGroup() as asks:
                while not looks.done():
                    self.tell(*self._engines)
                    for engine in self._engines:
                        if not engine.is_asked and self._excess(engine):
                            asks.create_task(self.check_silence(engine))
                    if any(one.is_at_work for one in self._engines):
                        await self._clock.sleep(TELL_S)
                    else:
                        self._work.clear()
                        pause_s = shared_pause_s(IDLE_S, self._clock.mono())
                        await self._clock.sleep(pause_s, self._work)
            await looks
        finally:
            is_over.set()
            self._wake.set()
            pool.shutdown(wait=False)

    def tell(self, *engines: GuardedEngine) -> None:
        """Tell the thread what engines may occupy by the ledger of this moment."""
        if not engines:
            return
        ledger = self._arbiter.status()
        for engine in engines:
            resident = self._arbiter.find(*engine.key)
            counted = 0 if resident is None or resident.is_leaving else resident.bytes
            others = ledger.committed_bytes - counted - engine.parted_bytes
            lease, budget = engine.lease.bytes, ledger.budget_bytes
            engine.allowance = EngineAllowance(lease, max(lease, budget - others), budget)

    def look(self, tell: Callable[[Callable[[], None]], object]) -> float:
        """Measure each engine and kill those that are beyond the budget and grew much in the last
        `GROWTH_S`; return the seconds until the next look. It asks no engine, and waits for none.

        `tell` runs a call on the event loop, later.
        """
        return min((self._look_at(one, tell) for one in self._engines), default=IDLE_S)

    def _look_at(
        self, engine: GuardedEngine, tell: Callable[[Callable[[], None]], object]
    ) -> float:
        pid, allowance = engine.lease.backend.pid, engine.allowance
        if pid != engine.guarded:
            engine.guarded, engine.growth = pid, Growth()
        if pid is None or pid == engine.killed:
            engine.guarded_bytes = 0
            return LOOK_S if engine.is_at_work else IDLE_S
        occupied = self._resident(pid) or 0
        engine.guarded_bytes = occupied
        grown = engine.growth.see(occupied, self._clock.mono())
        if grown >= GROWTH_SHARE * allowance.lease_bytes and (why := allowance.excess(occupied)):
            engine.killed, engine.guarded_bytes = pid, 0
            # The loop is told first: it then knows the reason before it learns of the exit.
            tell(partial(self._tell_end, engine, pid, occupied, why))
            self._kill(pid)
        return engine.growth.pause_s(allowance.most_bytes, is_at_work=engine.is_at_work)

    def _look_on(self, loop: asyncio.AbstractEventLoop, is_over: threading.Event) -> None:
        def tell(call: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: there is no part left to tell
                loop.call_soon_threadsafe(call)

        while not is_over.is_set():
            pause_s = self.look(tell)
            if self._wake.wait(pause_s):
                self._wake.clear()

    def _tell_end(self, engine: GuardedEngine, pid: int, occupied: int, why: str) -> None:
        if engine.lease.backend.pid == pid:
            self._ended(engine, occupied, why)

    async def check_silence(self, engine: GuardedEngine) -> None:
        """Kill an engine that is beyond the budget and does not answer for `SILENT_S`."""
        backend, engine.is_asked = engine.lease.backend, True
        pid = backend.pid
        try:
            is_alive = await backend.answers(SILENT_S)
        finally:
            engine.is_asked = False
        if not is_alive and pid is not None and pid != engine.killed:
            engine.guarded_bytes = self._resident(pid) or 0  # it may have shrunk meanwhile
        self.tell(engine)
        why = self._excess(engine)
        if not is_alive and why and pid is not None and engine in self._engines:
            engine.killed = pid
            why = f"{why}, and answered nothing for {SILENT_S:g} s"
            self._tell_end(engine, pid, engine.guarded_bytes, why)

    def _excess(self, engine: GuardedEngine) -> str:
        return engine.allowance.excess(engine.guarded_bytes)
