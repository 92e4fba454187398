"""CapabilityService and GossipService: this node's answers to other nodes' gossip.

Registered through generic handlers that move bytes, so a batch reaches `split_cards` unread: a
typed handler would refuse a whole batch, with status UNKNOWN, for one card it cannot parse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError
from kakeya.fleet.cards.convert import join_cards
from kakeya.fleet.gossip.round import log_report
from kakeya.fleet.gossip.sync import Answered, Sync
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.fleet.view.slices import Slices, in_slices
from kakeya.wire.server.authorization import calling_node
from kakeya.wire.status import abort

SERVICE_NAME = "kakeya.v1.CapabilityService"
GOSSIP_NAME = "kakeya.v1.GossipService"
Context = grpc.aio.ServicerContext[bytes, bytes]
Handlers: TypeAlias = "dict[str, grpc.RpcMethodHandler[bytes, bytes]]"
Probe = Callable[[bytes, Context], Awaitable[bytes]]


class SyncMethod(Protocol):
    """One of the ways in which `Sync` takes a message."""

    def __call__(
        self, request: bytes, /, *, now: float, mono: float, peer: str
    ) -> Slices[Answered]:
        """Take a message of a node ("" = not known), answer. Raises InvalidArgument, Refused."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipServiceStats:
    """Counts since the start."""

    exchanges: int = 0
    refused: int = 0
    cards_changed: int = 0
    cards_dropped: int = 0
    cards_clamped: int = 0
    sent_bytes: int = 0


class CapabilityService:
    """Answers exchanges with the merged view, and requests for the own card."""

    def __init__(self, registry: CapabilityRegistry, sync: Sync, *, clock: Clock) -> None:
        self._registry = registry
        self._sync = sync
        self._clock = clock
        self._stats = GossipServiceStats()

    @property
    def stats(self) -> GossipServiceStats:
        """Counts since the start, of digests and pushes too."""
        return self._stats

    async def exchange(self, request: bytes, context: Context) -> bytes:
        """Merge the caller's cards; answer with all cards held then, the own card first."""
        return await self._answer(request, context, self._sync.answering_batch, in_field=1)

    async def describe(self, request: bytes, context: Context) -> bytes:
        """Answer with the own card."""
        own = self._registry.describe(now=self._clock.wall(), mono=self._clock.mono())
        return join_cards((own.wire,))  # GetNodeCapabilityResponse.node has the same field number

    async def sync(self, request: bytes, context: Context) -> bytes:
        """Answer a digest."""
        return await self._answer(request, context, self._sync.answering, in_field=2)

    async def push(self, request: bytes, context: Context) -> bytes:
        """Take the bodies that the caller was asked for, or its last card."""
        return await self._answer(request, context, self._sync.taking, in_field=2)

    async def _answer(
        self, request: bytes, context: Context, answer: SyncMethod, *, in_field: int
    ) -> bytes:
        try:
            work = self._sync.verification(request, in_field)
            if work is not None:
                await asyncio.to_thread(work)
            now, mono = self._clock.wall(), self._clock.mono()
            answered = await in_slices(answer(request, now=now, mono=mono, peer=calling_node()))
        except KakeyaError as failure:
            self._stats = replace(self._stats, refused=self._stats.refused + 1)
            await abort(context, failure)
            raise
        report = answered.report
        log_report(report, self._registry, context.peer())
        self._stats = replace(
            self._stats,
            exchanges=self._stats.exchanges + 1,
            cards_changed=self._stats.cards_changed + len(report.changed),
            cards_dropped=self._stats.cards_dropped + sum(report.dropped.values()),
            cards_clamped=self._stats.cards_clamped + report.clamped,
            sent_bytes=self._stats.sent_bytes + len(answered.response),
        )
        return answered.response


def register(
    server: grpc.aio.Server, service: CapabilityService, *, probe: Probe | None = None
) -> None:
    """Register one service on one more server; `probe` answers GossipService.Probe."""
    plain: Handlers = {
        "ExchangeCapabilities": grpc.unary_unary_rpc_method_handler(service.exchange),
        "GetNodeCapability": grpc.unary_unary_rpc_method_handler(service.describe),
    }
    extended: Handlers = {
        "Sync": grpc.unary_unary_rpc_method_handler(service.sync),
        "Push": grpc.unary_unary_rpc_method_handler(service.push),
    }
    if probe is not None:
        extended["Probe"] = grpc.unary_unary_rpc_method_handler(probe)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(SERVICE_NAME, plain),
            grpc.method_handlers_generic_handler(GOSSIP_NAME, extended),
        )
    )
