"""Computes prefixes before a request waits for them, and refreshes them.

One prefix at a time, in the order of `Kind`, and of one kind the oldest first. Requests go first:
the work runs only while memory is not short and into free room, and ends at once when that changes.
A fault is reported once and not tried again: the next request finds a cold prefix, and reports the
fault itself. Another prompt under the same key is another try. A `WarmSource` is injected: it
computes, and knows the kept prefixes and the free room.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kakeya.core.clock import Clock
from kakeya.core.errors import InvariantBroken, KakeyaError
from kakeya.core.log import event
from kakeya.memory.arbiter.policy import PressureLevel
from kakeya.prefix.seam import Tokens, Warmed, WarmOutcome, WarmReport
from kakeya.prefix.warm.deadlines import Deadlines
from kakeya.prefix.warm.warming import Kind, Prefix, PrewarmStats, WarmSource

_log = logging.getLogger(__name__)
PREWARM_S = 120.0
"""The longest that one prefix may take. Beside requests it only gets what they leave."""
MAX_QUEUED = 1024
MAX_KEPT_TOKENS = 1 << 22
"""Tokens of all prefixes that are kept warm: 16 MB of ids. Beyond it the least recently used one
goes, of those that are not pinned."""
MAX_FAULTS = 1024
RETRY_S = 30.0
"""Until a kept prefix that found no room, or pressure, is looked after again."""
_IDLE_S = 3600.0


@dataclass(slots=True, eq=False)
class _Job:
    prefix: Prefix
    kind: Kind
    waiters: list[asyncio.Future[WarmReport]] = field(default_factory=list)
    tokens: array[int] | None = None
    """The tokens of an earlier rendering; None = it has to be rendered."""
    end_mono: float = math.inf
    """When it is to be looked after no more."""

    @property
    def is_unasked(self) -> bool:
        """Whether no caller waits for its report."""
        return all(waiter.done() for waiter in self.waiters)

    def let_go(self) -> None:
        """Have it be neither kept nor pinned once it is done."""
        self.prefix = replace(self.prefix, is_kept=False, is_pinned=False)


@dataclass(frozen=True, slots=True)
class _Kept:
    prefix: Prefix
    tokens: array[int] | None
    end_mono: float


class Prewarmer:
    """See the module. `run` is its one background task."""

    def __init__(self, source: WarmSource, *, clock: Clock, keep_alive_s: float) -> None:
        self._source = source
        self._clock = clock
        self._deadlines = Deadlines(keep_alive_s)
        self._queue: dict[Kind, deque[_Job]] = {kind: deque() for kind in Kind}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._faults: OrderedDict[str, None] = OrderedDict()
        self._level = PressureLevel.NOMINAL
        self._wake = asyncio.Event()
        self._running: tuple[_Job, asyncio.Task[WarmReport]] | None = None
        self._stopped = _INTERRUPTED
        self._outcomes: Counter[WarmOutcome] = Counter()
        self._cached = self._computed = self._refreshed = self._kept_tokens = 0

    @property
    def stats(self) -> PrewarmStats:
        """Counts at this moment."""
        return PrewarmStats(
            outcomes={outcome: self._outcomes[outcome] for outcome in WarmOutcome},
            cached_tokens=self._cached,
            computed_tokens=self._computed,
            refreshed=self._refreshed,
            queued=self._queued(),
            kept=len(self._kept),
            kept_tokens=self._kept_tokens,
            running=self._running[0].prefix.key if self._running else "",
        )

    # Calls of the node.

    def submit(self, prefix: Prefix, kind: Kind) -> None:
        """Warm a prefix in its turn. A job that still waits under its key is dropped, unless a
        caller waits for its report."""
        self._enqueue(_Job(prefix, kind, end_mono=self._end_of(prefix)))

    async def ask(self, prefix: Prefix) -> WarmReport:
        """Warm a prefix; the report of that. Cancelling it leaves the work in its turn."""
        waiter: asyncio.Future[WarmReport] = asyncio.get_running_loop().create_future()
        self._enqueue(_Job(prefix, Kind.ASKED, [waiter], end_mono=self._end_of(prefix)))
        return await waiter

    def renew(self, key: str) -> asyncio.Future[WarmReport] | None:
        """Warm the prefix again that is kept for a key, at once; None = none is."""
        waiter: asyncio.Future[WarmReport] = asyncio.get_running_loop().create_future()
        if waiting := self._waiting(key):
            waiting[-1].waiters.append(waiter)  # a later text than what is kept
        elif (kept := self._kept.get(key)) is not None:
            self._enqueue(
                _Job(kept.prefix, Kind.ASKED, [waiter], tokens=kept.tokens, end_mono=kept.end_mono)
            )
        else:
            return None
        return waiter

    def used(self, key: str) -> None:
        """A request used the prefix of a key."""
        self._deadlines.used(key, self._clock.mono())
        if key in self._kept:
            self._kept.move_to_end(key)

    def forget(self, key: str) -> None:
        """Look after a key no more, nor after a job that waits or runs under it now."""
        for job in self._waiting(key):
            if job.is_unasked:
                self._queue[job.kind].remove(job)
            job.let_go()
        if self._running is not None and self._running[0].prefix.key == key:
            self._running[0].let_go()
        self._let_go(key)

    def pressed(self, level: PressureLevel) -> None:
        """Note the pressure of memory; the running job ends at once where memory is short."""
        self._level = level
        if level is not PressureLevel.NOMINAL:
            self._stop(_INTERRUPTED)

    def wipe(self, spared: Callable[[str], bool]) -> None:
        """Forget all keys but those that are spared, which are looked after as they were."""
        jobs = [job for jobs in self._queue.values() for job in jobs]
        jobs += [self._running[0]] if self._running is not None else []
        for job in jobs:
            if not spared(job.prefix.key):
                job.let_go()
        self._stop(_WIPED)
        while (waiting := self._next()) is not None:
            self._account(waiting, _WIPED)
        for key in [key for key in self._kept if not spared(key)]:
            self.forget(key)

    # The task.

    async def run(self) -> None:
        """Warm one prefix after the other, for ever."""
        try:
            while True:
                self._wake.clear()
                self._renew_due()
                job = self._next()
                if job is None:
                    await self._clock.sleep(self._idle_s(), self._wake)
                else:
                    await self._do(job)
        except asyncio.CancelledError:
            while (job := self._next()) is not None:
                self._account(job, _STOPPING)
            raise

    def _stop(self, why: WarmReport) -> None:
        if self._running is not None:
            self._stopped = why
            self._running[1].cancel()

    async def _do(self, job: _Job) -> None:
        task = asyncio.ensure_future(self._guarded(job))
        self._running = (job, task)
        report = _STOPPING
        try:
            await asyncio.wait((task,))
            report = self._stopped if task.cancelled() else _FAULT
            if not task.cancelled():
                report = task.result()
        finally:
            self._running = None
            task.cancel()
            self._account(job, report)

    async def _guarded(self, job: _Job) -> WarmReport:
        try:
            async with asyncio.timeout(PREWARM_S):
                return await self._warm(job)
        except TimeoutError:
            reason = f"requests left it too little time within {PREWARM_S:g} s"
            return WarmReport(outcome=WarmOutcome.LATE, reason=reason)
        except KakeyaError as fault:
            return WarmReport(outcome=WarmOutcome.FAILED, reason=fault.message)

    async def _warm(self, job: _Job) -> WarmReport:
        prefix, source = job.prefix, self._source
        if self._level is not PressureLevel.NOMINAL:
            reason = f"memory pressure is {self._level.name.lower()}"
            return WarmReport(outcome=WarmOutcome.PRESSURE, reason=reason)
        if job.tokens is None:
            if (refusal := await source.refuse(prefix)) is not None:
                return refusal
            job.tokens = array("I", await prefix.tokens())
        tokens = job.tokens
        due = max(0, len(tokens) - 1)  # the last one is computed by its request, for the logits
        there = min(await source.keep(prefix, tokens), due)
        warmed = Warmed(tokens=len(tokens), cached=there)
        if (refusal := await self._refuse(prefix, tokens, due - there)) is not None:
            return replace(refusal, warmed=warmed)
        if there < due:
            done = await source.warm(prefix, tokens)
            if isinstance(done, WarmReport):
                return done
            warmed = done
            if await source.keep(prefix, tokens) <= there:
                reason = "it was computed, and nothing of it could be kept"
                return WarmReport(outcome=WarmOutcome.NO_ROOM, warmed=warmed, reason=reason)
        if job.prefix.is_pinned:  # a job that fails before has no pin to end
            source.pin(prefix, tokens)
        return WarmReport(outcome=WarmOutcome.WARM, warmed=warmed)

    async def _refuse(self, prefix: Prefix, tokens: Tokens, missing: int) -> WarmReport | None:
        """Why it cannot be computed or pinned; None = it can."""
        source = self._source
        if missing > 0:
            if (refusal := await source.refuse(prefix)) is not None:
                return refusal
            if not await source.has_room(prefix, missing):
                reason = f"there is no free room for the KV of {missing} tokens"
                return WarmReport(outcome=WarmOutcome.NO_ROOM, reason=reason)
        return await source.refuse_pin(prefix, tokens, missing) if prefix.is_pinned else None

    def _account(self, job: _Job, report: WarmReport) -> None:
        key, now = job.prefix.key, self._clock.mono()
        self._outcomes[report.outcome] += 1
        self._computed += report.warmed.computed
        match report.outcome:
            case WarmOutcome.WARM:
                self._faults.pop(key, None)
                self._cached += report.warmed.cached
                self._refreshed += job.kind is Kind.KEPT and report.warmed.computed == 0
                self._keep(job, now)
                report = replace(report, is_pinned=job.prefix.is_pinned)
            case WarmOutcome.FAILED:
                self._tell_once(job.prefix, report.reason)
                self._let_go(key)
            case _:
                # A prefix that was computed in vain is not computed sooner than one that was kept.
                is_vain = report.warmed.computed > 0
                if job.kind is Kind.KEPT and (is_vain or key not in self._kept):
                    self._keep(job, now)
                if not is_vain:
                    self._deadlines.postpone(key, now + RETRY_S)
        for waiter in job.waiters:
            if not waiter.done():
                waiter.set_result(report)

    def _tell_once(self, prefix: Prefix, reason: str) -> None:
        if prefix.key in self._faults:
            return
        self._faults[prefix.key] = None
        if len(self._faults) > MAX_FAULTS:
            self._faults.popitem(last=False)
        event(
            _log,
            "a prefix could not be warmed; requests compute it",
            level=logging.WARNING,
            key=prefix.key,
            model=prefix.model_id,
            reason=reason,
        )

    # Kept prefixes.

    def _keep(self, job: _Job, now: float) -> None:
        prefix = job.prefix
        before = self._kept.pop(prefix.key, None)
        if before is not None:
            self._kept_tokens -= len(before.tokens or ())
        if not prefix.is_pinned:
            self._source.unpin(prefix.key)
        if not prefix.is_kept:
            self._deadlines.forget(prefix.key)
            return
        if job.tokens is not None:  # whatever it was rendered from need not be held
            prefix = replace(prefix, tokens=_never)
        self._kept[prefix.key] = _Kept(prefix, job.tokens, job.end_mono)
        self._kept_tokens += len(job.tokens or ())
        self._deadlines.touched(prefix.key, prefix.retention, now, job.end_mono)
        if self._kept_tokens > MAX_KEPT_TOKENS:
            self._let_go_of_excess()

    def _let_go_of_excess(self) -> None:
        """Drop prefixes above the bound, the least recently used first; pinned ones stay, and the
        one that was kept just now."""
        *others, _ = self._kept.items()
        for key, kept in others:
            if self._kept_tokens > MAX_KEPT_TOKENS and not kept.prefix.is_pinned:
                self._let_go(key)

    def _let_go(self, key: str) -> None:
        self._source.unpin(key)
        self._deadlines.forget(key)
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._kept_tokens -= len(kept.tokens or ())

    def _renew_due(self) -> None:
        now = self._clock.mono()
        due = self._deadlines.due(now)
        waiting = {job.prefix.key for jobs in self._queue.values() for job in jobs} if due else ()
        for key in due:
            if key in waiting:
                continue
            kept = self._kept[key]
            if kept.end_mono <= now:
                self._let_go(key)
            else:
                job = _Job(kept.prefix, Kind.KEPT, tokens=kept.tokens, end_mono=kept.end_mono)
                self._put(job)

    def _end_of(self, prefix: Prefix) -> float:
        """The end of a pin: that of its retention, since nothing else would ever give its place
        back."""
        return self._clock.mono() + prefix.retention.seconds if prefix.is_pinned else math.inf

    def _idle_s(self) -> float:
        due_mono = self._deadlines.next_due()
        return _IDLE_S if due_mono is None else max(0.0, due_mono - self._clock.mono())

    # Waiting jobs.

    def _enqueue(self, job: _Job) -> None:
        for older in self._waiting(job.prefix.key):
            if older.is_unasked:
                self._queue[older.kind].remove(older)
                job.kind = min(job.kind, older.kind)
        if self._queued() < MAX_QUEUED:
            self._put(job)
        else:
            reason = f"{MAX_QUEUED} prefixes wait already"
            self._account(job, WarmReport(outcome=WarmOutcome.CROWDED, reason=reason))

    def _waiting(self, key: str) -> list[_Job]:
        return [job for jobs in self._queue.values() for job in jobs if job.prefix.key == key]

    def _put(self, job: _Job) -> None:
        self._queue[job.kind].append(job)
        self._wake.set()

    def _next(self) -> _Job | None:
        for jobs in self._queue.values():
            if jobs:
                return jobs.popleft()
        return None

    def _queued(self) -> int:
        return sum(len(jobs) for jobs in self._queue.values())


async def _never() -> Tokens:
    raise InvariantBroken("prewarm", "a prefix whose tokens are known was rendered again")


_STOPPING = WarmReport(outcome=WarmOutcome.AWAY, reason="this node is stopping")
_INTERRUPTED = WarmReport(outcome=WarmOutcome.PRESSURE, reason="memory became short meanwhile")
_WIPED = WarmReport(outcome=WarmOutcome.AWAY, reason="what this node keeps was wiped meanwhile")
_FAULT = WarmReport(
    outcome=WarmOutcome.FAILED, reason="an internal fault; the node's log tells more"
)
