"""Batches: each text once, within the bound, and no job kept from its turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.engine.embedding.batches import EmbedJob, EmbedQueue, Waiting

JOBS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=12), min_size=1, max_size=6)


def queue_of(lengths: list[list[int]], batch_tokens: int) -> tuple[EmbedQueue, list[EmbedJob]]:
    queue = EmbedQueue(batch_tokens)
    jobs = [EmbedJob([[1] * length for length in job], 0) for job in lengths]
    for job in jobs:
        queue.add(job)
    return queue, jobs


def drained(queue: EmbedQueue) -> list[list[Waiting]]:
    batches = []
    while batch := queue.next_batch():
        batches.append(batch)
    return batches


@given(lengths=JOBS, batch_tokens=st.integers(1, 200))
def test_each_text_is_in_one_batch_and_batches_keep_their_bound(
    lengths: list[list[int]], batch_tokens: int
) -> None:
    queue, jobs = queue_of(lengths, batch_tokens)
    batches = drained(queue)
    seen = [(id(one.job), one.at) for batch in batches for one in batch]
    assert len(seen) == len(set(seen)) == sum(map(len, lengths))
    assert not len(queue)
    assert not queue.jobs
    for batch in batches:
        padded = batch[0].tokens * len(batch)
        assert len(batch) == 1 or padded <= batch_tokens
        assert all(one.tokens <= batch[0].tokens for one in batch)
    assert all(job.waiting == 0 for job in jobs)


@given(lengths=JOBS, batch_tokens=st.integers(1, 200))
def test_a_job_of_one_text_waits_for_no_more_batches_than_there_are_jobs(
    lengths: list[list[int]], batch_tokens: int
) -> None:
    queue, jobs = queue_of([*lengths, [7]], batch_tokens)
    within = [one.job for batch in drained(queue)[: len(jobs)] for one in batch]
    assert jobs[-1] in within


def test_texts_of_several_jobs_share_a_batch() -> None:
    queue, jobs = queue_of([[10, 3], [9], [50]], 30)
    assert [[one.tokens for one in batch] for batch in drained(queue)] == [[10, 9, 3], [50]]
    assert len(jobs) == 3


def test_a_cancelled_job_leaves_and_a_job_is_done_with_its_last_vector() -> None:
    queue, (first, second) = queue_of([[5, 5], [5]], 5)
    assert first.done.cancel()
    queue.drop_ended()
    (batch,) = drained(queue)
    assert [one.job for one in batch] == [second]
    first.give(0, b"late")
    first.give(1, b"late")
    second.give(0, b"v")
    assert second.done.result(0) == [b"v"]
    second.fail(ValueError("too late to matter"))
    assert second.done.result(0) == [b"v"]
