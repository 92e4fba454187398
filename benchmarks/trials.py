"""Trials with a virtual fleet: how fast news spreads, how a split heals, what an hour brings.

Each is one function of a case and a seed, run from the start to the end in virtual time, so that
trials can be spread over processes. Rounds are intervals of virtual time, rounded up.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from benchmarks.audit import Audit, Findings
from benchmarks.faults import Faults, inflict
from benchmarks.virtual_fleet import Pace, VirtualFleet, VirtualNode
from benchmarks.virtual_time import run_virtual
from kakeya.core.ids import ModelId
from kakeya.fleet.cards.cards import CardRole, OfferedModel
from kakeya.fleet.view.registry import CapabilityRegistry

NEWS = OfferedModel(ModelId("news"), CardRole.TOOL)
MANY_NODES = 2000
"""From here on not everybody has news at once, and nobody begins knowing a single address: both
would be as many merges as there are pairs of nodes. News and hours are then one trial."""
NEWS_AMONG_MANY = 100
GIVE_UP_ROUNDS = 60
LOOKS_PER_ROUND = 20
GOAL_EXTRA_ROUNDS = {0.0: 0, 0.1: 3, 0.3: 8}
"""Beyond log2 of the nodes, by the share of messages lost."""
T = TypeVar("T")
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
    spread_rounds: int | None = None
    """In a large fleet, which has news meanwhile."""
    rounds_per_interval: float
    """Below 1 where rounds wait for deadlines of lost messages."""


class Forgetful(CapabilityRegistry):
    """The control of healing: addresses of the dead are not dialled again."""

    def remembered_addresses(self, now: float) -> tuple[str, ...]:
        """None."""
        return ()


def spread_rounds(case: Case, seed: int, progress: Progress = lambda share: None) -> int:
    """Rounds until everybody holds all news, when all knew each other before.

    Everybody has news; in a large fleet `NEWS_AMONG_MANY` nodes of it have.
    """

    async def trial() -> int:
        fleet = _fleet(case, seed)
        _start_acquainted(fleet)
        rounds = await _spread_news(fleet, progress)
        await fleet.stop()
        return rounds

    return _run(trial())


def cold_rounds(case: Case, seed: int, progress: Progress = lambda share: None) -> int:
    """Rounds until everybody knows everybody, when each knows one earlier node's address."""

    async def trial() -> int:
        fleet = _fleet(case, seed, is_cold=True)
        fleet.start()
        rounds = await _rounds_until(fleet, lambda n: len(n.registry) == case.nodes, progress)
        await fleet.stop()
        return rounds

    return _run(trial())


def heal_rounds(case: Case, seed: int, progress: Progress = lambda share: None) -> int:
    """Rounds from the end of a split to full views."""

    async def trial() -> int:
        fleet = _fleet(case, seed)
        _start_acquainted(fleet)
        await fleet.run(2 * case.pace.interval_s)
        fleet.split(fleet.rng.sample(fleet.up(), case.nodes // 2))
        await fleet.run(case.faults.partition_s)
        fleet.heal()
        rounds = await _rounds_until(fleet, lambda n: len(n.live()) == case.nodes, progress)
        await fleet.stop()
        return rounds

    return _run(trial())


def hours(case: Case, seed: int, seconds: float, progress: Progress = lambda share: None) -> Hours:
    """A long run with the faults of the case, and what the views showed."""

    async def trial() -> Hours:
        loop = asyncio.get_running_loop()
        fleet = _fleet(case, seed)
        _start_acquainted(fleet)
        audit = Audit(fleet)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(audit.watch())
            faults = group.create_task(inflict(fleet, case.faults, seconds=seconds))
            is_large = case.nodes >= MANY_NODES
            news = group.create_task(_spread_news(fleet)) if is_large else None
            while loop.time() < seconds:
                await fleet.run(case.pace.interval_s)
                progress(loop.time() / seconds)
            for task in (watch, faults, *([news] if news else ())):
                task.cancel()
        intervals = len(fleet.nodes) * seconds / case.pace.interval_s
        rounds = sum(node.gossip.stats.rounds for node in fleet.nodes.values())
        await fleet.stop()
        return Hours(
            findings=audit.findings(),
            spread_rounds=_result(news),
            sent_bytes_per_round=sum(fleet.network.sent_bytes.values()) / intervals,
            rounds_per_interval=rounds / intervals,
        )

    return _run(trial())


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


def _start_acquainted(fleet: VirtualFleet) -> None:
    fleet.introduce_all()
    fleet.start()
    # All of it stays to the end, and each collection of garbage would visit every held card.
    gc.collect()
    gc.freeze()


def _run(trial: Coroutine[Any, Any, T]) -> T:
    try:
        return run_virtual(trial)
    finally:
        gc.unfreeze()


def _result(news: asyncio.Task[int] | None) -> int | None:
    if news is None:
        return None
    return GIVE_UP_ROUNDS if news.cancelled() else news.result()


async def _spread_news(fleet: VirtualFleet, progress: Progress = lambda share: None) -> int:
    await fleet.run(2 * fleet.pace.interval_s)
    up = fleet.up()
    makers = up if len(up) < MANY_NODES else fleet.rng.sample(up, NEWS_AMONG_MANY)
    keys = np.array([_make_news(node) for node in makers], np.uint64)
    names = {node.name for node in makers}

    def has_all_news(node: VirtualNode) -> bool:
        held = np.count_nonzero(node.registry.peers.held.places(keys) >= 0)
        return int(held) + (node.name in names) == len(keys)

    return await _rounds_until(fleet, has_all_news, progress)


def _make_news(node: VirtualNode) -> int:
    offer = node.registry.offer
    card = node.registry.announce(
        replace(offer, models=(*offer.models, NEWS)),
        now=node.clock.wall(),
        mono=node.clock.mono(),
    )
    return card.key


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
    return math.ceil(looks / LOOKS_PER_ROUND)
