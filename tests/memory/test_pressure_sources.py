"""The pressure that a node and its system tell."""

from __future__ import annotations

import pytest

from kakeya.core import errors
from kakeya.memory.arbiter.arbiter import Arbiter
from kakeya.memory.arbiter.plan import Snapshot
from kakeya.memory.arbiter.policy import PressureLevel, Rung, Tenant
from kakeya.memory.machine.pressure import FootprintPressure
from kakeya.memory.pressure_sources import footprint, read_level
from tests.memory.worlds import MANY, ask


def test_levels_are_known_by_their_names_and_by_those_of_systems() -> None:
    assert read_level("low") is PressureLevel.LOW
    assert read_level("UIApplicationDidReceiveMemoryWarning") is PressureLevel.CRITICAL
    with pytest.raises(errors.InvalidArgument, match="no level of memory pressure"):
        read_level("LOW")


async def test_a_node_presses_when_it_occupies_more_than_its_budget_not_by_one_lease() -> None:
    """An engine may occupy more than its own lease while the budget holds."""

    def ledger(committed: int, unfilled: int) -> Snapshot:
        return Snapshot(
            budget_bytes=1000,
            committed_bytes=committed,
            unfilled_bytes=unfilled,
            free_bytes=0,
            available_bytes=None,
            level=PressureLevel.NOMINAL,
            residents=(),
            tenants=(),
            foreign={},
            waiting=(),
        )

    seen = []
    for figures in [(1000, 400), (1030, 0), (1200, 0)]:
        reading = await FootprintPressure(lambda of=figures: footprint(ledger(*of))).read()  # type: ignore[misc]
        assert reading is not None
        seen.append((reading.level.name, reading.spare_bytes))
    assert seen == [("NOMINAL", 350), ("LOW", -80), ("CRITICAL", -250)]


@pytest.mark.parametrize("at", ["before", "planned", "loading", "bounded", "after"])
async def test_spare_bytes_after_a_load_do_not_depend_on_when_they_were_read(
    at: str,
) -> None:
    """A load counts once, as what is lent or as what is occupied, never as both."""
    arbiter = Arbiter(1000)
    arbiter.report(Tenant(name="pages", rung=Rung.PAGES, held_bytes=0))
    source = FootprintPressure(lambda: footprint(arbiter.snapshot()))

    async def read(now: str) -> None:
        if now == at:
            reading = await source.read()
            assert reading is not None
            spare = reading.spare_bytes
            arbiter.observe(reading.level, 10**6, 0, spare_bytes=spare)

    await read("before")
    wish = ask("text", MANY, 600)
    (plan,) = arbiter.ask(wish, 0)[1].plans
    await read("planned")
    assert arbiter.begin_load(plan, 0)[0]
    await read("loading")
    arbiter.measure(wish.key, 620, 0, unfilled_bytes=620)
    await read("bounded")
    arbiter.loaded(wish.key, 620, 0, unfilled_bytes=400)
    await read("after")
    assert not arbiter.may_grow("pages", 950 - 620 + 1)
    assert arbiter.may_grow("pages", 950 - 620)
