"""Engines that come and go leave nothing behind in the agent."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.leak_drill import Sample, drill, slope_kb


def of(rss_kb: int) -> Sample:
    return Sample(rss_kb=rss_kb, files=9, tasks=1, threads=2, shm=0, children=0)


@given(st.integers(4, 200), st.integers(-50, 50), st.integers(0, 10**6))
def test_the_slope_is_that_of_the_second_half(count: int, per_cycle: int, base: int) -> None:
    rng = random.Random(count)
    first = [of(base + rng.randrange(10**6)) for _ in range(count)]
    second = [of(base + 10**6 + per_cycle * at) for at in range(count)]
    assert abs(slope_kb([*first, *second]) - per_cycle) < 1e-6


@pytest.mark.slow
async def test_twenty_real_engines_leave_no_file_task_child_or_shared_memory() -> None:
    samples = await drill(20, together=4)
    warm, last = samples[1], samples[-1]
    assert (last.tasks, last.children) == (warm.tasks, warm.children)
    # A leak would be one an engine, 16 since the warm sample; gRPC's pollers and the loop's thread
    # pool come to their size at different times.
    assert last.files - warm.files < 8
    assert last.threads - warm.threads < 8
    assert last.shm - warm.shm < 8
