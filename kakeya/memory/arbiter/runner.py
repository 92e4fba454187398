"""Runs requests on loaded models: in turn, timed, and cancelled together when the node stops.

A model has two lanes of `concurrency` places. A request first takes a turn to ask for its lease,
then, with the lease, a turn to run; a handle has a lease and only takes turns to run. So the holder
of a model waits for other holders, never for a request without a lease; and requests in line for a
turn keep no other model out of memory. In a lane the most urgent request is next, age included.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.generation.waiting import RequestWait, WaitReason, WaitTeller
from kakeya.memory.arbiter.capability import Capability
from kakeya.memory.arbiter.events import CapabilityRun, EventListeners
from kakeya.memory.arbiter.keeper import FORCE_S, cancelled
from kakeya.memory.arbiter.plan import Terms
from kakeya.memory.arbiter.policy import Rules, ticket_rank
from kakeya.memory.arbiter.resident import RequestPriority, ResidentKey

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
        return max(self._kept(now), default=None)

    def mean_s(self, now: float) -> float | None:
        """The mean of these; None = none."""
        kept = [*self._kept(now)]
        return sum(kept) / len(kept) if kept else None

    def _kept(self, now: float) -> Iterator[float]:
        return (seconds for at, seconds in self._taken if now - at <= self._keep_s)


@dataclass(slots=True, eq=False)
class _LaneTicket:
    """A request in line; `turn` is set once it has a place."""

    priority: RequestPriority
    since_mono: float
    turn: asyncio.Future[None]


class Lane:
    """The runs on one model: `concurrency` at a time, the most urgent first, a bounded queue.

    A waiting request gains a class of urgency each `Rules.age_s`, or in the time of a run where
    that is longer: else long runs would soon make all requests equal.
    """

    def __init__(
        self,
        key: ResidentKey,
        capability: Capability,
        rules: Rules,
        *,
        mono: Callable[[], float],
        usual_s: Callable[[], float | None],
    ) -> None:
        """`usual_s` tells how long a run takes, where known."""
        self._key = key
        self._places = self._free = capability.concurrency
        self._most_waiting = capability.max_waiting
        self._rules = rules
        self._mono = mono
        self._usual_s = usual_s
        self._line: list[_LaneTicket] = []

    @asynccontextmanager
    async def turn(self, priority: RequestPriority, wait: WaitTeller | None) -> AsyncIterator[None]:
        """Wait for a turn; `wait` tells of it meanwhile. Raises QueueFull."""
        await self._enter(priority, wait)
        if wait is not None:
            wait.ask = lambda: None
        try:
            yield
        finally:
            self._give_on()

    @property
    def is_empty(self) -> bool:
        """Whether no request runs or waits."""
        return self._free == self._places

    async def _enter(self, priority: RequestPriority, wait: WaitTeller | None) -> None:
        if self._free:  # so no request waits
            self._free -= 1
            return
        if len(self._line) >= self._most_waiting:
            raise errors.QueueFull(
                f"{self._places + len(self._line)} requests wait for {self._key} already; ask "
                "again later",
                retry_after_s=self._usual_s(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = _LaneTicket(priority, self._mono(), turn)
        self._line.append(ticket)
        if wait is not None:
            wait.ask = lambda: self._wait_of(ticket)
        try:
            await turn
        except asyncio.CancelledError:
            if ticket in self._line:
                self._line.remove(ticket)
            else:  # it got its place at the moment of the cancellation
                self._give_on()
            raise

    def _give_on(self) -> None:
        """Give a place to the next request, if one waits."""
        if not self._line:
            self._free += 1
            return
        ticket = self._in_order()[0]
        self._line.remove(ticket)
        ticket.turn.set_result(None)

    def _in_order(self) -> list[_LaneTicket]:
        """The line in the order of service; equals in that of their arrival."""
        now = self._mono()
        rules = replace(self._rules, age_s=max(self._rules.age_s, self._usual_s() or 0.0))
        return sorted(
            self._line,
            key=lambda one: (
                ticket_rank(one.priority, now - one.since_mono, rules),
                one.since_mono,
            ),
        )

    def _wait_of(self, ticket: _LaneTicket) -> RequestWait | None:
        if ticket not in self._line:
            return None
        place, run_s = self._in_order().index(ticket) + 1, self._usual_s()
        return RequestWait(
            reason=WaitReason.PLACE,
            model_id=self._key.model_key,
            position=place,
            seconds=run_s and run_s * place / self._places,
        )


class Runner:
    """All lanes and runs of one arbiter."""

    def __init__(self, *, clock: Clock, listeners: EventListeners, rules: Rules) -> None:
        self._clock = clock
        self._rules = rules
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
        self, key: ResidentKey, capability: Capability, terms: Terms
    ) -> AbstractAsyncContextManager[None]:
        """Wait until a request may ask for its lease. Raises QueueFull."""
        return self._turn(self._asking, key, capability, terms)

    async def run(
        self,
        key: ResidentKey,
        capability: Capability,
        backend: object,
        payload: object,
        terms: Terms,
    ) -> object:
        """Run a request on a model that its caller holds, in turn. Raises QueueFull and all that
        the run raises; cancelling it cancels the run."""
        async with self._turn(self._running, key, capability, terms):
            return await self._run(key, capability, backend, payload)

    async def cancel_all(self) -> None:
        """Cancel all runs; their callers are refused."""
        self._is_over = True
        await cancelled(self._clock, FORCE_S, tuple(self._runs))

    @asynccontextmanager
    async def _turn(
        self,
        lanes: dict[ResidentKey, Lane],
        key: ResidentKey,
        capability: Capability,
        terms: Terms,
    ) -> AsyncIterator[None]:
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = Lane(
                key,
                capability,
                self._rules,
                mono=self._clock.mono,
                usual_s=lambda: self.usual_s(key),
            )
        try:
            async with lane.turn(terms.priority, terms.wait):
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
