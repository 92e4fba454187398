"""How much a law is tried: all cases and seeds by scripts/soak, a part before each commit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

_PART = 18
_TRIES_ALL = os.environ.get("KAKEYA_ALL_CASES") == "1"


def law(cases: int, part: int = _PART) -> Callable[[Any], Any]:
    """Mark a property that takes so many cases to be sure of: `@given(...)`, then `@law(3600)`.

    One in `part` of them is tried before each commit.
    """

    def mark(test: Any) -> Any:
        return pytest.mark.law(settings(max_examples=_tried(cases, part), deadline=None)(test))

    return mark


def laws_of(machine: type[RuleBasedStateMachine], cases: int, part: int, steps: int = 40) -> Any:
    """The test of a state machine: so many random runs of so many steps.

    One in `part` of them is tried before each commit.
    """
    test = machine.TestCase
    test.settings = settings(
        max_examples=_tried(cases, part), stateful_step_count=steps, deadline=None
    )
    return pytest.mark.law(test)


def _tried(cases: int, part: int) -> int:
    return cases if _TRIES_ALL else cases // part


def seeds(count: int, *, first: int) -> list[Any]:
    """Parameters 0 to count - 1; those after the first so many are slow."""
    later = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(first, count))
    return [*range(first), *later]
