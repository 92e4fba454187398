"""Which blocks make way for a range, and when blocks are evicted ahead of need."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.memory.pages.pins import Block
from kakeya.memory.pages.windows import Watermarks, WindowSegment, cheapest_window


def segment(number: int, pages: int, cost: float | None) -> WindowSegment:
    if cost is None:
        return WindowSegment(pages=pages)
    return WindowSegment(pages=pages, block=Block(number, pages, number + 1), cost=cost)


costs = st.one_of(st.none(), st.just(math.inf), st.floats(0, 1))
layouts = st.lists(st.tuples(st.integers(1, 6), costs), max_size=12)


@given(layouts, st.integers(1, 20))
def test_the_window_is_the_cheapest_of_all(
    layout: list[tuple[int, float | None]], pages: int
) -> None:
    segments = [segment(i, size, cost) for i, (size, cost) in enumerate(layout)]
    prices = [
        sum(s.cost for s in segments[begin : end + 1])
        for begin in range(len(segments))
        for end in range(begin, len(segments))
        if sum(s.pages for s in segments[begin : end + 1]) >= pages
    ]
    cheapest = min(prices, default=math.inf)
    found = cheapest_window(segments, pages)
    if math.isinf(cheapest):
        assert found is None
        return
    assert found is not None
    assert found.cost == pytest.approx(cheapest, abs=1e-9)
    assert sum(s.cost for s in segments if s.block in found.blocks) == pytest.approx(
        cheapest, abs=1e-9
    )


def test_nothing_is_evicted_where_the_free_ranges_suffice() -> None:
    window = cheapest_window([segment(0, 2, 0.3), segment(1, 4, None)], 4)
    assert window is not None
    assert window.blocks == ()


def test_eviction_starts_at_90_percent_ends_at_80_and_waits_for_90() -> None:
    marks = Watermarks(high=0.9, low=0.8)
    loads = [85, 89, 90, 85, 81, 80, 85, 89, 90]
    states = [marks.wanted_pages(load, 100) > 0 for load in loads]
    assert states == [False, False, True, True, True, False, False, False, True]


def test_the_fuller_the_pool_the_larger_is_the_share_that_is_evicted() -> None:
    marks = Watermarks(high=0.9, low=0.8)
    wanted = [marks.wanted_pages(used, 100) for used in (90, 95, 100)]
    assert wanted == [5, 12, 20]


def test_after_a_rest_eviction_waits_for_the_high_watermark() -> None:
    marks = Watermarks(high=0.9, low=0.8)
    assert marks.wanted_pages(92, 100)
    marks.rest()
    assert [marks.wanted_pages(used, 100) > 0 for used in (89, 90)] == [False, True]


@pytest.mark.parametrize(("used", "total"), [(0, 0), (1, 1), (4, 4)])
def test_a_pool_of_a_few_pages_keeps_them_all(used: int, total: int) -> None:
    """One page of them is more than what lies between the watermarks."""
    assert Watermarks(high=0.9, low=0.8).wanted_pages(used, total) == 0
