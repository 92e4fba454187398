"""Requests in line for memory are told when their answers begin, in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.virtual_time import run_virtual
from benchmarks.virtual_waits import World, measure
from benchmarks.wait_estimates import WITHIN


@pytest.mark.parametrize(
    ("clients", "rooms"), [pytest.param(16, 1, marks=pytest.mark.slow), (16, 2)]
)
def test_most_of_many_waits_are_told_well(clients: int, rooms: int) -> None:
    """Of models in turn on a budget for one or two; the first waits have no past to go by."""

    async def run() -> list[tuple[float, float]]:
        world = World(seed=1, rooms=rooms, answers=(50, 400), mean_tokens=600.0)
        await measure(world, clients, 100)
        return world.pairs[40:]

    pairs = run_virtual(run())
    near = [abs(told - took) <= WITHIN * took for told, took in pairs]
    assert sum(near) >= 0.8 * len(near)
