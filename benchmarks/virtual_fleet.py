"""A fleet in virtual time: the product's own registry, gossip loop and services, N times.

Nothing of gossip is modelled. Each node is what `node/plane.py` builds, but for identities, routes
and discovery, with a clock of its own and the virtual network in place of gRPC; it can be killed,
restarted, made to leave, cut off, and its clock set wrong. `audit.py` says what came of it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from benchmarks.virtual_acquaintance import introduce
from benchmarks.virtual_network import VirtualNetwork, VirtualServer
from benchmarks.virtual_time import EPOCH, NodeClock
from kakeya.core.ids import ModelId
from kakeya.core.tasks import Supervisor
from kakeya.core.units import GIB
from kakeya.fleet.cards.cards import (
    DEFAULT_INTERVAL_S,
    DEFAULT_TTL_S,
    Card,
    CardRole,
    Endpoint,
    Offer,
    OfferedModel,
)
from kakeya.fleet.gossip.gossip import Gossip, GossipConfig
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.gossip.targets import DEFAULT_FANOUT
from kakeya.fleet.liveness.probing import Prober
from kakeya.fleet.view.beats import Floats
from kakeya.fleet.view.card_table import CardIndex
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.fleet.view.tombstones import RegistryState

MODELS = (
    OfferedModel(ModelId("Qwen3-1.7B-4bit"), CardRole.VERIFIER, "4bit", 61.5),
    OfferedModel(ModelId("kakeya-tiny-draft"), CardRole.PROPOSER, "", 410.0),
    OfferedModel(ModelId("ngram"), CardRole.PROPOSER),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often, to how many, and how long a card lives."""

    interval_s: float = DEFAULT_INTERVAL_S
    fanout: int = DEFAULT_FANOUT
    ttl_s: float = DEFAULT_TTL_S


class VirtualNode:
    """One machine and, while it is up, its agent's fleet plane."""

    def __init__(
        self,
        fleet: VirtualFleet,
        name: str,
        *,
        clock: NodeClock,
        seeds: tuple[str, ...],
        address: str = "",
        memory: RegistryState | None = None,
    ) -> None:
        self.name = name
        self.address = address or address_of(name)
        self.clock = clock
        self.is_up = False
        self.changed_at = 0.0
        """Loop time of the last start or end."""
        self._fleet, self._seeds = fleet, seeds
        self._memory = memory or RegistryState()
        self._build()

    def _build(self) -> None:
        fleet, clock = self._fleet, self.clock
        rng = random.Random(fleet.rng.random())
        self.registry = fleet.registry_type(
            self.name,
            fleet.offer(self.address),
            now=clock.wall(),
            mono=clock.mono(),
            memory=self._memory,
            limit=fleet.limit,
            entropy=rng.randbytes,
            index=fleet.index,
        )
        channels = fleet.network.channels(self.address)
        prober = Prober(
            self.registry, channels=channels, clock=clock, rng=rng, poke=lambda: self.gossip.poke()
        )
        sync = Sync(self.registry, rng=rng, suspicion=prober if fleet.has_probes else None)
        self.gossip = Gossip(
            self.registry,
            replace(fleet.config, seeds=self._seeds),
            channels=channels,
            clock=clock,
            rng=rng,
            sync=sync,
            routes=fleet.routes,
        )
        self.server = VirtualServer()
        register(
            self.server,  # type: ignore[arg-type] # the part of a server that services use
            CapabilityService(self.registry, sync, clock=clock),
            probe=prober.answer_probe,
        )
        self._prober = prober
        self._supervisor = Supervisor(clock)

    def start(self, delay_s: float = 0.0) -> None:
        """Serve now; the first round comes after the delay."""
        self._note_change(is_up=True)
        self._fleet.network.servers[self.address] = self.server

        async def gossip() -> None:
            await asyncio.sleep(delay_s)
            await self.gossip.run()

        self._supervisor.start("gossip", gossip)
        if self._fleet.has_probes:
            self._prober.start(self._supervisor)

    async def kill(self) -> None:
        """End without a word; calls to the address are refused from now on.

        What the node would have written to its disk is what it knows now.
        """
        self._memory = self.memory()
        await self.suspend()

    def memory(self) -> RegistryState:
        """What the node would write to its disk now."""
        return self.registry.memory(now=self.clock.wall(), mono=self.clock.mono())

    async def suspend(self) -> None:
        """Close the lid: no call is answered and nothing runs, but the process stays."""
        self._note_change(is_up=False)
        del self._fleet.network.servers[self.address]
        await self._supervisor.aclose()

    def _note_change(self, *, is_up: bool) -> None:
        self.is_up, self.changed_at = is_up, asyncio.get_running_loop().time()
        self._fleet.changed_at = self.changed_at

    def wake(self, *, slept_s: float) -> None:
        """Open the lid again, with a monotonic clock that stood still meanwhile."""
        self.clock.stop_mono(slept_s)
        self._supervisor = Supervisor(self.clock)
        self.start()

    async def leave(self) -> None:
        """End as on SIGTERM: the last card first."""
        await self.gossip.farewell()
        await self.kill()

    def restart(self, memory: RegistryState | None = None) -> None:
        """Come up again as a new process of the same node, with what is on its disk: what it wrote
        at its end, or the given one."""
        self._memory = self._memory if memory is None else memory
        self._build()
        self.start()

    def live(self) -> set[str]:
        """The ids that this node shows as live, its own with them."""
        return {card.node_id for card in self.registry.snapshot(mono=self.clock.mono())}

    def doubted(self) -> frozenset[str]:
        """The ids of the nodes to which this one gives no work."""
        return self.registry.suspects() if len(self.registry.suspicions) else frozenset()

    def task_failures(self) -> int:
        """How often a background task of this start raised."""
        return sum(task.failures for task in self._supervisor.health())

    def ages(self) -> Floats:
        """Seconds since each held peer lived, as this node reckons."""
        return self.registry.ages(mono=self.clock.mono())


class VirtualFleet:
    """The nodes and what is between them. Make it on a virtual loop.

    `skews_s` says how wrong each clock is, `contacts` which nodes' addresses each is given as
    seeds. `registry_type` and `routes` (where a card's node is dialled) are where a control weakens
    the product. `has_probes`: nodes that do not answer are probed, as the product does; that has a
    part in who is given work, not in who is shown. `limit` bounds the cards of a registry; 0 = that
    of the product, or twice the nodes.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: int,
        pace: Pace | None = None,
        loss: float = 0.0,
        skews_s: Sequence[float] = (),
        contacts: Callable[[int, random.Random], Collection[int]] = lambda index, rng: (),
        registry_type: type[CapabilityRegistry] = CapabilityRegistry,
        routes: Callable[[Card], str] = lambda card: card.grpc_address,
        has_probes: bool = False,
        limit: int = 0,
    ) -> None:
        self.pace = pace or Pace()
        self.rng = random.Random(seed)
        self.network = VirtualNetwork(random.Random(self.rng.random()), loss=loss)
        self.registry_type = registry_type
        self.routes = routes
        self.has_probes = has_probes
        self.index = CardIndex(is_shared=True)
        self.limit = limit or max(4096, 2 * count)
        self.config = GossipConfig(interval_s=self.pace.interval_s, fanout=self.pace.fanout)
        self.nodes: dict[str, VirtualNode] = {}
        self.changed_at = 0.0
        """Loop time of the last start or end of any node."""
        self._sides: tuple[frozenset[str], ...] = ()
        self._healed_at = 0.0
        for index in range(count):
            self.add(
                skew_s=skews_s[index] if skews_s else 0.0,
                seeds=[address_of(name_of(i)) for i in contacts(index, self.rng)],
            )

    def add(self, *, skew_s: float = 0.0, seeds: Sequence[str] = ()) -> VirtualNode:
        """Make one more node, not started."""
        name = name_of(len(self.nodes))
        clock = NodeClock(skew_s=skew_s, mono_zero=self.rng.uniform(0.0, 1e6))
        node = self.nodes[name] = VirtualNode(self, name, clock=clock, seeds=tuple(seeds))
        return node

    def offer(self, address: str) -> Offer:
        """What a node of this fleet says of itself."""
        return offer_of(address, ttl_s=self.pace.ttl_s)

    def start(self) -> None:
        """Start every node, each at its own phase of the interval."""
        for node in self.nodes.values():
            node.start(self.rng.uniform(0.0, self.pace.interval_s))

    def introduce_all(self) -> None:
        """Let every node hold every other's card, as after long running."""
        nodes = list(self.nodes.values())
        template = CapabilityRegistry(
            "template",
            offer_of("10.255.255.254:1"),
            now=EPOCH,
            mono=0.0,
            limit=self.limit,
            index=self.index,
        )
        introduce([node.registry for node in nodes], [node.clock for node in nodes], template)

    async def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)

    async def stop(self) -> None:
        """End what is up, for good."""
        for node in self.up():
            await node.suspend()

    def up(self) -> list[VirtualNode]:
        """The nodes that run now."""
        return [node for node in self.nodes.values() if node.is_up]

    def split(self, left: Collection[VirtualNode]) -> None:
        """Cut every edge between these nodes and the others."""
        names = frozenset(node.name for node in left)
        inside = {node.address for node in left}
        self._sides = (names, frozenset(self.nodes) - names)
        self._healed_at = math.inf
        self.network.is_cut = lambda source, target: (source in inside) != (target in inside)

    def heal(self) -> None:
        """Let every edge carry messages again."""
        self.network.is_cut = None
        self._healed_at = asyncio.get_running_loop().time()

    def reachable(self, viewer: VirtualNode, *, since: float) -> set[str]:
        """Who has been up, and not cut off from the viewer, since some loop time."""
        names = {n.name for n in self.nodes.values() if n.is_up and n.changed_at <= since}
        if self._healed_at > since:
            for side in self._sides:
                if viewer.name in side:
                    names &= side
        return names

    def is_whole(self, *, since: float) -> bool:
        """Whether all nodes have been up, and could reach each other, since some loop time."""
        is_settled = max(self.changed_at, self._healed_at) <= since
        return is_settled and len(self.network.servers) == len(self.nodes)

    def completeness(self) -> float:
        """Share of (viewer, node) pairs of running nodes in which the viewer shows the node."""
        up = self.up()
        names = {node.name for node in up}
        return sum(len(node.live() & names) for node in up) / len(up) ** 2


def name_of(index: int) -> str:
    """The id of the node with a number."""
    return f"mini-{index:05d}"


def address_of(name: str) -> str:
    """Where a node is dialled; an IP literal, as only those are dialled unasked."""
    index = int(name.rpartition("-")[2])
    return f"10.{index // 62500}.{index // 250 % 250}.{index % 250 + 1}:50051"


def offer_of(address: str, *, ttl_s: float = DEFAULT_TTL_S) -> Offer:
    """What a mini with two networks and three models says of itself."""
    host, _, port = address.rpartition(":")
    return Offer(
        grpc_address=address,
        label=f"mini {host}",
        endpoints=(
            Endpoint(f"169.254.{host.split('.', 2)[2]}:{port}", "thunderbolt", 10, 0.2),
            Endpoint(address, "lan", 20, 0.6),
        ),
        platform="mac-m4-24gb",
        unified_memory_bytes=24 * GIB,
        mlx_version="0.32.4",
        models=MODELS,
        ttl_s=ttl_s,
    )


def card_bytes() -> int:
    """The length of one node's card on the wire."""
    offer = offer_of(address_of(name_of(0)))
    return len(CapabilityRegistry(name_of(0), offer, now=EPOCH, mono=0.0).own.wire)
