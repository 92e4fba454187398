"""Models that were in memory at panics: who is blamed, and what follows."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kakeya.memory.machine.panics import KEEP_S, REPEATED_S, Incident
from kakeya.memory.machine.suspects import (
    STAYS,
    LoadStep,
    Stay,
    StayFile,
    begun,
    ended,
    load_step,
    refusal,
    series_of,
    worth_keeping,
)

HOUR_S = 3600.0
NOW = 1_700_000_000.0


def step_after(*panics_h: float, stays: tuple[Stay, ...] = (Stay("big", 0.0),)) -> LoadStep:
    """The step of `big` after panics so many hours ago."""
    incidents = [Incident(NOW - hours * HOUR_S, "it panicked") for hours in sorted(panics_h)]
    return load_step(series_of("big", stays, incidents), is_allowed=False)


def test_each_panic_within_a_day_of_the_last_one_is_a_step() -> None:
    assert step_after() is LoadStep.USUAL
    assert step_after(1) is LoadStep.USUAL, "the node's profile is careful"
    assert step_after(1, 20) is LoadStep.LEAST
    assert step_after(1, 20, 40) is LoadStep.REFUSED
    assert step_after(1, 2, 3, 4, 5) is LoadStep.REFUSED
    assert step_after(1, 26) is LoadStep.USUAL, "more than a day apart"
    assert step_after(100, 120) is LoadStep.LEAST, "days without a panic were days of care"


def test_a_model_that_was_not_in_memory_is_not_blamed() -> None:
    left = (Stay("big", NOW - 30 * HOUR_S, NOW - 10 * HOUR_S), Stay("small", NOW - 30 * HOUR_S))
    assert step_after(1, 2, stays=left) is LoadStep.USUAL
    assert step_after(11, 12, stays=left) is LoadStep.LEAST


def test_an_allowed_model_is_loaded_with_the_least() -> None:
    series = [Incident(NOW, "it panicked")] * 5
    assert load_step(series, is_allowed=True) is LoadStep.LEAST
    assert load_step(series[:1], is_allowed=True) is LoadStep.USUAL


def test_a_refusal_names_the_panic_the_setting_and_the_end() -> None:
    told = refusal("big", [Incident(NOW, "the kernel panicked: zone")] * 3)
    assert "3 times" in told
    assert "the kernel panicked: zone" in told
    assert "memory.after_panics" in told


def test_an_open_stay_ends_with_the_next_begin_of_its_model() -> None:
    stays = begun((), "big", 10.0)
    stays = begun(stays, "small", 15.0)
    stays = begun(stays, "big", 20.0)
    assert stays == (Stay("big", 10.0, 20.0), Stay("small", 15.0), Stay("big", 20.0))
    assert ended(stays, "big", 30.0)[-1] == Stay("big", 20.0, 30.0)


TIMES = st.floats(NOW - 2 * KEEP_S, NOW)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), TIMES, st.floats(0, KEEP_S)), max_size=12),
    st.lists(TIMES, max_size=8),
)
def test_forgotten_stays_change_no_step(
    spans: list[tuple[str, float, float]], panics: list[float]
) -> None:
    stays = [Stay(name, begin, begin + size) for name, begin, size in spans]
    incidents = [Incident(at, "it panicked") for at in sorted(panics, reverse=True)]
    kept = worth_keeping(stays, incidents, NOW)
    for name in "ab":
        assert series_of(name, kept, incidents) == series_of(name, stays, incidents)


@given(st.lists(st.floats(0, REPEATED_S / HOUR_S - 0.1), min_size=1, max_size=6))
def test_no_series_of_panics_loads_a_model_the_same_way_three_times(gaps_h: list[float]) -> None:
    steps, at = [], 0.0
    for gap in gaps_h:
        at += gap
        steps.append(step_after(*(at - one for one in _sums(gaps_h) if one <= at)))
    assert steps == sorted(steps)
    assert steps[2:] == [LoadStep.REFUSED] * len(steps[2:])


def _sums(gaps: list[float]) -> list[float]:
    return [sum(gaps[: at + 1]) for at in range(len(gaps))]


def test_stays_outlive_the_node(tmp_path: Path) -> None:
    file = StayFile(tmp_path)
    file.begin("big", 10.0)
    file.begin("small", 11.0)
    file.end("small", 12.0)
    again = StayFile(tmp_path)
    assert again.stays == (Stay("big", 10.0), Stay("small", 11.0, 12.0))
    again.tidy((), 12.0 + REPEATED_S)
    assert StayFile(tmp_path).stays == (Stay("big", 10.0),)


@pytest.mark.parametrize("text", ["", "[1]", '[["a"]]', '{"a": 1}', "[" * 9999, '[["a", "b", 1]]'])
def test_a_damaged_file_blames_no_model(tmp_path: Path, text: str) -> None:
    (tmp_path / STAYS).write_text(text)
    assert StayFile(tmp_path).stays == ()
