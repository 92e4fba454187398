"""A node that knows nothing of our extensions: typed messages, copied into values field by field.

What it does not know it drops, and it judges every card by its stamp.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import grpc.aio

from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import (
    CapabilityServiceServicer,
    CapabilityServiceStub,
    add_CapabilityServiceServicer_to_server,
)


@dataclass(frozen=True)
class PlainModel:
    model_id: str
    role: int
    quantization: str
    tokens_per_second: float


@dataclass(frozen=True)
class PlainCard:
    node_id: str
    grpc_address: str
    platform: str
    unified_memory_bytes: int
    mlx_version: str
    models: tuple[PlainModel, ...]
    announced_at: float
    ttl_s: float
    ring_address: str

    def is_expired(self, now: float) -> bool:
        return now > self.announced_at + self.ttl_s


def _read(message: pb.NodeCapability) -> PlainCard:
    return PlainCard(
        message.node_id,
        message.grpc_address,
        message.platform,
        message.unified_memory_bytes,
        message.mlx_version,
        tuple(
            PlainModel(m.model_id, m.role, m.quantization, m.tokens_per_second)
            for m in message.models
        ),
        message.announced_at_unix,
        message.ttl_seconds,
        message.ring_address,
    )


def _write(card: PlainCard) -> pb.NodeCapability:
    return pb.NodeCapability(
        node_id=card.node_id,
        grpc_address=card.grpc_address,
        platform=card.platform,
        unified_memory_bytes=card.unified_memory_bytes,
        mlx_version=card.mlx_version,
        models=[
            pb.ModelCapability(
                model_id=m.model_id,
                role=m.role,  # type: ignore[arg-type]
                quantization=m.quantization,
                tokens_per_second=m.tokens_per_second,
            )
            for m in card.models
        ],
        announced_at_unix=card.announced_at,
        ttl_seconds=card.ttl_s,
        ring_address=card.ring_address,
    )


class PlainNode(CapabilityServiceServicer):
    """Last writer by stamp wins; equal stamps keep the old card."""

    def __init__(self, node_id: str, address: str, wall: Callable[[], float]) -> None:
        self.address = address
        self._wall = wall
        self.own = PlainCard(
            node_id,
            address,
            "old",
            0,
            "",
            (PlainModel("old-model", 2, "", 9.0),),
            wall(),
            120.0,
            "",
        )
        self.cards: dict[str, PlainCard] = {}

    def merge(self, cards: list[PlainCard]) -> None:
        for card in cards:
            held = self.cards.get(card.node_id)
            if card.node_id == self.own.node_id or card.is_expired(self._wall()):
                continue
            if held is None or card.announced_at > held.announced_at:
                self.cards[card.node_id] = card

    def live(self) -> set[str]:
        return {c.node_id for c in self.cards.values() if not c.is_expired(self._wall())}

    def view(self) -> list[pb.NodeCapability]:
        self.own = replace(self.own, announced_at=self._wall())
        alive = [card for card in self.cards.values() if not card.is_expired(self._wall())]
        return [_write(card) for card in (self.own, *alive)]

    async def ExchangeCapabilities(
        self, request: pb.ExchangeCapabilitiesRequest, context: object
    ) -> pb.ExchangeCapabilitiesResponse:
        self.merge([_read(card) for card in request.known_nodes])
        return pb.ExchangeCapabilitiesResponse(known_nodes=self.view())

    async def GetNodeCapability(
        self, request: pb.GetNodeCapabilityRequest, context: object
    ) -> pb.GetNodeCapabilityResponse:
        return pb.GetNodeCapabilityResponse(node=self.view()[0])

    async def exchange(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await CapabilityServiceStub(channel).ExchangeCapabilities(
                pb.ExchangeCapabilitiesRequest(known_nodes=self.view()), timeout=5
            )
        self.merge([_read(card) for card in answer.known_nodes])


@asynccontextmanager
async def running_plain_node(node_id: str, wall: Callable[[], float]) -> AsyncIterator[PlainNode]:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    node = PlainNode(node_id, address, wall)
    add_CapabilityServiceServicer_to_server(node, server)
    await server.start()
    try:
        yield node
    finally:
        await server.stop(None)
