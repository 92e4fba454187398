"""What befalls a simulated fleet while it runs: a split, churn, a clock that is set wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks.virtual_fleet import VirtualFleet, VirtualNode

REPAIR_S = 600.0
"""How long a wrongly set clock stays wrong."""
MAX_DOWN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What to inflict; 0 = nothing. `skew_s` is drawn for each node between + and -."""

    partition_s: float = 0.0
    skew_s: float = 0.0
    churn_per_hour: float = 0.0
    jump_s: float = 0.0


async def inflict(fleet: VirtualFleet, faults: Faults, *, seconds: float) -> None:
    """Do to a fleet what is asked within a time; ends when all is done."""
    async with asyncio.TaskGroup() as group:
        if faults.partition_s:
            group.create_task(_part(fleet, faults.partition_s, after_s=seconds / 4))
        if faults.jump_s:
            group.create_task(_jump(fleet, faults.jump_s, after_s=seconds / 4))
        if faults.churn_per_hour:
            group.create_task(_churn(fleet, 3600.0 / faults.churn_per_hour, seconds=seconds))


async def _part(fleet: VirtualFleet, partition_s: float, *, after_s: float) -> None:
    await asyncio.sleep(after_s)
    up = fleet.up()
    fleet.split(fleet.rng.sample(up, len(up) // 2))
    await asyncio.sleep(partition_s)
    fleet.heal()


async def _jump(fleet: VirtualFleet, jump_s: float, *, after_s: float) -> None:
    await asyncio.sleep(after_s)
    node = fleet.rng.choice(fleet.up())
    node.clock.skew_s += jump_s
    await asyncio.sleep(REPAIR_S)
    node.clock.skew_s -= jump_s


async def _churn(fleet: VirtualFleet, mean_pause_s: float, *, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(fleet.rng.expovariate(1.0 / mean_pause_s))
            if loop.time() > end:
                return
            if fleet.rng.random() < 0.25:
                contact = fleet.rng.choice(fleet.up())
                fleet.add(seeds=[contact.address]).start()
            elif len(up := fleet.up()) > 2:
                group.create_task(_outage(fleet, fleet.rng.choice(up)))


async def _outage(fleet: VirtualFleet, node: VirtualNode) -> None:
    if fleet.rng.random() < 0.5:
        await node.leave()
    else:
        await node.kill()
    await asyncio.sleep(fleet.rng.uniform(1.0, MAX_DOWN_S))
    node.restart()
