"""Those that run outgrow what there is: who makes place lies in pages, and nothing is computed
again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import MemoryRefused
from kakeya.core.units import KV_BLOCK_TOKENS
from tests.engine.kv_rig import Lender, Prefixes
from tests.engine.virtual_rig import STEP_S, TOKEN_S, Told, VirtualRig, expected

BLOCK = KV_BLOCK_TOKENS


@pytest.fixture
def free(pages: Prefixes) -> Iterator[None]:
    before = pages.arena.pool.free_pages
    yield
    assert pages.arena.pool.free_pages == before


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * at) % 100 for at in range(length)]


def keeps_to(rig: VirtualRig) -> None:
    """Each forward begins within the bound."""
    room = rig.scheduler.limits.room

    def check() -> None:
        assert room.lent_bytes + room.parked_bytes <= rig.slots.budget_bytes

    rig.check = check


def equals(rig: VirtualRig, **more: object) -> list[Told]:
    """Three of a kind whose answers are longer than what is set aside for them."""
    return [
        rig.submit(
            0.01 * at,
            token_ids=prompt(400, at),
            max_tokens=1500,
            client=f"client {at}",
            park_id=at + 1,
            **more,
        )
        for at in range(3)
    ]


@pytest.mark.parametrize("lent_after_s", [0.001, 0.1])
def test_of_equals_that_outgrow_the_bound_nothing_is_computed_again(pages, free, lent_after_s):
    rig = VirtualRig(kv_bytes=10 * BLOCK)
    lender = Lender(rig, pages, lambda told: lent_after_s)
    keeps_to(rig)
    told = equals(rig)
    rig.run()
    lender.end()
    for one in told:
        assert one.tokens == expected(one.job.token_ids, 1500)
    assert lender.asked
    assert rig.model.prefilled == 3 * 399
    # Each waited for the others, who ran all the time but for the moments until pages were there.
    assert rig.now_s <= 3 * (399 * TOKEN_S + 1500 * STEP_S) + len(lender.asked) * (
        lent_after_s + 0.05
    )


def test_without_pages_the_youngest_is_told_that_it_can_go_on(pages, free):
    rig = VirtualRig(kv_bytes=10 * BLOCK)
    Lender(rig, pages, lambda told: None)
    keeps_to(rig)
    told = equals(rig)
    rig.run()
    assert told[0].tokens == expected(told[0].job.token_ids, 1500)
    assert isinstance(told[2].error, MemoryRefused)
    assert told[2].error.retry_after_s is not None
    assert 0 < len(told[2].tokens) < 1500
    assert rig.model.prefilled == 3 * 399


@pytest.mark.parametrize("lends", [True, False])
def test_what_is_parked_goes_for_those_that_grow_and_comes_back(pages, free, lends):
    """It made place for an urgent one, whose answer became longer than most."""
    rig = VirtualRig(places=1, kv_bytes=8 * BLOCK)
    lender = Lender(rig, pages, lambda told: 0.001 if lends else None)
    keeps_to(rig)
    batch = rig.submit(
        token_ids=prompt(500), max_tokens=300, priority=4, park_id=1, retries=0 if lends else 1
    )
    urgent = rig.submit(0.8, token_ids=prompt(500, 9), max_tokens=1400, priority=0, park_id=2)
    rig.run()
    lender.end()
    assert lender.asked == [1]
    assert urgent.tokens == expected(urgent.job.token_ids, 1400)
    assert batch.tokens == expected(batch.job.token_ids, 300)
    assert (rig.model.prefilled == 2 * 499) == lends


@pytest.mark.parametrize("lends", [True, False])
def test_what_is_parked_goes_for_room_last_first_and_is_made_again_only_without_pages(
    pages, free, lends
):
    rig = VirtualRig(places=3, kv_bytes=8 * BLOCK)
    lender = Lender(rig, pages, lambda told: 0.001 if lends else None)
    parked = [
        rig.submit(
            token_ids=prompt(500, at), max_tokens=300, priority=4, park_id=at, retries=3 - 3 * lends
        )
        for at in (1, 2)
    ]
    urgent = rig.submit(1.2, token_ids=prompt(1500, 9), max_tokens=200, priority=0, park_id=3)
    rig.run()
    lender.end()
    assert urgent.tokens == expected(urgent.job.token_ids, 200)
    assert lender.asked == [1, 2]
    assert (rig.model.prefilled == 2 * 499 + 1499) == lends
    for told in parked:
        assert told.tokens == expected(told.job.token_ids, 300)


def test_what_outgrows_the_memory_limit_lies_in_pages_too(pages, free):
    rig = VirtualRig(memory_bytes=2000)
    lender = Lender(rig, pages)
    most = []
    rig.check = lambda: most.append(rig.model.memory().active_bytes)
    told = equals(rig)
    rig.run()
    lender.end()
    for one in told:
        assert one.tokens == expected(one.job.token_ids, 1500)
    assert rig.model.prefilled == 3 * 399
    assert 1900 < max(most) <= 2000


def test_what_the_agent_wants_back_goes_when_its_pages_are_there(pages, free):
    rig = VirtualRig(places=1)
    lender = Lender(rig, pages, lambda told: 0.1)
    limits = rig.scheduler.limits
    batch = rig.submit(token_ids=prompt(300), max_tokens=200, priority=4, park_id=1)
    urgent = rig.submit(0.5, token_ids=prompt(300, 9), max_tokens=200, priority=0, park_id=2)
    held = []

    def shrink() -> None:
        rig.scheduler.call(lambda: limits.shrink(1))
        rig.scheduler.call(lambda: held.append((rig.now_s, limits.room.parked_bytes)))
        rig.scheduler.settled().add_done_callback(
            lambda _: held.append((rig.now_s, limits.room.parked_bytes))
        )

    rig.at(0.9, shrink)
    rig.run()
    lender.end()
    assert [size for _, size in held] == [2 * BLOCK, 0]
    assert held[1][0] == pytest.approx(held[0][0] + 0.1, abs=2 * STEP_S)
    # Nobody waited for that.
    assert max(urgent.gaps_s) <= 2 * STEP_S + 1e-9
    assert rig.model.prefilled == 2 * 299
    for one in (batch, urgent):
        assert one.tokens == expected(one.job.token_ids, 200)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=2, max_size=5),
    more=st.lists(st.integers(1, 1500), min_size=5, max_size=5),
    priorities=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    blocks=st.integers(10, 14),
    lent_after_s=st.sampled_from([0.001, 0.02, 0.2]),
)
def test_as_long_as_pages_come_in_time_no_token_is_computed_twice(
    pages, lengths, more, priorities, blocks, lent_after_s
):
    rig = VirtualRig(places=3, kv_bytes=blocks * BLOCK)
    lender = Lender(rig, pages, lambda told: lent_after_s)
    keeps_to(rig)
    told = [
        rig.submit(
            0.1 * at, token_ids=prompt(length, at), max_tokens=size, priority=priority, park_id=at
        )
        for at, (length, size, priority) in enumerate(
            zip(lengths, more, priorities, strict=False), 1
        )
    ]
    rig.run()
    lender.end()
    for one in told:
        assert one.tokens == expected(one.job.token_ids, one.job.max_tokens)
    assert rig.model.prefilled == sum(length - 1 for length in lengths)
