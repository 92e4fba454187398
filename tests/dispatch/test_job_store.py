"""Jobs on disk: what is written is read back; a damaged file, or none, costs no job in memory."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.errors import StoreFailed
from kakeya.dispatch.job import Job, JobError, JobState
from kakeya.dispatch.job_store import FILE, JobStore, JobWriter
from tests.fakes import FakeClock

ONE = Job(job_id="job_1", kind="image", owner="ann", request=b'{"a": 1}', created_at=1.0)
TWO = Job(
    job_id="job_2",
    kind="image",
    owner="bob",
    request=b"{}",
    created_at=2.0,
    state=JobState.FAILED,
    may_repeat=False,
    ended_at=3.0,
    share=0.5,
    phrase="half",
    crashes=1,
    result=b"[]",
    error=JobError(code="internal", message="it broke"),
)


def kept(folder: Path) -> tuple[list[Job], str]:
    with closing(JobStore(folder / FILE)) as store:
        return store.load()


def test_jobs_come_back_as_they_were_oldest_first(tmp_path: Path) -> None:
    store = JobStore(tmp_path / FILE)
    store.write({"job_2": TWO, "job_1": ONE})
    store.close()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    again = JobStore(tmp_path / FILE)
    assert again.load() == ([ONE, TWO], "")
    again.write({"job_1": None})
    assert again.load() == ([TWO], "")
    again.close()


def test_a_damaged_file_is_set_aside_and_said(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    store = JobStore(tmp_path / FILE)
    jobs, lost = store.load()
    assert jobs == []
    assert "was damaged" in lost
    assert (tmp_path / f"{FILE}.corrupt").exists()
    store.write({"job_1": ONE})
    assert store.load() == ([ONE], "")
    store.close()


def test_a_line_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    store = JobStore(tmp_path / FILE)
    store.write({"job_1": ONE, "job_2": TWO})
    db = store._db
    assert db is not None
    with db:
        db.execute("UPDATE job SET facts = '{}' WHERE id = 'job_1'")
    jobs, lost = store.load()
    assert jobs == [TWO]
    assert lost.startswith("1 jobs in ")
    store.close()


def test_a_file_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    store = JobStore(tmp_path / "missing" / FILE)
    with pytest.raises(StoreFailed, match="cannot be used"):
        store.write({"job_1": ONE})
    with pytest.raises(StoreFailed):
        store.load()


async def test_the_writer_goes_on_without_its_disk_and_writes_when_it_is_back(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "later"
    writer = JobWriter(JobStore(folder / FILE), FakeClock())
    assert await writer.load() == []
    writer.put(ONE)
    assert not await writer.flush()
    assert writer.failures.count == 2
    assert "cannot be used" in writer.problem
    await asyncio.to_thread(folder.mkdir)
    writer.put(TWO)
    assert await writer.flush()
    assert writer.problem == ""
    await writer.aclose()
    assert await asyncio.to_thread(kept, folder) == ([ONE, TWO], "")


async def test_a_file_that_is_damaged_in_use_is_written_anew_with_all_jobs(tmp_path: Path) -> None:
    def damage() -> None:
        for part in tmp_path.iterdir():
            part.unlink()
        (tmp_path / FILE).write_bytes(b"no database at all" * 1000)

    store = JobStore(tmp_path / FILE)
    writer = JobWriter(store, SystemClock())
    writer.put(ONE)
    assert await writer.flush()
    await asyncio.to_thread(store.close)
    await asyncio.to_thread(damage)
    writer.put(TWO)
    assert not await writer.flush()
    assert "was damaged" in writer.problem
    assert await writer.flush()
    await writer.aclose()
    assert await asyncio.to_thread(kept, tmp_path) == ([ONE, TWO], "")


async def test_without_a_store_nothing_is_kept() -> None:
    writer = JobWriter(None, SystemClock())
    writer.put(ONE)
    assert await writer.load() == []
    assert not await writer.flush()
    await writer.aclose()
