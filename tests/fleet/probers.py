"""Real nodes that look into their doubts: all parts of a node's fleet side, on loopback."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio

from kakeya.core.clock import SystemClock
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Card, OfferedModel
from kakeya.fleet.gossip.gossip import Gossip, GossipConfig
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.liveness.probing import ProbeConfig, Prober
from kakeya.fleet.view.suspicion import Doubt
from kakeya.wire.channels import Channels, Keepalive
from tests.fleet.nodes import Node, make_registry, make_wire

QUICK = ProbeConfig(timeout_s=0.5, interval_s=1.0, revisit_s=0.5)
PATIENT = replace(QUICK, timeout_s=30.0)
"""For nodes that answer or refuse: on a busy machine an answer is late."""


@dataclass
class Probing:
    """A node with a prober and a gossip loop that does not run by itself."""

    node: Node
    prober: Prober
    gossip: Gossip
    supervisor: Supervisor
    pokes: list[float]

    @property
    def suspects(self) -> frozenset[str]:
        return frozenset(self.node.registry.suspects())

    def learn(self, *others: Node) -> None:
        """Hear of other nodes as if by gossip, without a call."""
        self.node.merge(*(other.registry.own.wire for other in others))

    def learn_of(self, address: str, *node_ids: str) -> None:
        """Hear of nodes that are said to be at an address."""
        now = self.node.clock.wall()
        self.node.merge(*(make_wire(node_id, at=now, address=address) for node_id in node_ids))

    def doubt_of(self, address: str) -> Doubt | None:
        return self.node.registry.suspicions.doubt_of(address)

    def accused(self) -> set[str]:
        return {sign.node_id for sign in self.prober.outgoing()}

    def fail(self, peer: str) -> None:
        self.node.registry.mark_failed(peer, mono=self.node.clock.mono())


@asynccontextmanager
async def probing_node(
    node_id: str,
    *,
    config: ProbeConfig = QUICK,
    gossip_config: GossipConfig | None = None,
    route: Callable[[Card], str] = lambda card: card.grpc_address,
    is_looking: bool = True,
    models: Sequence[OfferedModel] = (),
    keepalive: Keepalive | None = None,
) -> AsyncIterator[Probing]:
    """A node whose prober runs; with `is_looking` False it answers probes and makes none."""
    clock, keepalive = SystemClock(), keepalive or Keepalive()
    server = grpc.aio.server(options=keepalive.server_options())
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    now, mono = clock.wall(), clock.mono()
    registry = make_registry(node_id, now=now, mono=mono, address=address, models=models)
    channels = Channels(keepalive)
    pokes: list[float] = []

    def poke() -> None:
        pokes.append(clock.mono())
        gossip.poke()

    prober = Prober(
        registry,
        channels=channels,
        clock=clock,
        rng=random.Random(node_id),
        poke=poke,
        route=route,
        config=config,
    )
    channels.on_lost = prober.lost
    sync = Sync(registry, rng=random.Random(2), suspicion=prober)
    gossip = Gossip(
        registry,
        gossip_config or GossipConfig(),
        channels=channels,
        clock=clock,
        rng=random.Random(f"gossip {node_id}"),
        sync=sync,
        routes=route,
    )
    register(server, CapabilityService(registry, sync, clock=clock), probe=prober.answer_probe)
    await server.start()
    try:
        async with Supervisor(clock) as supervisor:
            if is_looking:
                prober.start(supervisor)
            node = Node(registry, server, channels, clock, address, sync)
            yield Probing(node, prober, gossip, supervisor, pokes)
    finally:
        await channels.aclose()
        await server.stop(None)
