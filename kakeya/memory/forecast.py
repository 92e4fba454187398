"""When the models that requests wait for will be in memory: the arbiter's next minutes, rehearsed.

A copy of the arbiter decides by its own rules in virtual time. What holds a model ends when that is
expected, unloads and loads take their usual times, and requests that get a model use it for as long
as is expected of them. Requests go on to come: to a model that is open as they came lately, and to
one that has to be loaded as others end, since most clients wait for their answers. A model whose
uses end at no known time stays in use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from kakeya.core import errors
from kakeya.core.clock import Clock
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.plan import ArbiterOutcome, Plan
from kakeya.memory.arbiter.resident import LeaseId, RequestPriority, ResidentKey, State

LAST_S = 1.0
"""A rehearsal is believed for so long, and for `_SPARE` times as long as it took."""
_SPARE = 100
HORIZON_S = 3600.0
_MOST_STEPS = 500
_LEAST_GAP_S = 2.0
"""Requests that come closer to each other are one, which stands for several."""
_Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualTimes:
    """Seconds by model: of a whole load, of the rest of one under way, of an unload, and of the use
    of those that hold a model, (0, 0), or of so many that wait for it and so many that come.
    None = not known. Of requests, `asks_per_s` come."""

    load_s: Callable[[ResidentKey], float]
    load_left_s: Callable[[ResidentKey], float]
    unload_s: Callable[[ResidentKey], float]
    use_s: Callable[[ResidentKey, int, int], float | None]
    asks_per_s: Callable[[ResidentKey], float]


class Rehearsal:
    """One such course of things, from `now` on."""

    def __init__(self, arbiter: Arbiter, times: UsualTimes, now: float) -> None:
        ledger = arbiter.snapshot()
        self._waiting = Counter(ledger.waiting)
        self._held = {one.key: len(one.leases) for one in ledger.residents}
        rates = ((key, times.asks_per_s(key)) for key in {**self._waiting, **self._held})
        self._per_s = {key: per_s for key, per_s in rates if per_s > 0}
        self._arbiter = arbiter.outline()
        self._times = times
        self._now = self._start = now
        self._todo: list[tuple[float, int, _Step]] = []
        self._numbers = count()
        self._ended = 0
        self.in_s: dict[ResidentKey, float] = {}
        """Model -> seconds until its first request has it, of those that wait."""

    def run(self) -> dict[ResidentKey, float]:
        """Let it happen, until all that wait are served or nothing more is known."""
        wanted = {*self._waiting}
        self._begin()
        for _ in range(_MOST_STEPS):
            if wanted <= self.in_s.keys() or not self._go_on():
                break
        return self.in_s

    def _go_on(self) -> bool:
        due = self._arbiter.next_wake_mono(self._now)
        at = min(self._todo[0][0] if self._todo else math.inf, math.inf if due is None else due)
        if at > self._start + HORIZON_S:
            return False
        self._now = max(self._now, at)
        while self._todo and self._todo[0][0] <= self._now:
            heappop(self._todo)[2]()
        self._take(self._arbiter.settle(self._now))
        return True

    def _begin(self) -> None:
        """Take up what is under way."""
        for one in self._arbiter.snapshot().residents:
            if one.is_leaving:
                self._later(self._times.unload_s(one.key), self._unloaded(one.key))
            elif one.state is State.LOADING:
                self._later(self._times.load_left_s(one.key), self._loaded(one.key))
            elif one.leases:
                use_s = self._times.use_s(one.key, 0, 0)
                self._use([*one.leases], self._held[one.key], use_s)
        for key, per_s in self._per_s.items():
            gap_s = max(1 / per_s, _LEAST_GAP_S)
            # Not at once: of few requests, the next may well come when the room is claimed.
            self._later(2 * gap_s, partial(self._come, key, gap_s))

    def _use(self, leases: Sequence[LeaseId], requests: int, seconds: float | None) -> None:
        """Let so many requests end together, which share leases."""
        if seconds is not None:
            self._later(seconds, partial(self._end, leases, requests))

    def _end(self, leases: Sequence[LeaseId], requests: int) -> None:
        self._ended += requests
        for lease in leases:
            self._take(self._arbiter.release(lease, self._now))

    def _come(self, key: ResidentKey, again_in_s: float) -> None:
        """Lend a model, if it is open, to the requests of so many seconds."""
        self._later(again_in_s, partial(self._come, key, again_in_s))
        lease = self._arbiter.lend(key, RequestPriority.NORMAL, self._now)
        if lease is not None:
            requests = max(1, round(self._per_s[key] * again_in_s))
            self._use([lease], requests, self._times.use_s(key, 0, requests))

    def _take(self, outcome: ArbiterOutcome) -> None:
        granted: dict[ResidentKey, list[LeaseId]] = {}
        for grant in outcome.grants:
            self.in_s.setdefault(grant.key, self._now - self._start)
            granted.setdefault(grant.key, []).append(grant.lease)
        for key, leases in granted.items():
            # Those that came meanwhile are served with them: each that ended is followed by one.
            share = self._per_s.get(key, 0.0) / (sum(self._per_s.values()) or 1.0)
            waiting, more = self._waiting.pop(key, 1), round(share * self._ended)
            self._use(leases, waiting + more, self._times.use_s(key, waiting, more))
        for plan in outcome.plans:
            self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        tenants = {one.name: one for one in self._arbiter.snapshot().tenants}
        for shrink in plan.shrink:
            self._take(self._arbiter.shrunk(shrink, tenants[shrink.name], self._now))
        room_s = 0.0
        for eviction in plan.evict:
            room_s += self._times.unload_s(eviction.key)
            self._later(room_s, self._unloaded(eviction.key))
        if plan.load is not None:
            self._later(room_s, partial(self._load, plan))

    def _load(self, plan: Plan) -> None:
        goes_on, outcome = self._arbiter.begin_load(plan, self._now)
        if goes_on and plan.load is not None:
            self._later(self._times.load_s(plan.load), self._loaded(plan.load))
        self._take(outcome)

    def _loaded(self, key: ResidentKey) -> _Step:
        def step() -> None:
            one = self._arbiter.find(key)
            if one is not None and one.state is State.LOADING:  # else its room was taken back
                self._take(self._arbiter.loaded(key, None, self._now))

        return step

    def _unloaded(self, key: ResidentKey) -> _Step:
        return lambda: self._take(self._arbiter.unloaded(key, self._now))

    def _later(self, seconds: float, step: _Step) -> None:
        heappush(self._todo, (self._now + seconds, next(self._numbers), step))


class Forecast:
    """The last rehearsal of one arbiter, made anew when it is asked for and has become old."""

    def __init__(self, arbiter: Arbiter, times: UsualTimes, clock: Clock) -> None:
        self._arbiter = arbiter
        self._times = times
        self._clock = clock
        self._made_mono = self._until_mono = -math.inf
        self._in_s: dict[ResidentKey, float | None] = {}

    def seconds(self, key: ResidentKey) -> float | None:
        """Seconds until a model that requests wait for is in memory; None = not known."""
        now = self._clock.mono()
        if now >= self._until_mono or key not in self._in_s:
            self._rehearse(now)
        in_s = self._in_s.get(key)
        return None if in_s is None else max(0.0, self._made_mono + in_s - now)

    def _rehearse(self, now: float) -> None:
        try:
            found = Rehearsal(self._arbiter, self._times, now).run()
        except errors.KakeyaError:  # what is under way was foreseen to end in another order
            found = {}
        self._in_s = dict.fromkeys(self._arbiter.snapshot().waiting) | found
        took_s = self._clock.mono() - now
        self._made_mono, self._until_mono = now, now + max(LAST_S, _SPARE * took_s)
