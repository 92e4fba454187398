"""A day of faults on a fleet in virtual time, and what must hold on each of its nodes meanwhile.

Of each hour the last third is quiet: from the end of the last fault on, all nodes must show all
nodes at their own addresses within `HEAL_ROUNDS`, and doubt none of them at the end of the hour.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.audit import SETTLE_ROUNDS
from benchmarks.soak.slopes import Point, Verdict, flat, none_of
from benchmarks.soak.virtual_faults import FAULTS_S, HOUR_S, UNDIALABLE, Trouble, is_stranger
from benchmarks.virtual_fleet import VirtualFleet, VirtualNode
from benchmarks.virtual_time import run_virtual
from kakeya.core.process import resident_bytes
from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import is_valid_node_id
from kakeya.fleet.view.conflicts import MAX_CONFLICTS
from kakeya.fleet.view.registry import CapabilityRegistry

NODES, LIMIT = 25, 64
"""Of the cards that a registry holds, fewer than a flood brings."""
FAULTS_PER_HOUR = 30
LOOK_S = 20.0
HEAL_ROUNDS = 13
"""After a flood its cards keep the places of a full registry until their TTL: 12 rounds."""
ROUND_S = 6.0
WARM_HOURS, JUDGED_HOURS = 2, 6
MOST_TOLD = 20
"""Of each invariant; all are counted."""
Tell = Callable[[str], None]


@dataclass
class Day:
    """The fleet, its faults, and what was found wrong by the invariant that it breaks."""

    fleet: VirtualFleet
    trouble: Trouble
    measure_mib: Callable[[], float]
    """Memory of this process."""
    tell: Tell
    wrong: dict[str, list[str]] = field(default_factory=dict)
    heals: list[int] = field(default_factory=list)
    looks: int = 0
    kept: list[Point] = field(default_factory=list)
    tasks: list[Point] = field(default_factory=list)
    rss_mib: list[Point] = field(default_factory=list)

    def note(self, invariant: str, problem: str) -> None:
        """Note that an invariant did not hold."""
        now = asyncio.get_running_loop().time()
        self.wrong.setdefault(invariant, []).append(f"{now / 3600:.3f} h {problem}")
        if len(self.wrong[invariant]) <= MOST_TOLD:
            self.tell(f"{now / 3600:.3f} h BROKEN {invariant}: {problem}")

    # --- at every moment

    async def watch(self) -> None:
        """Look at all nodes for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            for node in self.fleet.up():
                self.look(node)

    def look(self, node: VirtualNode) -> None:
        """Check what must hold for a node at every moment."""
        self.looks += 1
        registry, mono = node.registry, node.clock.mono()
        if (registry.own.node_id, registry.own.grpc_address) != (node.name, node.address):
            self.note("own card", f"{node.name} has {registry.own.node_id}")
        if node.task_failures():
            self.note("gossip lives", f"{node.name}: {node.task_failures()} failures")
        if node.gossip.stats.last_round_s > ROUND_S:
            self.note("rounds end", f"{node.name}: {node.gossip.stats.last_round_s:.1f} s")
        self._check_bounds(node)
        cards = registry.snapshot(mono=mono)
        for card in cards:
            if card.node_id == node.name:
                continue  # after a hang its own card is as old as that, until the next round
            age_s = registry.age_s(card.node_id, mono=mono)
            if age_s is None or not age_s <= card.ttl_s or not is_valid_node_id(card.node_id):
                self.note("views are valid", f"{node.name} shows {card.node_id} of {age_s} s")
        shown = {card.node_id for card in cards}
        self._check_ghosts(node, shown)
        if absent := self._expected(node) - shown:
            self.note("no false absence", f"{node.name} misses {sorted(absent)}")

    def _check_bounds(self, node: VirtualNode) -> None:
        registry, wall = node.registry, node.clock.wall()
        remembered = len(registry.remembered_addresses(wall))
        conflicts = len(registry.conflicts(wall))
        if len(registry) > LIMIT or remembered > LIMIT or conflicts > MAX_CONFLICTS:
            self.note("bounds", f"{node.name}: {len(registry)}, {remembered}, {conflicts}")

    def _check_ghosts(self, viewer: VirtualNode, shown: set[str]) -> None:
        now, pace = asyncio.get_running_loop().time(), self.fleet.pace
        late_s = pace.ttl_s + 2 * pace.interval_s
        if now - self.trouble.slept.get(viewer.name, -math.inf) < late_s:
            return  # its monotonic clock stood still: it doubts all, and shows what it knew
        for name, node in self.fleet.nodes.items():
            is_gone = not node.is_up and now - node.changed_at > late_s
            if is_gone and name in shown and name not in self.trouble.copies:
                self.note("no resurrection", f"{viewer.name} shows {name}")

    def _expected(self, viewer: VirtualNode) -> set[str]:
        """The nodes that have been left alone for long, with this one, beside which others fail."""
        calm_s = SETTLE_ROUNDS * self.fleet.pace.interval_s
        before = asyncio.get_running_loop().time() - calm_s
        trouble = self.trouble
        if max(trouble.calm_since(viewer.name), trouble.all_calm_since) > before:
            return set()
        return {name for name in self.fleet.nodes if trouble.calm_since(name) <= before}

    # --- in the quiet part of an hour

    async def heal(self) -> None:
        """Count the rounds until all is well; what is not well when the hour ends is wrong."""
        loop, round_s = asyncio.get_running_loop(), self.fleet.pace.interval_s
        began = self.trouble.last_end
        while sick := [node.name for node in self.fleet.nodes.values() if not self._sees_all(node)]:
            if loop.time() - began > HOUR_S - FAULTS_S:
                self.note("heals", f"{sick} do not see all after the quiet")
                return
            await asyncio.sleep(round_s / 10)
        self.heals.append(math.ceil((loop.time() - began) / round_s))
        if self.heals[-1] > HEAL_ROUNDS:
            self.note("heals", f"took {self.heals[-1]} rounds")

    def _sees_all(self, node: VirtualNode) -> bool:
        cards = node.registry.snapshot(mono=node.clock.mono())
        places = {card.node_id: card.grpc_address for card in cards}
        return all(places.get(one.name) == one.address for one in self.fleet.nodes.values())

    def end_hour(self, hours: float) -> None:
        """Check what must hold after the quiet, and take the samples."""
        for node in self.fleet.nodes.values():
            if strangers := [name for name in node.live() if is_stranger(name)]:
                self.note("strangers expire", f"{node.name} shows {len(strangers)}")
            if doubted := node.doubted():
                self.note("no lasting doubt", f"{node.name} doubts {sorted(doubted)}")
        gc.collect()
        self.rss_mib.append((hours, self.measure_mib()))
        self.tasks.append((hours, len(asyncio.all_tasks())))
        held = sum(len(node.registry) for node in self.fleet.nodes.values())
        self.kept.append((hours, held))

    def verdicts(self) -> list[Verdict]:
        """The rows of the table."""
        if bad := self.trouble.dialled & set(UNDIALABLE):
            self.wrong["no absurd dial"] = [str(bad)]
        names = (
            *("own card", "views are valid", "bounds", "gossip lives", "rounds end"),
            *("no false absence", "no resurrection", "heals", "strangers expire"),
            *("no lasting doubt", "no absurd dial"),
        )
        rows = [none_of(f"virtual: {name}", self.wrong.get(name, [])) for name in names]
        warm = min(WARM_HOURS, len(self.kept) // 2)
        rows += [
            flat(f"virtual: {what}", held[warm:], most, unit=unit, least_hours=JUDGED_HOURS)
            for what, held, most, unit in (
                ("memory of the process", self.rss_mib, 1.0, "MiB"),
                ("asyncio tasks", self.tasks, 0.5, "tasks"),
                ("cards held by all", self.kept, 0.5, "cards"),
            )
        ]
        return rows


def run_day(
    seed: int,
    hours: int,
    tell: Tell,
    *,
    nodes: int = NODES,
    faults: int = FAULTS_PER_HOUR,
    registry_type: type[CapabilityRegistry] = CapabilityRegistry,
    measure_mib: Callable[[], float] = lambda: (resident_bytes() or 0) / MIB,
) -> tuple[Sequence[Verdict], Counter[str]]:
    """Run virtual hours of faults; the rows of the table, and how often each fault came.

    `tell` gets a line for each fault and each hour.
    """

    async def run() -> tuple[Sequence[Verdict], Counter[str]]:
        loop, rng = asyncio.get_running_loop(), random.Random(seed)
        fleet = VirtualFleet(
            nodes,
            seed=seed,
            skews_s=[rng.uniform(-2.0, 2.0) for _ in range(nodes)],
            contacts=lambda index, _: (0,) if index else (),
            has_probes=True,
            limit=LIMIT,
            registry_type=registry_type,
        )
        trouble = Trouble(fleet, seed, lambda what: tell(f"{loop.time() / 3600:.3f} h {what}"))
        day = Day(fleet, trouble, measure_mib, tell)
        fleet.start()
        await day.heal()
        watch = asyncio.create_task(day.watch())
        for hour in range(hours):
            end = loop.time() + HOUR_S
            await trouble.hour(hour, faults)
            await day.heal()
            await asyncio.sleep(max(0.0, end - loop.time()))
            day.end_hour(hour + 1.0)
            wrong = sum(map(len, day.wrong.values()))
            tell(f"hour {hour + 1}: well after {day.heals[-1:]} rounds, {wrong} broken invariants")
        watch.cancel()
        await fleet.stop()
        tell(f"{day.looks} looks, rounds to heal {dict(sorted(Counter(day.heals).items()))}")
        return day.verdicts(), trouble.done

    return run_virtual(run())
