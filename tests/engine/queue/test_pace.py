"""The pace of an engine: what it learns of prompts, and what new facts of the model end."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kakeya.engine.queue.pace import Pace
from tests.engine.virtual_rig import VirtualRig

FACTS = VirtualRig(prefill_tokens_per_second=100.0).model.facts


@given(st.floats(0.3, 3.9), st.integers(1, 5000))
def test_a_lasting_change_of_speed_is_learned(slower: float, tokens: int) -> None:
    pace = Pace(FACTS)
    for _ in range(60):
        pace.computed(tokens, pace.prefill_s(0, tokens), slower * tokens / 100)
    assert 0.9 * slower <= pace.prefill_s(0, 100) <= 1.1 * slower


def test_facts_that_say_nothing_of_prompts_leave_what_was_learned_of_them() -> None:
    pace = Pace(FACTS)
    for _ in range(60):
        pace.computed(100, pace.prefill_s(0, 100), 2.0)
    learned_s = pace.prefill_s(0, 100)
    pace.learn(replace(FACTS, batch_rows=1, shares_pieces_from=16))
    assert pace.prefill_s(0, 100) == learned_s
    pace.learn(replace(FACTS, prefill_tokens_per_second=200.0))
    assert pace.prefill_s(0, 100) == 0.5


def test_a_speed_that_no_probe_measured_outlives_a_check_of_the_model() -> None:
    facts = replace(FACTS, prefill_tokens_per_second=0.0)
    pace = Pace(facts)
    pace.computed(100, 0.0, 1.0)
    pace.learn(replace(facts, shares_pieces_from=16))
    assert pace.prefill_s(0, 200) == 2.0


@given(st.floats(0, 10), st.floats(0.05, 2))
def test_the_time_of_rounds_is_learned_within_seconds(first_s: float, lasting_s: float) -> None:
    """Whatever the first one took: the machine paused, or rows only ended in it."""
    pace = Pace(FACTS)
    pace.stepped(first_s)
    for _ in range(max(10, int(5 / lasting_s))):
        pace.stepped(lasting_s)
        pace.stepped(0.0)
    assert 0.9 * lasting_s <= pace.round_s <= 1.1 * lasting_s


def test_before_a_round_was_measured_it_takes_as_long_as_a_step_alone() -> None:
    pace = Pace(FACTS)
    assert pace.round_s == pace.step_s == FACTS.forward_costs_s[1]
