"""Trials with a virtual fleet: how fast news spreads, how a split heals, what an hour brings.

Each is one function of a case and a seed, run from the start to the end in virtual time, so that
trials can be spread over processes. Rounds are intervals of virtual time, rounded up.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from benchmarks.audit import Audit, Findings
from benchmarks.faults import Faults, inflict
from benchmarks.virtual_fleet import Pace, VirtualFleet, VirtualNode
from benchmarks.virtual_time import run_virtual
from kakeya.core.ids import ModelId
from kakeya.fleet.cards import OfferedModel, Role
from kakeya.fleet.registry import CapabilityRegistry

NEWS = OfferedModel(ModelId("news"), Role.TOOL)
GIVE_UP_ROUNDS = 60
LOOKS_PER_ROUND = 20
GOAL_EXTRA_ROUNDS = {0.0: 0, 0.1: 3, 0.3: 8}
"""Beyond log2 of the nodes, by the share of messages lost."""
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fleet to try. `control` names what makes it worse than the product, on purpose."""

    nodes: int
    loss: float = 0.0
    pace: Pace = field(default_factory=Pace)
    faults: Faults = field(default_factory=Faults)
    control: str = ""
    is_forgetful: bool = False
    has_probes: bool = False

    @property
    def goal_rounds(self) -> int | None:
        """Rounds in which 99 % of the seeds shall converge; None where no goal was set."""
        if self.loss not in GOAL_EXTRA_ROUNDS:
            return None
        extra = GOAL_EXTRA_ROUNDS[self.loss] or int(self.pace.fanout == 1)
        return math.ceil(math.log2(self.nodes)) + extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """What a long run showed. Bytes are payload, both of requests and of answers."""

    findings: Findings
    sent_bytes_per_round: float
    """By one node in one interval."""
    rounds_per_interval: float
    """Below 1 where rounds wait for deadlines of lost messages."""


class Forgetful(CapabilityRegistry):
    """The control of healing: addresses of the dead are not dialled again."""

    def remembered_addresses(self, now: float) -> tuple[str, ...]:
        """None."""
        return ()


def spread_rounds(case: Case, seed: int, progress: Progress = lambda share: None) -> int:
    """Rounds until everybody holds news of everybody, when all knew each other before."""

    async def trial() -> int:
        fleet = _fleet(case, seed)
        fleet.introduce_all()
        fleet.start()
        await fleet.run(2 * case.pace.interval_s)
        for node in fleet.up():
            offer = node.registry.offer
            node.registry.announce(
                replace(offer, models=(*offer.models, NEWS)),
                now=node.clock.wall(),
                mono=node.clock.mono(),
            )
        return await _rounds_until(fleet, _has_all_news, progress)

    return run_virtual(trial())


def cold_rounds(case: Case, seed: int, progress: Progress = lambda share: None) -> int:
    """Rounds until everybody knows everybody, when each knows one earlier node's address."""

    async def trial() -> int:
        fleet = _fleet(case, seed, is_cold=True)
        fleet.start()
        return await _rounds_until(fleet, lambda node: len(node.registry) == case.nodes, progress)

    return run_virtual(trial())


def heal_rounds(case: Case, seed: int, progress: Progress = lambda share: None) -> int:
    """Rounds from the end of a split to full views."""

    async def trial() -> int:
        fleet = _fleet(case, seed)
        fleet.introduce_all()
        fleet.start()
        await fleet.run(2 * case.pace.interval_s)
        fleet.split(fleet.rng.sample(fleet.up(), case.nodes // 2))
        await fleet.run(case.faults.partition_s)
        fleet.heal()
        return await _rounds_until(fleet, lambda node: len(node.live()) == case.nodes, progress)

    return run_virtual(trial())


def hours(case: Case, seed: int, seconds: float, progress: Progress = lambda share: None) -> Hours:
    """A long run with the faults of the case, and what the views showed."""

    async def trial() -> Hours:
        loop = asyncio.get_running_loop()
        fleet = _fleet(case, seed)
        fleet.introduce_all()
        fleet.start()
        audit = Audit(fleet)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(audit.watch())
            faults = group.create_task(inflict(fleet, case.faults, seconds=seconds))
            while loop.time() < seconds:
                await fleet.run(case.pace.interval_s)
                progress(loop.time() / seconds)
            watch.cancel()
            faults.cancel()
        intervals = len(fleet.nodes) * seconds / case.pace.interval_s
        rounds = sum(node.gossip.stats.rounds for node in fleet.nodes.values())
        await fleet.stop()
        return Hours(
            findings=audit.findings(),
            sent_bytes_per_round=sum(fleet.network.sent_bytes.values()) / intervals,
            rounds_per_interval=rounds / intervals,
        )

    return run_virtual(trial())


def _fleet(case: Case, seed: int, *, is_cold: bool = False) -> VirtualFleet:
    skew_s, rng = case.faults.skew_s, random.Random(seed)
    return VirtualFleet(
        case.nodes,
        seed=seed,
        pace=case.pace,
        loss=case.loss,
        skews_s=[rng.uniform(-skew_s, skew_s) for _ in range(case.nodes)],
        contacts=_one_earlier if is_cold else _nobody,
        has_probes=case.has_probes,
        registry_type=Forgetful if case.is_forgetful else CapabilityRegistry,
    )


def _nobody(index: int, rng: random.Random) -> tuple[int, ...]:
    return ()


def _one_earlier(index: int, rng: random.Random) -> tuple[int, ...]:
    return (rng.randrange(index),) if index else ()


def _has_all_news(node: VirtualNode) -> bool:
    cards = node.registry.snapshot(mono=node.clock.mono())
    return all(card.models[-1] == NEWS for card in cards)


async def _rounds_until(
    fleet: VirtualFleet, is_done: Callable[[VirtualNode], bool], progress: Progress
) -> int:
    interval_s = fleet.pace.interval_s
    waiting, looks = fleet.up(), 0
    while waiting and looks < GIVE_UP_ROUNDS * LOOKS_PER_ROUND:
        await fleet.run(interval_s / LOOKS_PER_ROUND)
        looks += 1
        waiting = [node for node in waiting if not is_done(node)]
        progress(1 - len(waiting) / len(fleet.nodes))
    await fleet.stop()
    return math.ceil(looks / LOOKS_PER_ROUND)
