"""The rules of a job's life."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core import errors
from kakeya.dispatch import job as rules
from kakeya.dispatch.job import (
    Job,
    JobState,
    ResultNotJson,
    check_room,
    interrupted,
    json_bytes,
    may_try_again,
    outdated,
)


def a_job(**changes: object) -> Job:
    plain = Job(job_id="job_1", kind="image", owner="ann", request=b"{}", created_at=1.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
).filter(lambda value: "Infinity" not in json.dumps(value))


@given(JSON)
def test_a_result_of_json_comes_back_as_it_was(value: object) -> None:
    assert json.loads(json_bytes(value)) == value


def test_bytes_become_base64_and_other_things_an_error() -> None:
    told = json_bytes({"image": b"\xff\x00", "rows": (1, bytearray(b"a"))})
    assert json.loads(told) == {"image": {"b64": "/wA="}, "rows": [1, {"b64": "YQ=="}]}
    circle: list[object] = []
    circle.append(circle)
    for wrong in (object(), {1, 2}, float("nan"), {(1, 2): 3}, circle):
        with pytest.raises(ResultNotJson, match="cannot be written as JSON"):
            json_bytes(wrong)


def test_a_result_beyond_all_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_BYTES", 10)
    with pytest.raises(ResultNotJson, match="at most 10 B is kept"):
        json_bytes("x" * 20)


@pytest.mark.parametrize(
    ("error", "again", "again_if_repeatable"),
    [
        (errors.QueueFull("full"), True, True),
        (errors.MemoryRefused("now", retry_after_s=3), True, True),
        (errors.MemoryRefused("never"), False, False),
        (errors.LoadFailed("broken"), False, True),
        (errors.PeerUnavailable("gone"), False, True),
        (errors.ModelLoading("loading"), False, True),
        (errors.DeadlineExceeded("late"), False, False),
        (errors.InvalidArgument("wrong"), False, False),
        (errors.NotFound("nothing"), False, False),
    ],
)
def test_passing_errors_fail_no_job(
    error: errors.KakeyaError, again: bool, again_if_repeatable: bool
) -> None:
    assert may_try_again(error, 0.0, may_repeat=False) is again
    assert may_try_again(error, 0.0, may_repeat=True) is again_if_repeatable
    # Behind others a job waits as long as they take.
    is_behind = isinstance(error, errors.QueueFull)
    assert may_try_again(error, rules.PATIENCE_S, may_repeat=True) is is_behind


@given(crashes=st.integers(0, 9), may_repeat=st.booleans(), is_crash=st.booleans())
def test_an_interrupted_job_begins_again_or_fails_with_a_sentence(
    crashes: int, may_repeat: bool, is_crash: bool
) -> None:
    job = a_job(state=JobState.RUNNING, crashes=crashes, may_repeat=may_repeat)
    after = interrupted(job, 9.0, is_crash=is_crash)
    begins_again = may_repeat and crashes + is_crash < rules.MOST_CRASHES
    assert after.state is (JobState.QUEUED if begins_again else JobState.FAILED)
    assert (after.error is None) is begins_again
    assert after.crashes == crashes + is_crash


@given(st.lists(st.tuples(st.floats(0, 2e5), st.integers(0, rules.MOST_BYTES)), max_size=8))
def test_what_is_kept_of_ended_jobs_is_bounded_and_the_newest(
    ends: list[tuple[float, int]],
) -> None:
    now = 2e5
    sizes = {str(at): size for at, (_, size) in enumerate(ends)}
    jobs = [
        _Sized(job_id=str(at), kind="image", owner="", request=b"", created_at=0.0, ended_at=end)
        for at, (end, _) in enumerate(ends)
    ]
    for job in jobs:
        _Sized.sizes[job.job_id] = sizes[job.job_id]
    gone = {job.job_id for job in outdated(jobs, now)}
    kept = [job for job in jobs if job.job_id not in gone]
    assert sum(sizes[job.job_id] for job in kept) <= rules.MOST_BYTES
    assert all(now - job.ended_at < rules.KEEP_S for job in kept)
    oldest = min((job.ended_at for job in kept), default=now)
    for job in jobs:
        if job.job_id in gone and now - job.ended_at < rules.KEEP_S:
            assert job.ended_at <= oldest


class _Sized(Job):
    sizes: dict[str, int] = {}  # noqa: RUF012 - of this test alone

    @property
    def size_bytes(self) -> int:
        return self.sizes[self.job_id]


def test_room_for_waiting_jobs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_WAITING", 3)
    monkeypatch.setattr(rules, "MOST_WAITING_OF_OWNER", 2)
    monkeypatch.setattr(rules, "MOST_BYTES", 10)
    one, other = a_job(), a_job(owner="bob")
    check_room(one, [one, other])
    for others in ([one, one], [one, other, other], [a_job(owner="bob", request=b" " * 9)]):
        with pytest.raises(errors.QueueFull, match="submit it later"):
            check_room(one, others)
