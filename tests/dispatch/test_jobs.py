"""Jobs in their queue: their course, their owners, and what outlives the node."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import MemoryRefused, PeerUnavailable, QueueFull
from kakeya.core.tasks import Supervisor
from kakeya.dispatch.job import MOST_CRASHES, PATIENCE_S, Job, JobState
from kakeya.dispatch.job_store import FILE, JobStore
from kakeya.dispatch.jobs import JobKind, JobNotFound, JobQueue, Tell
from kakeya.generation.waiting import WaitTeller
from tests.fakes import FakeClock
from tests.waiting import until


class Work:
    """A kind of work that waits at a gate and then answers with its request."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.faults: list[BaseException] = []

    async def run(self, job: Job, tell: Tell, wait: WaitTeller) -> object:
        self.begun.append(job.job_id)
        tell(0.5, "half of it")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(job.job_id)
            raise
        if self.faults:
            raise self.faults.pop(0)
        return {"was": json.loads(job.request)}


@asynccontextmanager
async def started(
    work: Work, folder: Path | None = None, clock: Clock | None = None, concurrency: int = 2
) -> AsyncIterator[JobQueue]:
    # A fake one jumps while threads write: it is for tests that wait for its times alone.
    clock = clock or SystemClock()
    store = None if folder is None else JobStore(folder / FILE)
    jobs = JobQueue(store, clock=clock, rng=random.Random(1))
    jobs.add_kind(JobKind(name="image", run=work.run, concurrency=concurrency))
    async with jobs, Supervisor(clock) as tasks:
        jobs.start(tasks)
        yield jobs


async def test_a_job_goes_its_way_from_queued_to_done() -> None:
    work = Work()
    async with started(work) as jobs:
        job = jobs.submit("image", {"prompt": "a fox"}, owner="ann")
        assert (job.state, job.job_id[:4]) == (JobState.QUEUED, "job_")
        await until(lambda: jobs.find(job.job_id, "ann").share == 0.5)
        running = jobs.find(job.job_id, "ann")
        assert (running.state, running.phrase) == (JobState.RUNNING, "half of it")
        work.gate.set()
        done = await jobs.ended(job.job_id, "ann", 60.0)
        assert (done.state, done.share) == (JobState.DONE, 1.0)
        assert json.loads(done.result or b"") == {"was": {"prompt": "a fox"}}
        assert jobs.status()["done"] == 1


async def test_a_wait_ends_without_the_job() -> None:
    work = Work()
    async with started(work) as jobs:
        job = jobs.submit("image", {}, owner="ann")
        assert not (await jobs.ended(job.job_id, "ann", 0.01)).state.is_end


async def test_a_job_is_seen_by_its_owner_alone() -> None:
    async with started(Work()) as jobs:
        job = jobs.submit("image", {}, owner="ann")
        for look in (jobs.find, jobs.cancel, jobs.forget):
            with pytest.raises(JobNotFound):
                look(job.job_id, "bob")
        assert jobs.list_jobs("bob") == []
        assert [one.job_id for one in jobs.list_jobs("ann")] == [job.job_id]
        assert [one.job_id for one in jobs.list_jobs(None)] == [job.job_id]
        assert jobs.find(job.job_id, None).owner == "ann"


async def test_a_cancelled_job_stays_cancelled_and_frees_its_place() -> None:
    work = Work()
    async with started(work, concurrency=1) as jobs:
        first, second = (jobs.submit("image", {}, owner="ann") for _ in range(2))
        await until(lambda: work.begun == [first.job_id])
        assert jobs.cancel(second.job_id, "ann").state is JobState.CANCELLED
        assert jobs.cancel(first.job_id, "ann").state is JobState.CANCELLED
        third = jobs.submit("image", {}, owner="ann")
        await until(lambda: work.begun == [first.job_id, third.job_id])
        assert work.cancelled == [first.job_id]
        work.gate.set()
        assert (await jobs.ended(third.job_id, "ann", 60.0)).state is JobState.DONE
        assert jobs.cancel(third.job_id, "ann").state is JobState.DONE
        jobs.forget(third.job_id, "ann")
        with pytest.raises(JobNotFound):
            jobs.find(third.job_id, None)


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (ValueError("no such\nstyle"), "internal", "the work failed: ValueError: no such style"),
        (MemoryRefused("it never fits"), "memory_refused", "it never fits"),
        (asyncio.CancelledError(), "internal", "the work failed: CancelledError"),
    ],
)
async def test_a_fault_ends_its_job_and_no_other(
    fault: BaseException, code: str, message: str
) -> None:
    work = Work()
    work.faults = [fault]
    work.gate.set()
    async with started(work) as jobs:
        job = jobs.submit("image", {}, owner="ann")
        failed = await jobs.ended(job.job_id, "ann", 60.0)
        assert failed.state is JobState.FAILED
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == (code, message)
        other = jobs.submit("image", {}, owner="ann")
        assert (await jobs.ended(other.job_id, "ann", 60.0)).state is JobState.DONE


async def test_a_refused_job_waits_and_tries_again_but_not_for_ever() -> None:
    work, clock = Work(), FakeClock()
    work.gate.set()
    work.faults = [MemoryRefused("a big model is in use", retry_after_s=7.0)]
    async with started(work, clock=clock) as jobs:
        began_mono = clock.mono()
        job = jobs.submit("image", {}, owner="ann")
        assert (await jobs.ended(job.job_id, "ann", 1e9)).state is JobState.DONE
        assert clock.mono() - began_mono >= 7.0
        work.faults = [PeerUnavailable("the engine ended") for _ in range(1000)]
        began_mono = clock.mono()
        other = jobs.submit("image", {}, owner="ann")
        failed = await jobs.ended(other.job_id, "ann", 1e9)
        assert failed.state is JobState.FAILED
        assert clock.mono() - began_mono >= PATIENCE_S


async def test_places_go_to_the_owner_with_the_fewest_running_jobs() -> None:
    work = Work()
    async with started(work, concurrency=2) as jobs:
        first, second, third = (jobs.submit("image", {}, owner="ann") for _ in range(3))
        other = jobs.submit("image", {}, owner="bob")
        await until(lambda: len(work.begun) == 2)
        assert work.begun == [first.job_id, other.job_id]
        jobs.cancel(first.job_id, None)
        await until(lambda: work.begun[2:] == [second.job_id])
        jobs.cancel(third.job_id, None)


def a_home(folder: Path) -> Path:
    (folder / "home").mkdir()
    return folder / "home"


def as_a_kill_leaves_it(folder: Path, copy: Path) -> Path:
    copy.mkdir()
    with (
        closing(sqlite3.connect(folder / FILE)) as source,
        closing(sqlite3.connect(copy / FILE)) as target,
    ):
        source.backup(target)  # all that was committed at one moment
    return copy


async def test_a_job_that_ran_at_a_kill_runs_again_unless_that_may_not_be(tmp_path: Path) -> None:
    home = await asyncio.to_thread(a_home, tmp_path)
    work = Work()
    async with started(work, home, concurrency=1) as jobs:
        again = jobs.submit("image", {"n": 1}, owner="ann")
        await until(lambda: work.begun == [again.job_id])
        waits = jobs.submit("image", {"n": 2}, owner="ann")
        assert await jobs.kept()
        left = await asyncio.to_thread(as_a_kill_leaves_it, home, tmp_path / "left")
    work.gate.set()
    async with started(work, left) as jobs:
        for job, n in ((again, 1), (waits, 2)):
            done = await jobs.ended(job.job_id, "ann", 60.0)
            assert done.state is JobState.DONE
            assert json.loads(done.result or b"") == {"was": {"n": n}}
        assert jobs.find(again.job_id, "ann").crashes == 1
    # What has ended is there at the next start, with its result.
    async with started(work, left) as jobs:
        assert jobs.find(again.job_id, "ann").result == b'{"was": {"n": 1}}'
        assert (await jobs.ended(again.job_id, "ann", 60.0)).state is JobState.DONE


async def test_work_that_may_not_be_repeated_fails_at_a_kill(tmp_path: Path) -> None:
    home = await asyncio.to_thread(a_home, tmp_path)
    work = Work()
    async with started(work, home) as jobs:
        job = jobs.submit("image", {}, owner="ann", may_repeat=False)
        # It is written that it runs before it does.
        await until(lambda: work.begun == [job.job_id])
        left = await asyncio.to_thread(as_a_kill_leaves_it, home, tmp_path / "left")
    async with started(work, left) as jobs:
        failed = jobs.find(job.job_id, "ann")
        assert failed.state is JobState.FAILED
        assert failed.error is not None
        assert "may not be done twice" in failed.error.message
    assert len(work.begun) == 1


async def test_a_job_that_kills_the_node_each_time_is_given_up(tmp_path: Path) -> None:
    home = await asyncio.to_thread(a_home, tmp_path)
    work = Work()
    for crash in range(3):
        async with started(work, home) as jobs:
            if not crash:
                jobs.submit("image", {}, owner="ann")
            await until(lambda: len(work.begun) == crash + 1)  # noqa: B023
            await jobs.kept()
            home = await asyncio.to_thread(as_a_kill_leaves_it, home, tmp_path / str(crash + 1))
    async with started(work, home) as jobs:
        (job,) = jobs.list_jobs(None)
        assert job.error is not None
        assert "3 times" in job.error.message


async def test_a_node_that_stops_in_order_takes_running_jobs_up_again(tmp_path: Path) -> None:
    work = Work()
    async with started(work, tmp_path) as jobs:
        job = jobs.submit("image", {}, owner="ann")
        await until(lambda: work.begun == [job.job_id])
        waiting = asyncio.ensure_future(jobs.ended(job.job_id, "ann", 1e9))
        await asyncio.sleep(0)
    assert (await waiting).state is JobState.QUEUED
    work.gate.set()
    async with started(work, tmp_path) as jobs:
        done = await jobs.ended(job.job_id, "ann", 60.0)
        assert (done.state, done.crashes) == (JobState.DONE, 0)


async def test_kept_jobs_of_a_kind_that_is_gone_fail(tmp_path: Path) -> None:
    work = Work()
    async with started(work, tmp_path) as jobs:
        job = jobs.submit("image", {}, owner="ann")
    clock = SystemClock()
    bare = JobQueue(JobStore(tmp_path / FILE), clock=clock, rng=random.Random(1))
    async with bare, Supervisor(clock) as tasks:
        bare.start(tasks)
        failed = bare.find(job.job_id, "ann")
        assert failed.error is not None
        assert failed.error.message == "this node does no image work"


async def test_jobs_go_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    work = Work()
    work.gate.set()
    async with started(work, tmp_path / "missing") as jobs:
        job = jobs.submit("image", {}, owner="ann")
        assert not await jobs.kept()
        assert (await jobs.ended(job.job_id, "ann", 60.0)).state is JobState.DONE
        assert "cannot be used" in str(jobs.status()["problem"])


async def test_an_owner_cannot_fill_the_queue() -> None:
    async with started(Work()) as jobs:
        for _ in range(256):
            jobs.submit("image", {}, owner="ann")
        with pytest.raises(QueueFull, match="256 of them"):
            jobs.submit("image", {}, owner="ann")
        jobs.submit("image", {}, owner="bob")


OPS = st.lists(
    st.sampled_from(("submit", "submit once", "cancel", "turn", "kill", "stop")), max_size=9
)


@settings(max_examples=15)
@given(OPS)
def test_no_job_is_lost_and_none_that_may_not_be_repeated_begins_twice(ops: list[str]) -> None:
    asyncio.run(_live(ops))


async def _live(ops: list[str]) -> None:
    """Submit, cancel, kill and stop at any moment; then let all work come to its end."""
    work, submitted, cancelled = Work(), dict[str, bool](), set[str]()
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp))
    home = await asyncio.to_thread(a_home, folder)
    left = [*ops, "finish"]
    try:
        while left:
            killed = None
            async with started(work, home, concurrency=2) as jobs:
                while left:
                    op = left.pop(0)
                    if op.startswith("submit"):
                        may_repeat = op == "submit"
                        owner = f"owner {len(submitted) % 3}"
                        job = jobs.submit("image", {}, owner=owner, may_repeat=may_repeat)
                        submitted[job.job_id] = may_repeat
                        assert await jobs.kept()
                    elif op == "cancel" and submitted:
                        job = jobs.cancel(list(submitted)[-1], None)
                        if job.state is JobState.CANCELLED:
                            cancelled.add(job.job_id)
                        assert await jobs.kept()
                    elif op == "turn":
                        await asyncio.sleep(0.005)
                    elif op == "kill":
                        begun = len(work.begun)
                        copy = folder / str(len(left))
                        home = await asyncio.to_thread(as_a_kill_leaves_it, home, copy)
                        killed = begun  # what begins behind it has not happened
                        break
                    elif op == "stop":
                        break
                    elif op == "finish":
                        work.gate.set()
                        for job_id in submitted:
                            await jobs.ended(job_id, None, 1e6)
                        ends = {job.job_id: job for job in jobs.list_jobs(None)}
            if killed is not None:
                del work.begun[killed:]
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)
    assert ends.keys() == submitted.keys()
    for job_id, may_repeat in submitted.items():
        if job_id in cancelled:
            assert ends[job_id].state is JobState.CANCELLED
        elif may_repeat and ends[job_id].crashes < MOST_CRASHES:
            assert ends[job_id].state is JobState.DONE
        else:
            assert ends[job_id].state in (JobState.DONE, JobState.FAILED)
        # A begin is kept before it happens, and a kill may come between.
        assert ends[job_id].crashes <= ops.count("kill")
        assert may_repeat or work.begun.count(job_id) <= 1
