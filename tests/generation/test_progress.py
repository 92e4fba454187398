"""How far a load is, as a line of its engine and as words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.generation.progress import LINE_EVERY_S, LoadPhase, LoadProgress, LoadTeller

SIZES = st.integers(0, 1 << 50)


@given(st.sampled_from(LoadPhase), SIZES, SIZES)
def test_a_line_reads_back(phase: LoadPhase, done: int, total: int) -> None:
    progress = LoadProgress(phase=phase, done_bytes=done, total_bytes=total)
    assert LoadProgress.from_line(progress.line()) == progress
    assert progress.line().strip() == progress.line()


@pytest.mark.parametrize("line", ["", "weights loaded", "@kakeya-load", "@kakeya-load READ 1 x"])
def test_another_line_is_none(line: str) -> None:
    assert LoadProgress.from_line(line) is None


def test_people_hear_the_share_that_was_read_or_the_phase() -> None:
    reading = LoadProgress(phase=LoadPhase.READ, done_bytes=41, total_bytes=100)
    assert reading.describe() == "41 %"
    assert LoadProgress(phase=LoadPhase.CHECK).describe() == "checking it"


def test_each_phase_is_said_at_once_and_its_progress_now_and_then() -> None:
    said: list[str] = []
    now_s = 0.0
    teller = LoadTeller(said.append, lambda: now_s)
    for done in range(5):
        teller(LoadPhase.READ, done, 5)
    teller(LoadPhase.CHECK)
    assert [line.split()[1] for line in said] == ["READ", "CHECK"]
    now_s = LINE_EVERY_S
    teller(LoadPhase.CHECK)
    assert len(said) == 3
