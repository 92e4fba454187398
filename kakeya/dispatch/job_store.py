"""The jobs of a node in one SQLite file, and the writer that keeps it up to date.

Every write is one transaction, so a kill leaves the file as it was before or after it. A damaged
file is set aside as `*.corrupt` and named. Where nothing can be written, as on a full disk, the
jobs go on in memory, and the writer tries again: `problem` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from kakeya.core.clock import Clock
from kakeya.core.errors import StoreFailed
from kakeya.core.log import FailureLog, event
from kakeya.dispatch.job import Job, JobError, JobState

_log = logging.getLogger(__name__)
FILE = "jobs.db"
RETRY_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS job
    (id TEXT PRIMARY KEY, facts TEXT NOT NULL, request BLOB NOT NULL, result BLOB)
"""
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY = 0xFF
_Result = TypeVar("_Result")
Changes = Mapping[str, Job | None]
"""Jobs by id as they are to be kept; None = no more."""


class StoreDamaged(StoreFailed):
    """The file was damaged, and is set aside: all that was in it is to be written again."""


class JobStore:
    """The file. Every method blocks, and is called in one thread at a time."""

    def __init__(self, path: Path) -> None:
        """The folder must exist; the file need not."""
        self._path = path
        self._db: sqlite3.Connection | None = None

    def load(self) -> tuple[list[Job], str]:
        """Read all jobs, the oldest first, and a sentence on what was lost, "" = nothing.

        Raises StoreFailed.
        """
        try:
            return self._translated(self._read)
        except _Damaged as problem:
            return [], self._set_aside(problem)

    def write(self, changes: Changes) -> None:
        """Keep all changes, or none of them. Raises StoreFailed and StoreDamaged."""
        try:
            self._translated(lambda: self._write(changes))
        except _Damaged as problem:
            raise StoreDamaged(self._set_aside(problem)) from problem

    def close(self) -> None:
        """Close the file."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _translated(self, work: Callable[[], _Result]) -> _Result:
        try:
            return work()
        except (sqlite3.Error, OSError) as problem:
            self.close()
            code = getattr(problem, "sqlite_errorcode", 0) & _PRIMARY
            if code in _DAMAGED:
                raise _Damaged(str(problem)) from problem
            raise StoreFailed(f"{self._path} cannot be used: {problem}") from problem

    def _read(self) -> tuple[list[Job], str]:
        rows = self._open().execute("SELECT id, facts, request, result FROM job").fetchall()
        jobs, lost = [], 0
        for row in rows:
            try:
                jobs.append(_decode(*row))
            except (ValueError, TypeError, KeyError):
                lost += 1
        jobs.sort(key=lambda job: job.created_at)
        return jobs, f"{lost} jobs in {self._path} cannot be read" if lost else ""

    def _write(self, changes: Changes) -> None:
        db = self._open()
        kept = [_encode(job) for job in changes.values() if job is not None]
        gone = [(job_id,) for job_id, job in changes.items() if job is None]
        with db:  # a transaction
            db.executemany("INSERT OR REPLACE INTO job VALUES (?, ?, ?, ?)", kept)
            db.executemany("DELETE FROM job WHERE id = ?", gone)

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self._path.touch(mode=0o600)
            db = sqlite3.connect(self._path, check_same_thread=False)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA secure_delete=ON")  # prompts that are forgotten leave the file
                db.execute(_SCHEMA)
            except BaseException:
                db.close()
                raise
            self._db = db
        return self._db

    def _set_aside(self, problem: _Damaged) -> str:
        self.close()
        aside = self._path.with_name(self._path.name + ".corrupt")
        try:
            self._path.replace(aside)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        except OSError as fault:
            raise StoreFailed(f"{self._path} is damaged and cannot be moved: {fault}") from fault
        event(
            _log,
            "the file of jobs was damaged and is set aside; going on without it",
            level=logging.WARNING,
            file=aside,
            problem=problem,
        )
        return f"the file of jobs was damaged ({problem}) and is set aside as {aside}"


class JobWriter:
    """Writes changed jobs, off the event loop."""

    def __init__(self, store: JobStore | None, clock: Clock) -> None:
        """`store` None = nothing is written."""
        self._store = store
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._kept: dict[str, Job] = {}
        self._changes: dict[str, Job | None] = {}
        self._has_changes = asyncio.Event()
        self._turn = asyncio.Lock()
        self._lost = ""
        message = "jobs are not written; a restart would not know the latest changes"
        self.failures = FailureLog(_log, message, clock, retry_in_s=RETRY_S)

    @property
    def problem(self) -> str:
        """What is wrong with the file, or was at the start; "" = nothing."""
        return self.failures.error or self._lost

    async def load(self) -> list[Job]:
        """Read the kept jobs, the oldest first; none where the file cannot be used."""
        if self._store is None:
            return []
        try:
            jobs, self._lost = await self._call(self._store.load)
        except StoreFailed as failed:
            self.failures.failed(failed.message)
            return []
        self._kept = {job.job_id: job for job in jobs}
        return jobs

    def put(self, job: Job) -> None:
        """Keep a job as it is now, soon."""
        self._kept[job.job_id] = self._changes[job.job_id] = job
        self._has_changes.set()

    def remove(self, job_id: str) -> None:
        """Keep a job no more."""
        self._kept.pop(job_id, None)
        self._changes[job_id] = None
        self._has_changes.set()

    async def flush(self) -> bool:
        """Write all changes; returns whether they are on disk."""
        async with self._turn:
            changes, self._changes = self._changes, {}
            self._has_changes.clear()
            if self._store is None or not changes:
                return self._store is not None
            store, is_written = self._store, False
            try:
                await self._call(lambda: store.write(changes))
                is_written = True
                self.failures.succeeded()
            except StoreDamaged as damaged:
                self.failures.failed(damaged.message)
                changes = dict(self._kept)
            except StoreFailed as failed:
                self.failures.failed(failed.message)
            finally:
                if not is_written:  # also when this is cancelled: to write twice does no harm
                    self._changes = changes | self._changes
                    self._has_changes.set()
            return is_written

    async def run(self) -> None:
        """Write changes for ever."""
        while True:
            await self._has_changes.wait()
            if not await self.flush() and not await self.flush():
                await self._clock.sleep(RETRY_S)

    async def aclose(self) -> None:
        """Write what is left, once, and close the file."""
        await self.flush()
        if self._store is not None:
            await self._call(self._store.close)
        self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class _Damaged(Exception):
    """The file is no database, or a broken one."""


def _encode(job: Job) -> tuple[str, str, bytes, bytes | None]:
    facts = asdict(job)
    job_id, request, result = facts.pop("job_id"), facts.pop("request"), facts.pop("result")
    return job_id, json.dumps(facts), request, result


def _decode(job_id: str, facts: str, request: bytes, result: bytes | None) -> Job:
    found = json.loads(facts)
    error = found.pop("error")
    return Job(
        **found | {"state": JobState(found["state"])},
        error=None if error is None else JobError(**error),
        job_id=job_id,
        request=request,
        result=result,
    )
