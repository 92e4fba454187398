"""Real nodes for the fleet's tests: a grpc.aio server, a registry and channels on loopback."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.ids import ModelId
from kakeya.fleet.cards import Card, Offer, OfferedModel, Role
from kakeya.fleet.convert import from_wire, to_wire
from kakeya.fleet.exchange import Round, exchange_once
from kakeya.fleet.gossip import Gossip, GossipConfig
from kakeya.fleet.registry import CapabilityRegistry
from kakeya.fleet.service import add_capability_service
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
) -> bytes:
    offer = Offer(
        grpc_address=address or f"{node_id}:50051",
        platform=platform,
        models=tuple(models),
        ttl_s=ttl_s,
        unified_memory_bytes=memory,
    )
    return to_wire(node_id, offer, incarnation=incarnation, announced_at=at)


def make_card(node_id: str = "peer", **fields: object) -> Card:
    return from_wire(make_wire(node_id, **fields))  # type: ignore[arg-type]


def verifier(model_id: str, speed: float = 0.0) -> OfferedModel:
    return OfferedModel(ModelId(model_id), Role.VERIFIER, "4bit", speed)


def proposer(model_id: str, speed: float = 0.0) -> OfferedModel:
    return OfferedModel(ModelId(model_id), Role.PROPOSER, "", speed)


def make_registry(
    node_id: str = "me",
    *,
    now: float = NOW,
    mono: float = 0.0,
    address: str = "",
    incarnation: int = 1,
    limit: int = 4096,
    models: Sequence[OfferedModel] = (),
) -> CapabilityRegistry:
    offer = Offer(grpc_address=address or f"{node_id}:50051", models=tuple(models))
    return CapabilityRegistry(
        node_id, offer, now=now, mono=mono, incarnation=incarnation, limit=limit
    )


@dataclass
class Node:
    """One real node; `exchange` does a round with given addresses."""

    registry: CapabilityRegistry
    server: grpc.aio.Server
    channels: Channels
    clock: Clock
    address: str
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    async def exchange(self, *targets: str, timeout_s: float = 5.0) -> Round:
        return await exchange_once(
            self.registry,
            targets,
            channels=self.channels,
            clock=self.clock,
            rng=self.rng,
            timeout_s=timeout_s,
        )

    def gossip(self, *seeds: str, **options: object) -> Gossip:
        return Gossip(
            self.registry,
            GossipConfig(seeds=seeds, **options),  # type: ignore[arg-type]
            channels=self.channels,
            clock=self.clock,
            rng=self.rng,
        )

    def known(self) -> list[str]:
        return [card.node_id for card in self.registry.snapshot(self.clock.wall())]


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
    add_capability_service(server, registry, clock=clock, rng=random.Random(2))
    server.add_generic_rpc_handlers(tuple(handlers))
    await server.start()
    channels = Channels(keepalive)
    try:
        yield Node(registry, server, channels, clock, address)
    finally:
        await channels.aclose()
        await server.stop(None)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Wait for a condition; returns how long that took in real seconds."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not within {timeout_s} s")
        await asyncio.sleep(0.005)
    return time.monotonic() - started
