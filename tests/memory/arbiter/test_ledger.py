"""What tenants promise and what counts of it: never more than they can still give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.memory.arbiter.ledger import Ledger
from kakeya.memory.arbiter.policy import Rung, ShrinkTenant, Tenant
from kakeya.memory.arbiter.resident import Resident, State
from tests.memory.worlds import MANY, key


def pages(held: int, spare: int) -> Tenant:
    return Tenant(name="pages", rung=Rung.PAGES, held_bytes=held, spare_bytes=spare)


def promised(held: int, spare: int, size: int) -> Ledger:
    """A ledger of 100 bytes whose tenant was told to give up `size`."""
    ledger = Ledger(100, available_bytes=50)
    ledger.report(pages(held, spare))
    ledger.promise([ShrinkTenant("pages", size)])
    return ledger


def test_what_a_tenant_gave_before_it_is_done_counts_once() -> None:
    """It gives slab by slab, and is asked what it holds meanwhile."""
    ledger = promised(30, 30, 20)
    assert (ledger.committed_bytes, ledger.free_bytes) == (10, 70)
    ledger.report(pages(15, 15))
    assert (ledger.committed_bytes, ledger.free_bytes) == (10, 70)
    assert ledger.has_promises
    ledger.shrunk(ShrinkTenant("pages", 20), pages(10, 10))
    assert (ledger.committed_bytes, ledger.free_bytes) == (10, 70)
    assert not ledger.has_promises
    assert ledger.tenants == (pages(10, 10),), "it did what it was told, so its offer counts"


def test_one_that_gives_less_offers_nothing_while_it_holds_as_much() -> None:
    ledger = promised(30, 30, 20)
    ledger.report(pages(25, 25))
    ledger.shrunk(ShrinkTenant("pages", 20), pages(20, 20))
    assert ledger.tenants == (pages(20, 0),)
    ledger.report(pages(19, 19))
    assert ledger.tenants == (pages(19, 19),)


def test_what_it_cannot_give_any_more_is_not_counted_on() -> None:
    ledger = promised(30, 30, 20)
    ledger.report(pages(30, 5))
    assert ledger.committed_bytes == 25
    assert ledger.free_bytes == 55, "of what the machine has too"


def test_what_others_lease_and_do_not_use_yet_is_theirs() -> None:
    """The machine shows it as available."""
    ledger = Ledger(100, available_bytes=70)
    ledger.hold("training", 60, 50)
    assert (ledger.committed_bytes, ledger.free_bytes, ledger.unfilled_bytes) == (60, 20, 50)
    ledger.hold("training", 60)
    assert ledger.free_bytes == 40
    ledger.hold("training", 0)
    assert (ledger.committed_bytes, ledger.free_bytes, ledger.foreign) == (0, 70, {})
    for size, unfilled in ((-1, 0), (5, 6), (5, -1)):
        with pytest.raises(InvalidArgument, match="no more than all"):
            ledger.hold("training", size, unfilled)


@given(
    held=st.integers(0, 60),
    asked=st.integers(0, 60),
    reports=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=4),
    grown=st.integers(0, 40),
)
def test_growing_by_what_was_reserved_changes_nothing_whatever_it_was_told_to_give(
    held: int, asked: int, reports: list[tuple[int, int]], grown: int
) -> None:
    ledger = promised(held, held, min(asked, held))
    now = pages(held, held)
    for size, spare in reports:
        now = pages(size, min(size, spare))
        ledger.report(now)
        assert 0 <= ledger.promised_bytes <= now.spare_bytes
    ledger.grow("pages", grown)
    before = ledger.committed_bytes
    ledger.report(pages(now.held_bytes + grown, now.spare_bytes))
    assert ledger.committed_bytes == before


def loading(ledger: Ledger, name: str, size: int) -> Resident:
    absent = Resident(key=key(name), role=MANY, state=State.ABSENT, estimate_bytes=size)
    ledger.put(absent.moved(State.LOADING))
    return ledger.get(key(name))


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    steps=st.lists(st.integers(0, 100), max_size=5),
    more=st.lists(st.none() | st.integers(0, 30), min_size=3, max_size=3),
)
def test_a_load_is_counted_once_however_much_of_it_the_machine_shows(
    sizes: list[int], steps: list[int], more: list[int | None]
) -> None:
    """While it goes on it counts as it was estimated, afterwards as it was measured, if it was."""
    ledger = Ledger(1000, available_bytes=500)
    loads = [loading(ledger, f"m:{number}", size) for number, size in enumerate(sizes)]
    for percent in (*sorted(steps), 100):
        assert ledger.free_bytes == 500 - sum(sizes)
        ledger.observe(500 - sum(size * percent // 100 for size in sizes), None)
    for load, beyond in zip(loads, more, strict=False):
        if beyond is not None:
            load = ledger.measured(load, load.bytes + beyond)
        ledger.put(load.moved(State.READY))
        assert ledger.free_bytes == 500 - sum(one.bytes for one in ledger.residents)


def test_what_a_load_takes_beyond_its_estimate_is_taken_from_what_is_free() -> None:
    ledger = Ledger(1000, available_bytes=500)
    load = loading(ledger, "m", 100)
    ledger.observe(350, None)
    assert ledger.free_bytes == 350
    ledger.put(ledger.measured(load, 150, 20).moved(State.READY))
    assert (ledger.available_bytes, ledger.free_bytes) == (320, 300)


def test_a_partial_reading_raises_no_figure_and_never_frees_the_whole_budget() -> None:
    ledger = Ledger(budget_bytes=1000)
    ledger.observe(None, 0, is_partial=True)
    assert ledger.free_bytes == 1000  # the machine was never measured
    ledger.observe(300, 200)
    assert (ledger.free_bytes, ledger.spare_bytes) == (300, 200)
    ledger.observe(None, 0, is_partial=True)
    assert (ledger.free_bytes, ledger.spare_bytes) == (300, 0)
    ledger.observe(900, 0, is_partial=True)
    assert (ledger.free_bytes, ledger.spare_bytes) == (300, 0)
    ledger.observe(0, 0, is_partial=True)
    assert ledger.free_bytes == 0
    ledger.observe(500, 400)
    assert (ledger.free_bytes, ledger.spare_bytes) == (500, 400)
