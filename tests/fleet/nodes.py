"""Real nodes for the fleet's tests: a grpc.aio server, a registry and channels on loopback."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypedDict

import grpc
import grpc.aio

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.ids import ModelId
from kakeya.fleet.cards.cards import Card, CardRole, CardTrust, Endpoint, Offer, OfferedModel
from kakeya.fleet.cards.convert import from_wire, to_wire
from kakeya.fleet.gossip.gossip import Gossip, GossipConfig
from kakeya.fleet.gossip.outcome import Round
from kakeya.fleet.gossip.round import exchange_once
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.view.registry import CapabilityRegistry, MergeReport
from kakeya.fleet.view.tombstones import RegistryState
from kakeya.v1 import distributed_pb2 as pb
from kakeya.wire.channels import Channels, Keepalive

NOW = 1_700_000_000.0


def make_wire(
    node_id: str = "peer",
    *,
    at: float = NOW,
    incarnation: int = 1,
    address: str = "",
    ttl_s: float = 120.0,
    platform: str = "",
    models: Sequence[OfferedModel] = (),
    memory: int = 0,
    life: int = 0,
    label: str = "",
    endpoints: Sequence[Endpoint] = (),
    is_plain: bool = False,
) -> bytes:
    offer = Offer(
        grpc_address=address or f"{node_id}:50051",
        platform=platform,
        models=tuple(models),
        ttl_s=ttl_s,
        unified_memory_bytes=memory,
        label=label,
        endpoints=tuple(endpoints),
    )
    wire = to_wire(node_id, offer, incarnation=incarnation, announced_at=at, life=life)
    return plain(wire) if is_plain else wire


def plain(wire: bytes) -> bytes:
    """What a node that copies the fields it knows would make of a card."""
    message = pb.NodeCapability.FromString(wire)
    for name in ("incarnation", "protocol_min", "protocol_max", "life", "label", "beat_anchor"):
        message.ClearField(name)
    return message.SerializeToString()


def make_card(node_id: str = "peer", **fields: object) -> Card:
    return from_wire(make_wire(node_id, **fields))  # type: ignore[arg-type]


def verifier(model_id: str, speed: float = 0.0) -> OfferedModel:
    return OfferedModel(ModelId(model_id), CardRole.VERIFIER, "4bit", speed)


def proposer(model_id: str, speed: float = 0.0) -> OfferedModel:
    return OfferedModel(ModelId(model_id), CardRole.PROPOSER, "", speed)


def make_registry(
    node_id: str = "me",
    *,
    now: float = NOW,
    mono: float = 0.0,
    address: str = "",
    incarnation: int = 1,
    limit: int = 4096,
    models: Sequence[OfferedModel] = (),
    memory: RegistryState | None = None,
    trust: CardTrust | None = None,
    seed: int | None = None,
) -> CapabilityRegistry:
    offer = Offer(grpc_address=address or f"{node_id}:50051", models=tuple(models))
    return CapabilityRegistry(
        node_id,
        offer,
        now=now,
        mono=mono,
        incarnation=incarnation,
        limit=limit,
        memory=memory,
        trust=trust,
        entropy=random.Random(repr((node_id, address))).randbytes
        if seed is None
        else random.Random(seed).randbytes,
    )


class Times(TypedDict):
    now: float
    mono: float


def at(now: float) -> Times:
    """A wall time with the monotonic time of a machine that started at NOW."""
    return {"now": now, "mono": now - NOW}


@dataclass
class Node:
    """One real node; `exchange` does a round with given addresses."""

    registry: CapabilityRegistry
    server: grpc.aio.Server
    channels: Channels
    clock: Clock
    address: str
    sync: Sync
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    async def exchange(self, *targets: str, timeout_s: float = 5.0) -> Round:
        return await exchange_once(
            self.registry,
            targets,
            channels=self.channels,
            clock=self.clock,
            rng=self.rng,
            timeout_s=timeout_s,
            sync=self.sync,
        )

    def gossip(self, *seeds: str, **options: object) -> Gossip:
        return Gossip(
            self.registry,
            GossipConfig(seeds=seeds, **options),  # type: ignore[arg-type]
            channels=self.channels,
            clock=self.clock,
            rng=self.rng,
            sync=self.sync,
        )

    def known(self) -> list[str]:
        return [card.node_id for card in self.registry.snapshot(mono=self.clock.mono())]

    def card_of(self, node_id: str) -> Card:
        card = self.registry.get(node_id, mono=self.clock.mono())
        assert card is not None
        return card

    def merge(self, *wires: bytes) -> MergeReport:
        return self.registry.merge(wires, now=self.clock.wall(), mono=self.clock.mono())


@asynccontextmanager
async def running_node(
    node_id: str,
    *,
    models: Sequence[OfferedModel] = (),
    clock: Clock | None = None,
    keepalive: Keepalive | None = None,
    port: int = 0,
    incarnation: int = 1,
    handlers: Sequence[grpc.GenericRpcHandler[bytes, bytes]] = (),
) -> AsyncIterator[Node]:
    clock = clock or SystemClock()
    keepalive = keepalive or Keepalive()
    server = grpc.aio.server(options=keepalive.server_options())
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    registry = make_registry(
        node_id,
        now=clock.wall(),
        mono=clock.mono(),
        address=address,
        models=models,
        incarnation=incarnation,
    )
    sync = Sync(registry, rng=random.Random(2))
    register(server, CapabilityService(registry, sync, clock=clock))
    server.add_generic_rpc_handlers(tuple(handlers))
    await server.start()
    channels = Channels(keepalive)
    try:
        yield Node(registry, server, channels, clock, address, sync)
    finally:
        await channels.aclose()
        await server.stop(None)
