"""Free ranges: nothing lost, nothing twice, neighbours one, the fit that was asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.memory.pages.content import Fit
from kakeya.memory.pages.extents import Extents

SLAB, SLABS = 16, 3


def fresh(fit: Fit = Fit.BEST) -> Extents:
    extents = Extents(slab_pages=SLAB, fit=fit)
    for slab in range(SLABS):
        extents.give(slab * SLAB, SLAB)
    return extents


@given(
    st.sampled_from(Fit),
    st.lists(st.tuples(st.booleans(), st.integers(1, SLAB), st.integers(0, 99)), max_size=60),
)
def test_what_is_taken_and_given_is_conserved(fit: Fit, steps: list[tuple[bool, int, int]]) -> None:
    extents = fresh(fit)
    taken: list[tuple[int, int]] = []
    for is_take, size, which in steps:
        free = extents.ranges()
        if is_take:
            start = extents.take(size)
            fitting = [found for found in free if found[1] >= size]
            if start is None:
                assert not fitting
                continue
            chosen = next(found for found in free if found[0] == start)
            if fit is Fit.BEST:
                assert chosen[1] == min(length for _, length in fitting)
            else:
                assert chosen == fitting[0]
            taken.append((start, size))
        elif taken:
            extents.give(*taken.pop(which % len(taken)))
        check(extents, taken)


def check(extents: Extents, taken: list[tuple[int, int]]) -> None:
    pages = [p for start, size in (*taken, *extents.ranges()) for p in range(start, start + size)]
    assert sorted(pages) == list(range(SLAB * SLABS))
    assert extents.pages == sum(size for _, size in extents.ranges())
    assert extents.largest() == max((size for _, size in extents.ranges()), default=0)
    ends = {start + size for start, size in extents.ranges()}
    for start, size in extents.ranges():
        assert start // SLAB == (start + size - 1) // SLAB, "a range crosses a slab"
        assert start % SLAB == 0 or start not in ends, "two neighbours are not merged"
        assert extents.size_at(start) == size


def test_a_gap_that_closes_becomes_one_range_with_both_sides() -> None:
    extents = Extents(slab_pages=9, fit=Fit.BEST)
    for start in (0, 6, 3):
        extents.give(start, 3)
    assert extents.ranges() == ((0, 9),)


def test_best_fit_leaves_the_large_range_whole_where_first_fit_cuts_it() -> None:
    for fit, start in ((Fit.BEST, 8), (Fit.FIRST, 0)):
        extents = Extents(slab_pages=16, fit=fit)
        extents.give(0, 6)
        extents.give(8, 3)
        assert extents.take(3) == start


def test_the_smallest_range_is_taken_whole_or_cut_to_the_limit() -> None:
    extents = Extents(slab_pages=16, fit=Fit.BEST)
    extents.give(0, 6)
    extents.give(8, 3)
    assert extents.take_smallest(4) == (8, 3)
    assert extents.take_smallest(4) == (0, 4)
    assert extents.ranges() == ((4, 2),)
    assert extents.take_smallest(4) == (4, 2)
    assert extents.take_smallest(4) is None
