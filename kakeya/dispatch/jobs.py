"""Jobs: slow work that a caller submits, looks at later, and may cancel.

    async def draw(job: Job, tell: Tell, wait: WaitTeller) -> object:   # one kind of work
        wish = json.loads(job.request)                     # what was submitted
        wait.ask = model.waits_for                         # told while nothing else is
        for step in range(20):
            ...                                            # ends soon when it is cancelled
            tell((step + 1) / 20, f"step {step + 1} of 20")
        return {"data": [{"b64_json": image}]}             # JSON; bytes become {"b64": "..."}

    jobs.add_kind(JobKind(name="image", run=draw, concurrency=1))
    job = jobs.submit("image", {"prompt": "a fox"}, owner=share_of(client, scope))
    await jobs.kept()                                      # from here on, a kill does not lose it
    job = await jobs.ended(job.job_id, share, wait_s=30)   # or find(), which does not wait
    job.state, job.share, job.phrase, job.result, job.error
    jobs.cancel(job.job_id, share)

A job is seen by its owner alone; owner None = all are seen. After a crash its work is done again
from its request, unless it was submitted with may_repeat=False. No refusal fails a job at once:
for lack of places it waits, for lack of memory it waits for `PATIENCE_S` at most. Of the jobs that
may begin, that of the owner with the fewest running ones does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from kakeya.core.clock import Clock
from kakeya.core.errors import InvariantBroken, KakeyaError, NotFound
from kakeya.core.figures import Figure, Json, as_json, counter, from_zero, gauge
from kakeya.core.ids import draw_id
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, is_cancelled
from kakeya.dispatch.job import (
    KEEP_S,
    Job,
    JobError,
    JobState,
    check_room,
    fault_text,
    interrupted,
    json_bytes,
    line_of,
    may_try_again,
    outdated,
)
from kakeya.dispatch.job_store import FILE, JobStore, JobWriter
from kakeya.generation.waiting import WaitTeller
from kakeya.memory.arbiter.keeper import FORCE_S, cancelled

_log = logging.getLogger(__name__)
RETRY_S = 2.0
"""Before the next try of a refused job, where the refusal names no time."""
_LOOK_S = 60.0

Tell = Callable[[float, str], None]
"""Tells how far a job is: a share from 0 to 1, and a phrase. May be called in any thread."""


class JobNotFound(NotFound):
    """No job of this caller has the id."""

    code = "job_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """One kind of work. `run` raises a KakeyaError as the error of its job; until it tells how far
    it is, its `WaitTeller` says for what it waits. `concurrency` jobs of the kind run at a time.
    `ended` is told of each end."""

    name: str
    run: Callable[[Job, Tell, WaitTeller], Awaitable[object]]
    concurrency: int = 4
    ended: Callable[[Job], None] = lambda _: None


@dataclass(slots=True, eq=False)
class _Entry:
    job: Job
    over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None  # also of a cancelled job, until it has ended
    due_mono: float = -math.inf
    tried_mono: float | None = None  # when the first try began
    is_forgotten: bool = False
    wait: WaitTeller = field(default_factory=lambda: WaitTeller(lambda: None))

    @property
    def seen(self) -> Job:
        """The job, with what it waits for where it runs and has told nothing else."""
        waits_for = self.wait.describe() if self.job.state is JobState.RUNNING else ""
        if self.job.phrase or not waits_for:
            return self.job
        return replace(self.job, phrase=line_of(f"it waits: {waits_for}"))


class JobQueue:
    """All jobs of a node, in an `async with` that reads and at last writes the kept ones."""

    def __init__(self, store: JobStore | None, *, clock: Clock, rng: random.Random) -> None:
        """`store` None = no job outlives the process."""
        self._clock = clock
        self._rng = rng
        self._kinds: dict[str, JobKind] = {}
        self._entries: dict[str, _Entry] = {}
        self._wake = asyncio.Event()
        self._writer = JobWriter(store, clock)
        self._ends: Counter[JobState] = Counter()

    async def __aenter__(self) -> Self:
        for job in await self._writer.load():
            entry = self._entries[job.job_id] = _Entry(job)
            if job.state is JobState.RUNNING:
                self._put(entry, interrupted(job, self._clock.wall(), is_crash=True))
            if entry.job.state.is_end:
                entry.over.set()
        # Before any runs again: a job that ends the node each time must not do so for ever.
        await self._writer.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._writer.aclose()

    def add_kind(self, kind: JobKind) -> None:
        """Add a kind of work, before `start`."""
        self._kinds[kind.name] = kind

    def start(self, tasks: Supervisor) -> None:
        """Begin to work. Kept jobs of a kind that was not added fail."""
        for entry in self._entries.values():
            if entry.job.kind not in self._kinds and not entry.job.state.is_end:
                self._fail(entry, "unsupported", f"this node does no {entry.job.kind} work")
        tasks.start("jobs", self.run)
        tasks.start("jobs on disk", self._writer.run)

    def submit(
        self,
        kind: str,
        request: Mapping[str, object],
        *,
        owner: str,
        may_repeat: bool = True,
        job_id: str = "",
    ) -> Job:
        """Queue a piece of work. `request` is JSON; `job_id` "" = one is drawn.

        Raises QueueFull.
        """
        if kind not in self._kinds:
            raise InvariantBroken("a job is of an added kind", kind)
        if job_id in self._entries:
            raise InvariantBroken("a job has an id of its own", job_id)
        job = Job(
            job_id=job_id or self._new_id(),
            kind=kind,
            owner=owner,
            request=json.dumps(request).encode(),
            created_at=self._clock.wall(),
            may_repeat=may_repeat,
        )
        others = [one.job for one in self._entries.values() if not one.job.state.is_end]
        check_room(job, others)
        self._entries[job.job_id] = entry = _Entry(job)
        self._put(entry, job)
        return job

    async def kept(self) -> bool:
        """Write all changes to disk; returns whether they are there."""
        return await self._writer.flush()

    def find(self, job_id: str, owner: str | None) -> Job:
        """A job as it is now. Raises JobNotFound, also for a job of another owner."""
        return self._find(job_id, owner).seen

    def list_jobs(self, owner: str | None) -> list[Job]:
        """The jobs of an owner, the last that was submitted first."""
        found = (one.seen for one in reversed(self._entries.values()) if not one.is_forgotten)
        return [job for job in found if owner in (None, job.owner)]

    async def ended(self, job_id: str, owner: str | None, wait_s: float) -> Job:
        """A job once it has ended, or after `wait_s`, or as this node stops. Raises JobNotFound."""
        entry = self._find(job_id, owner)
        await self._clock.sleep(wait_s, entry.over)
        return entry.seen

    def cancel(self, job_id: str, owner: str | None) -> Job:
        """End a job, unless it has ended. Raises JobNotFound."""
        entry = self._find(job_id, owner)
        if not entry.job.state.is_end:
            self._end(entry, replace(entry.job, state=JobState.CANCELLED))
            if entry.task is not None:
                entry.task.cancel()
        return entry.job

    def forget(self, job_id: str, owner: str | None) -> None:
        """End a job and drop what is kept of it. Raises JobNotFound."""
        self.cancel(job_id, owner)
        self._entries[job_id].is_forgotten = True
        self._writer.remove(job_id)
        self._wake.set()

    def figures(self) -> Iterator[Figure]:
        """The figures of all jobs."""
        jobs = [entry.job for entry in self._entries.values()]
        states = Counter(str(job.state) for job in jobs)
        yield gauge(
            "kakeya_jobs{state}",
            "Jobs in the background by state",
            from_zero(states, JobState),
            "{}",
        )
        ends = {str(state): count for state, count in self._ends.items()}
        possible = [state for state in JobState if state.is_end]
        yield counter("kakeya_jobs_ended{end}", "Jobs by end", from_zero(ends, possible))
        size = sum(job.size_bytes for job in jobs)
        yield gauge("kakeya_jobs_bytes", "Bytes of requests and results of jobs", size, "bytes")
        failures = self._writer.failures.count
        yield counter(
            "kakeya_jobs_store_failures",
            "Writes of the file of jobs that failed",
            failures,
            "failures",
        )

    @property
    def problem(self) -> str:
        """What is wrong with the file of jobs, or was at the start; "" = nothing."""
        return self._writer.problem

    def status(self) -> Json:
        """The figures as JSON, and the problem."""
        return as_json(self.figures(), {"problem": self.problem})

    async def run(self) -> None:
        """Work until cancelled; then what runs is queued again, if it may be repeated."""
        try:
            while True:
                self._wake.clear()
                now = self._clock.mono()
                while entry := self._next(now):
                    self._begin(entry, now)
                self._forget_ended()
                due = [one.due_mono for one in self._entries.values() if one.due_mono > now]
                await self._clock.sleep(min(due, default=now + _LOOK_S) - now, self._wake)
        finally:
            tasks = [one.task for one in self._entries.values() if one.task is not None]
            await cancelled(self._clock, FORCE_S, tasks)
            for entry in self._entries.values():
                if entry.job.state is JobState.RUNNING:
                    self._put(entry, interrupted(entry.job, self._clock.wall(), is_crash=False))
                entry.over.set()  # its waiting callers are answered before the node ends

    def _next(self, now: float) -> _Entry | None:
        """The job that begins now; None = none."""
        running = [one.job for one in self._entries.values() if one.task is not None]
        kinds = Counter(job.kind for job in running)
        owners = Counter(job.owner for job in running)
        ready = (
            one
            for one in self._entries.values()
            if one.job.state is JobState.QUEUED
            and one.due_mono <= now
            and kinds[one.job.kind] < self._kinds[one.job.kind].concurrency
        )
        return min(ready, key=lambda one: owners[one.job.owner], default=None)

    def _begin(self, entry: _Entry, now: float) -> None:
        started_at = entry.job.started_at or self._clock.wall()
        self._put(
            entry,
            replace(entry.job, state=JobState.RUNNING, started_at=started_at, phrase=""),
        )
        entry.tried_mono = now if entry.tried_mono is None else entry.tried_mono
        entry.wait = WaitTeller(lambda: None)
        entry.task = asyncio.get_running_loop().create_task(self._work(entry))
        entry.task.add_done_callback(lambda task: self._worked(entry, task))

    def _worked(self, entry: _Entry, task: asyncio.Task[None]) -> None:
        entry.task = None
        self._wake.set()
        if not task.cancelled():
            task.exception()  # of one that was cancelled and raised something else: seen

    async def _work(self, entry: _Entry) -> None:
        job = entry.job
        try:
            if not job.may_repeat:
                await self._writer.flush()
            result = await self._kinds[job.kind].run(job, self._teller(entry), entry.wait)
            written = await asyncio.to_thread(json_bytes, result)
        except (Exception, asyncio.CancelledError) as fault:  # it ends this job, and nothing else
            if is_cancelled():
                raise
            if isinstance(fault, KakeyaError):
                self._met(entry, fault)
                return
            event(_log, "job failed", level=logging.ERROR, job=job.job_id, error=repr(fault))
            _log.debug("traceback", exc_info=fault)
            self._fail(entry, "internal", f"the work failed: {fault_text(fault)}")
        else:
            done = replace(entry.job, state=JobState.DONE, result=written, share=1.0, phrase="")
            self._end(entry, done)

    def _met(self, entry: _Entry, error: KakeyaError) -> None:
        """The work of a job ended with an error."""
        now, job = self._clock.mono(), entry.job
        tried_s = 0.0 if entry.tried_mono is None else now - entry.tried_mono
        if not may_try_again(error, tried_s, may_repeat=job.may_repeat):
            self._fail(entry, error.code, error.message)
            return
        entry.due_mono = now + (error.retry_after_s or RETRY_S)
        phrase = line_of(f"it waits: {error.message}")
        self._put(entry, replace(job, state=JobState.QUEUED, share=0.0, phrase=phrase))

    def _fail(self, entry: _Entry, code: str, message: str) -> None:
        # What a plug-in says may hold what UTF-8 cannot carry.
        told = message.encode("utf-8", "replace").decode()
        error = JobError(code=code, message=told)
        self._end(entry, replace(entry.job, state=JobState.FAILED, error=error))

    def _end(self, entry: _Entry, ended: Job) -> None:
        self._put(entry, replace(ended, ended_at=self._clock.wall()))
        entry.over.set()
        self._ends[ended.state] += 1
        if (kind := self._kinds.get(ended.kind)) is not None:
            kind.ended(entry.job)

    def _put(self, entry: _Entry, job: Job) -> None:
        entry.job = job
        self._writer.put(job)
        self._wake.set()

    def _teller(self, entry: _Entry) -> Tell:
        loop, task = asyncio.get_running_loop(), entry.task

        def note(share: float, phrase: str) -> None:
            # Of this try alone: a thread may go on behind one that was cancelled.
            if entry.task is task and entry.job.state is JobState.RUNNING:
                entry.job = replace(entry.job, share=share, phrase=phrase)

        def tell(share: float, phrase: str) -> None:
            share = 0.0 if math.isnan(share) else min(1.0, max(0.0, share))
            loop.call_soon_threadsafe(note, share, line_of(phrase))

        return tell

    def _new_id(self) -> str:
        while (job_id := "job_" + draw_id("", self._rng, 24)[1:]) in self._entries:
            pass
        return job_id

    def _find(self, job_id: str, owner: str | None) -> _Entry:
        entry = self._entries.get(job_id)
        is_there = entry is not None and not entry.is_forgotten
        if entry is None or not is_there or owner not in (None, entry.job.owner):
            raise JobNotFound(
                f"there is no job {job_id[:80]!r} of this caller: it is mistyped, ended more than "
                f"{KEEP_S / 3600:.0f} hours ago, or newer ones took its place"
            )
        return entry

    def _forget_ended(self) -> None:
        # A job that was cancelled holds its place until its work has ended.
        idle = [one for one in self._entries.values() if one.task is None and one.job.state.is_end]
        gone = [one.job for one in idle if one.is_forgotten]
        gone += outdated([one.job for one in idle if not one.is_forgotten], self._clock.wall())
        for job in gone:
            del self._entries[job.job_id]
            self._writer.remove(job.job_id)


def node_jobs(folder: Path, clock: Clock) -> JobQueue:
    """The jobs that are kept in a node's data directory."""
    # For a caller without a name, the id of a job is the key to it.
    return JobQueue(JobStore(folder / FILE), clock=clock, rng=random.SystemRandom())
