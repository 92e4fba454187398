"""Medians, goals and lines of a bench."""

from __future__ import annotations

from kakeya.cli.bench.measure import BenchSamples
from kakeya.cli.bench.report import compared, goals, lines, summary


def report(decode: float, first_s: float) -> dict[str, object]:
    samples = BenchSamples()
    for value in (decode, 2 * decode, 9 * decode):
        samples.add("decode_plain", value)
    samples.add("first_long", first_s)
    samples.add("first_warm", first_s / 40)
    samples.add("decode_equal", 0.0)
    results = summary(samples)
    return {
        "kakeya": "1",
        "made_at": "2026-01-02T03:04:05Z",
        "machine": {"platform": "toy"},
        "model": {"id": "toy", "quantization": "4-bit", "device": "gpu"},
        "settings": {"clients": 4},
        "results": results,
        "verify_ms": {"1": 25.0, "8": 50.0},
        "links": [],
        "goals": goals(results, {"1": 25.0}),
        "spoilt": {},
        "is_complete": True,
    }


def test_goals_are_ratios_of_medians() -> None:
    told = {goal["what"]: (goal["ratio"], goal["aim"]) for goal in report(20.0, 0.8)["goals"]}
    assert told == {
        "HTTP / engine's own step": (1.0, 0.98),
        "first token, cold / warm": (40.0, 20.0),
    }


def test_a_goal_that_is_missed_and_an_answer_that_drafts_changed_are_told() -> None:
    told = "\n".join(lines(report(10.0, 0.8)))
    assert "HTTP / engine's own step     0.50, at least 0.98: missed" in told
    assert "first token, cold / warm    40.00, at least 20: met" in told
    assert "drafts changed an answer (decode)" in told
    assert "L=8 50.0 ms (x2.00)" in told


def test_of_two_reports_more_is_faster_and_sooner_is_faster() -> None:
    told = list(compared(report(10.0, 0.8), report(30.0, 0.4)))
    assert any(line.endswith("tokens/s  x 3.00") for line in told)
    assert any(line.endswith("ms        x 2.00") for line in told)
