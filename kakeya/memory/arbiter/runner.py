"""Runs requests on loaded models: in turn, timed, and cancelled together when the node stops.

A model has two lanes of `concurrency` places. A request first takes a turn to ask for its lease,
then, with the lease, a turn to run; a handle has a lease and only takes turns to run. So the holder
of a model waits for other holders, never for a request without a lease; and requests in line for a
turn keep no other model out of memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.memory.arbiter.capability import Capability
from kakeya.memory.arbiter.events import CapabilityRun, EventListeners
from kakeya.memory.arbiter.keeper import FORCE_S, cancelled
from kakeya.memory.arbiter.resident import ResidentKey

_RUNS_KEPT_S = 60.0


class Timings:
    """Durations of the last `keep_s` seconds. Older ones are forgotten, so that one slow minute
    does not make estimates long for ever."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._taken: deque[tuple[float, float]] = deque(maxlen=64)

    def add(self, seconds: float, now: float) -> None:
        """Note a duration."""
        self._taken.append((now, seconds))

    def longest_s(self, now: float) -> float | None:
        """The longest of the last 64 that are not forgotten, which is their p99; None = none."""
        return max((s for at, s in self._taken if now - at <= self._keep_s), default=None)


class Lane:
    """The runs on one model: `concurrency` at a time, first come first served, a bounded queue."""

    def __init__(self, name: str, concurrency: int, max_waiting: int) -> None:
        self._name = name
        self._free = asyncio.Semaphore(concurrency)
        self._limit = concurrency + max_waiting
        self._inside = 0

    @asynccontextmanager
    async def turn(self, run_s: float | None) -> AsyncIterator[None]:
        """Wait for a turn. Raises QueueFull; `run_s` is how long a run takes, where known."""
        if self._inside >= self._limit:
            raise errors.QueueFull(
                f"{self._inside} requests wait for {self._name} already; ask again later",
                retry_after_s=run_s,
            )
        self._inside += 1
        try:
            async with self._free:
                yield
        finally:
            self._inside -= 1

    @property
    def is_empty(self) -> bool:
        """Whether no request runs or waits."""
        return self._inside == 0


class Runner:
    """All lanes and runs of one arbiter."""

    def __init__(self, *, clock: Clock, listeners: EventListeners) -> None:
        self._clock = clock
        self._listeners = listeners
        self._asking: dict[ResidentKey, Lane] = {}
        self._running: dict[ResidentKey, Lane] = {}
        self._times: dict[str, Timings] = {}
        self._runs: set[asyncio.Task[object]] = set()
        self._is_over = False

    def usual_s(self, key: ResidentKey) -> float | None:
        """The longest run of late; None = not known."""
        times = self._times.get(key.capability)
        return None if times is None else times.longest_s(self._clock.mono())

    def turn_to_ask(
        self, key: ResidentKey, capability: Capability
    ) -> AbstractAsyncContextManager[None]:
        """Wait until a request may ask for its lease. Raises QueueFull."""
        return self._turn(self._asking, key, capability)

    async def run(
        self, key: ResidentKey, capability: Capability, backend: object, payload: object
    ) -> object:
        """Run a request on a model that its caller holds, in turn. Raises QueueFull and all that
        the run raises; cancelling it cancels the run."""
        async with self._turn(self._running, key, capability):
            return await self._run(key, capability, backend, payload)

    async def cancel_all(self) -> None:
        """Cancel all runs; their callers are refused."""
        self._is_over = True
        await cancelled(self._clock, FORCE_S, tuple(self._runs))

    @asynccontextmanager
    async def _turn(
        self, lanes: dict[ResidentKey, Lane], key: ResidentKey, capability: Capability
    ) -> AsyncIterator[None]:
        lane = lanes.get(key)
        if lane is None:
            lane = Lane(str(key), capability.concurrency, capability.max_waiting)
            lanes[key] = lane
        try:
            async with lane.turn(self.usual_s(key)):
                yield
        finally:
            if lane.is_empty and lanes.get(key) is lane:
                del lanes[key]

    async def _run(
        self, key: ResidentKey, capability: Capability, backend: object, payload: object
    ) -> object:
        began_mono = self._clock.mono()
        task = asyncio.ensure_future(capability.handler.run(backend, payload))
        self._runs.add(task)
        is_failed = True
        try:
            result = await task
            is_failed = False
        except asyncio.CancelledError as end:
            caller = asyncio.current_task()
            if self._is_over and caller is not None and not caller.cancelling():
                raise errors.Refused(f"the arbiter was shut down while {key} ran") from end
            raise
        finally:
            self._runs.discard(task)
            now = self._clock.mono()
            if not is_failed:
                times = self._times.setdefault(key.capability, Timings(_RUNS_KEPT_S))
                times.add(now - began_mono, now)
            self._listeners.tell(
                CapabilityRun(key=key, run_s=now - began_mono, is_failed=is_failed)
            )
        return result
