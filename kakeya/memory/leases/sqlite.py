"""The book of leases in one SQLite file: the default, for one machine's processes.

Write-ahead log, so readers never wait; one writer at a time, the others wait `BUSY_S` at most. A
process that is killed in the middle of a change leaves the book as it was. Commits are not forced
to the disk one by one: after a power cut every lease is void anyway, and the file stays whole.

A damaged file is set aside as `*.corrupt` and named; living holders write themselves down again
with their next heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

from kakeya.core import errors
from kakeya.core.log import event
from kakeya.memory.leases.codec import decode_book, encode_head, encode_lease
from kakeya.memory.leases.lease import Book
from kakeya.memory.leases.store import changes

_log = logging.getLogger(__name__)
FILE = "leases.db"
BUSY_S = 10.0
_LOCK_PAUSE_S = 0.02
_SCHEMA = """
CREATE TABLE IF NOT EXISTS head (one INTEGER PRIMARY KEY CHECK (one = 1), data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS lease (id TEXT PRIMARY KEY, data TEXT NOT NULL);
"""
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PRIMARY = 0xFF
Result = TypeVar("Result")


class _Damaged(Exception):
    """The file does not hold the written lines."""


class SqliteLeaseStore:
    """See `store.LeaseStore`. `path` is the file; its folder must exist. A read or a change
    waits `busy_s` for other processes."""

    def __init__(self, path: Path, *, busy_s: float = BUSY_S) -> None:
        self._path = path
        self.busy_s = busy_s
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def place(self) -> str:
        """The file."""
        return str(self._path)

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lease store")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
            self._thread.shutdown(wait=False)
            self._thread = None

    async def read(self) -> Book:
        """See the contract."""
        return await self._run(self._read)

    async def change(self, decide: Callable[[Book], tuple[Book, Result]]) -> Result:
        """See the contract."""
        return await self._run(lambda: self._change(decide))

    # In the store's own thread from here on.

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._thread is None:
            raise errors.Conflict(f"the lease store {self._path} is not open; use `async with`")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, work)

    def _guarded(self, work: Callable[[], Result]) -> Result:
        try:
            return self._translated(work)
        except _Damaged as problem:
            self._set_aside(problem)
        try:
            return self._translated(work)
        except _Damaged as problem:
            raise errors.StoreFailed(
                f"the lease store {self._path} is damaged again at once: {problem}; look at the "
                "disk, or name another folder with --data-dir"
            ) from problem

    def _translated(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except sqlite3.Error as problem:
            self._close()
            code = getattr(problem, "sqlite_errorcode", 0) & _PRIMARY
            if code in _DAMAGED:
                raise _Damaged(str(problem)) from problem
            what = "its disk is full or broken; free some space" if code in _FULL else "try again"
            raise errors.StoreFailed(
                f"the lease store {self._path} cannot be used: {problem}; {what}"
            ) from problem
        except errors.PeerProtocol as problem:
            self._close()
            raise _Damaged(problem.message) from problem

    def _read(self) -> Book:
        db = self._open()
        with _transaction(db, "BEGIN"):
            return self._load(db)

    def _change(self, decide: Callable[[Book], tuple[Book, Result]]) -> Result:
        db = self._open()
        with _transaction(db, "BEGIN IMMEDIATE"):
            before = self._load(db)
            after, result = decide(before)
            if after is not before:
                _save(db, before, after)
            return result

    def _load(self, db: sqlite3.Connection) -> Book:
        head = db.execute("SELECT data FROM head").fetchone()
        lines = dict(db.execute("SELECT id, data FROM lease").fetchall())
        book, damaged = decode_book(head[0] if head else None, lines)
        if damaged:
            raise _Damaged("; ".join(damaged.values()))
        return book

    def _open(self) -> sqlite3.Connection:
        # Another process may have set the open file aside.
        if self._db is not None and self._file == _identity(self._path):
            return self._db
        self._close()
        with _locked(self._path, self.busy_s):
            self._db = _connect(self._path, self.busy_s)
            self._file = _identity(self._path)
        return self._db

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _set_aside(self, problem: _Damaged) -> None:
        """Move the file away, unless another process did so already."""
        self._close()
        with _locked(self._path, self.busy_s):
            if _is_whole(self._path, self.busy_s):
                return
            aside = self._path.with_name(self._path.name + ".corrupt")
            for suffix in ("", "-wal", "-shm"):
                part = self._path.with_name(self._path.name + suffix)
                if part.exists():
                    part.replace(self._path.with_name(aside.name + suffix))
        event(
            _log,
            "lease store was damaged and is set aside; holders that live write themselves again",
            level=logging.WARNING,
            file=aside,
            problem=problem,
        )


def _connect(path: Path, busy_s: float) -> sqlite3.Connection:
    is_new = not path.exists()
    db = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        if is_new:
            path.chmod(0o600)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_SCHEMA)
    except BaseException:
        db.close()
        raise
    return db


def _save(db: sqlite3.Connection, before: Book, after: Book) -> None:
    written, removed = changes(before, after)
    head = encode_head(after)
    if head != encode_head(before):
        db.execute("INSERT OR REPLACE INTO head VALUES (1, ?)", (head,))
    rows = [(key, encode_lease(after.leases[key])) for key in written]
    db.executemany("INSERT OR REPLACE INTO lease VALUES (?, ?)", rows)
    db.executemany("DELETE FROM lease WHERE id = ?", [(key,) for key in removed])


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection, begin: str) -> Iterator[None]:
    db.execute(begin)
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _locked(path: Path, busy_s: float) -> Iterator[None]:
    try:
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as problem:
        raise errors.StoreFailed(
            f"the lease store {path} cannot be used: {problem.strerror or problem}; name a "
            "writable folder with --data-dir"
        ) from problem
    try:
        _lock(lock, path, busy_s)
        yield
    finally:
        os.close(lock)


def _lock(lock: int, path: Path, busy_s: float) -> None:
    """Lock, or give up in time: the process that has the lock may be stopped."""
    until_mono = time.monotonic() + busy_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_mono:
                raise errors.StoreFailed(
                    f"the lease store {path} cannot be used: another process has locked "
                    f"{path.name}.lock for {busy_s:g} s; end it, and try again"
                ) from None
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


def _is_whole(path: Path, busy_s: float) -> bool:
    """Whether a fresh connection finds no fault; True where there is no file."""
    if not path.exists():
        return True
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=busy_s)) as db:
            if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
                return False
            head = db.execute("SELECT data FROM head").fetchone()
            lines = dict(db.execute("SELECT id, data FROM lease").fetchall())
            return not decode_book(head[0] if head else None, lines)[1]
    except errors.PeerProtocol:
        return False
    except sqlite3.Error as problem:
        return getattr(problem, "sqlite_errorcode", 0) & _PRIMARY not in _DAMAGED


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
