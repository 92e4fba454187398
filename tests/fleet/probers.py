"""Real nodes that look into their doubts: a node, its prober, and the Probe service."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards import Card
from kakeya.fleet.probing import ProbeConfig, Prober
from kakeya.fleet.suspicion import Doubt
from tests.fleet.nodes import Node, make_wire, running_node

QUICK = ProbeConfig(timeout_s=0.5, interval_s=1.0)


@dataclass
class Probing:
    """A node with a prober."""

    node: Node
    prober: Prober
    pokes: list[float] = field(default_factory=list)

    def learn(self, *others: Node) -> None:
        """Hear of other nodes as if by gossip, without a call."""
        wires = [other.registry.own.wire for other in others]
        self.node.registry.merge(wires, self.node.clock.wall())

    def learn_of(self, address: str, *node_ids: str) -> None:
        """Hear of nodes that are said to be at an address."""
        now = self.node.clock.wall()
        wires = [make_wire(node_id, at=now, address=address) for node_id in node_ids]
        self.node.registry.merge(wires, now)

    def doubt_of(self, address: str) -> Doubt | None:
        return self.node.registry.suspicions.doubt_of(address)

    def accused(self) -> set[str]:
        return {sign.node_id for sign in self.prober.outgoing()}

    def fail(self, peer: str) -> None:
        self.node.registry.mark_failed(peer, self.node.clock.wall())


@asynccontextmanager
async def probing_node(
    node_id: str,
    *,
    config: ProbeConfig = QUICK,
    route: Callable[[Card], str] = lambda card: card.grpc_address,
    is_looking: bool = True,
    **options: object,
) -> AsyncIterator[Probing]:
    """A node whose prober runs; with `is_looking` False it answers probes and makes none."""
    probers: list[Prober] = []

    async def probe(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return await probers[0].answer_probe(request, context)

    handler = grpc.method_handlers_generic_handler(
        "kakeya.v1.GossipService", {"Probe": grpc.unary_unary_rpc_method_handler(probe)}
    )
    async with running_node(node_id, handlers=(handler,), **options) as node:  # type: ignore[arg-type]
        pokes: list[float] = []
        prober = Prober(
            node.registry,
            channels=node.channels,
            clock=node.clock,
            rng=random.Random(node_id),
            poke=lambda: pokes.append(node.clock.mono()),
            route=route,
            config=config,
        )
        probers.append(prober)
        node.channels.on_lost = prober.lost
        async with Supervisor(node.clock) as supervisor:
            if is_looking:
                prober.start(supervisor)
            yield Probing(node, prober, pokes)
