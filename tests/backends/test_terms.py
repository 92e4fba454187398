"""The terms of generations in the arbiter's queue."""

from __future__ import annotations

from itertools import pairwise

from kakeya.backends.terms import decode_terms
from kakeya.generation.caller import PRIORITIES
from kakeya.generation.request import DecodeRequest


def test_each_priority_has_a_class_of_its_own_in_the_same_order() -> None:
    ranks = [
        decode_terms(DecodeRequest(token_ids=[1], max_tokens=1, priority=one)).priority.rank
        for one in sorted(PRIORITIES.values())
    ]
    assert len(ranks) == 5
    assert all(earlier < later for earlier, later in pairwise(ranks))
