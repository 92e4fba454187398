"""A job as a value, and the rules of its life: pure functions.

queued --> running --> done | failed
   ^          |
   +----------+  refused for now, or the node ended        cancelled, from queued and running
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kakeya.core.errors import (
    DeadlineExceeded,
    KakeyaError,
    MemoryRefused,
    ModelLoading,
    QueueFull,
    Refused,
)
from kakeya.core.figures import Json
from kakeya.core.units import MIB, format_bytes

KEEP_S = 24 * 3600.0
"""How long an ended job and its result are kept."""
MOST_ENDED = 1024
MOST_BYTES = 64 * MIB
"""Of the requests and results of ended jobs, and again of the requests of the others."""
MOST_WAITING = 1024
MOST_WAITING_OF_OWNER = 256
PATIENCE_S = 600.0
"""How long a job tries again when it is refused for now; behind others it waits without end."""
MOST_CRASHES = 3
"""A job that ran at so many crashes of the node is not run again."""
PHRASE_CHARS = 200


class ResultNotJson(KakeyaError):
    """A result cannot be written as JSON, or is too large."""

    code = "result_not_json"


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether nothing follows."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """Why a job failed: the code and the sentence of an error."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job at one moment. `request` and `result` are JSON, None = it has none yet; `share` is done
    of it, from 0 to 1, and `phrase` says what it does or waits for; times are wall seconds, 0 = not
    yet. `crashes` counts those of the node while it ran."""

    job_id: str
    kind: str
    owner: str
    request: bytes
    created_at: float
    state: JobState = JobState.QUEUED
    may_repeat: bool = True
    started_at: float = 0.0
    ended_at: float = 0.0
    share: float = 0.0
    phrase: str = ""
    crashes: int = 0
    result: bytes | None = None
    error: JobError | None = None

    @property
    def size_bytes(self) -> int:
        """What is kept of it."""
        return len(self.request) + len(self.result or b"")

    def describe(self) -> Json:
        """The job as JSON, without its request and its result."""
        return {
            "id": self.job_id,
            "object": "job",
            "kind": self.kind,
            "owner": self.owner,
            "state": self.state.value,
            "progress": {"share": round(self.share, 4), "phrase": self.phrase},
            "created_at": self.created_at,
            "started_at": self.started_at or None,
            "ended_at": self.ended_at or None,
            "error": self.error and {"code": self.error.code, "message": self.error.message},
        }


def check_room(job: Job, others: Collection[Job]) -> None:
    """Check that a job can wait beside others that have not ended. Raises QueueFull."""
    own = sum(one.owner == job.owner for one in others)
    size = sum(one.size_bytes for one in others) + job.size_bytes
    if len(others) >= MOST_WAITING or own >= MOST_WAITING_OF_OWNER or size > MOST_BYTES:
        raise QueueFull(
            f"{len(others)} jobs wait already, {own} of them of this caller, and this one would "
            f"make it {format_bytes(size)} of requests; at most {MOST_WAITING}, "
            f"{MOST_WAITING_OF_OWNER} and {format_bytes(MOST_BYTES)} may wait: submit it later"
        )


def may_try_again(error: KakeyaError, tried_s: float, *, may_repeat: bool) -> bool:
    """Whether a job that met an error waits for another try, after trying for `tried_s`."""
    if isinstance(error, QueueFull):  # others are ahead of it, perhaps more jobs of its own caller
        return True
    if isinstance(error, Refused):  # nothing has begun
        is_for_good = isinstance(error, MemoryRefused) and error.retry_after_s is None
        is_passing = error.retryable and not is_for_good
    else:
        is_late = isinstance(error, DeadlineExceeded) and not isinstance(error, ModelLoading)
        is_passing = may_repeat and error.retryable and not is_late
    return is_passing and tried_s < PATIENCE_S


def interrupted(job: Job, now: float, *, is_crash: bool) -> Job:
    """A job that ran when the node ended: queued again, or failed at `now` of the wall clock."""
    crashes = job.crashes + is_crash
    if not job.may_repeat:
        why = "the node ended while it ran, and its work may not be done twice; submit it again"
    elif crashes >= MOST_CRASHES:
        why = f"the node ended {crashes} times while it ran; it is not tried again"
    else:
        phrase = "the node ended while it ran; it begins again"
        return replace(job, state=JobState.QUEUED, crashes=crashes, share=0.0, phrase=phrase)
    error = JobError(code="interrupted", message=why)
    return replace(job, state=JobState.FAILED, crashes=crashes, error=error, ended_at=now)


def outdated(ended: Collection[Job], now: float) -> list[Job]:
    """The ended jobs to be forgotten at `now` of the wall clock: those that are too old, and the
    oldest where they are too many or too large."""
    found: list[Job] = []
    size = 0
    for count, job in enumerate(sorted(ended, key=lambda job: -job.ended_at), start=1):
        size += job.size_bytes
        if count > MOST_ENDED or size > MOST_BYTES or now - job.ended_at >= KEEP_S:
            found.append(job)
    return found


def json_bytes(value: object) -> bytes:
    """Write a result as JSON, with {"b64": "..."} in the place of bytes. Raises ResultNotJson."""
    try:
        written = json.dumps(value, default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as fault:
        raise ResultNotJson(
            f"the result cannot be written as JSON ({fault_text(fault)}); it may hold texts, "
            "finite numbers, truth values, lists, objects and bytes"
        ) from fault
    if len(written) > MOST_BYTES:
        raise ResultNotJson(
            f"the result has {format_bytes(len(written))}; at most {format_bytes(MOST_BYTES)} is "
            "kept"
        )
    return written


def fault_text(fault: BaseException) -> str:
    """What a fault of foreign code says, in a line without a traceback."""
    return line_of(f"{type(fault).__name__}: {fault}").removesuffix(":")


def line_of(said: str) -> str:
    """A text of foreign code as a short line that UTF-8 can carry."""
    return " ".join(said[: 2 * PHRASE_CHARS].encode("utf-8", "replace").decode().split())[
        :PHRASE_CHARS
    ]


def _plain(value: object) -> Mapping[str, object]:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"b64": b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is no kind of value there")
