"""Windows of time, and weights where there is want of room."""

from __future__ import annotations

import itertools

import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.generation.retention import BlockClass, Retention, retention_named, weightier


def test_windows_are_five_minutes_an_hour_and_a_day() -> None:
    assert [r.seconds for r in sorted(Retention)] == [300, 300, 3600, 86400]
    assert [r.is_on_disk for r in sorted(Retention)] == [False, True, True, True]
    assert all(Retention)  # `or` stands for what nobody said


@pytest.mark.parametrize("retention", Retention)
def test_a_retention_is_found_by_its_word(retention: Retention) -> None:
    assert retention_named(retention.label) is retention


def test_an_unknown_word_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidArgument, match=r"'forever'.*short, long, extended"):
        retention_named("forever")


def test_system_outweighs_tools_and_users_these_answers_these_speculation() -> None:
    system, tool, user = BlockClass.SYSTEM, BlockClass.TOOL, BlockClass.USER
    assert system.weight > tool.weight == user.weight > BlockClass.ASSISTANT.weight
    assert BlockClass.ASSISTANT.weight > BlockClass.SPECULATIVE.weight > 0


def test_the_weightier_of_two_is_the_same_in_any_order_but_for_equals() -> None:
    for one, other in itertools.product(BlockClass, repeat=2):
        assert weightier(one, other).weight == max(one.weight, other.weight)
    assert weightier(BlockClass.TOOL, BlockClass.USER) is BlockClass.TOOL
