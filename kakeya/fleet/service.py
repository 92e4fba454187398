"""CapabilityService: what this node answers to other nodes' gossip.

Registered through generic handlers that move bytes, so a batch reaches `split_cards` unread: a
typed handler would refuse a whole batch, with status UNKNOWN, for one card it cannot parse.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError
from kakeya.fleet.convert import MAX_BATCH_BYTES, join_cards, split_cards
from kakeya.fleet.exchange import log_report
from kakeya.fleet.registry import CapabilityRegistry
from kakeya.fleet.targets import fit_batch
from kakeya.wire.status import abort

SERVICE_NAME = "kakeya.v1.CapabilityService"
Context = grpc.aio.ServicerContext[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStats:
    """Counts since the start."""

    exchanges: int = 0
    refused: int = 0
    cards_changed: int = 0
    cards_dropped: int = 0


class CapabilityService:
    """Answers exchanges with the merged view, and says who this node is."""

    def __init__(self, registry: CapabilityRegistry, *, clock: Clock, rng: random.Random) -> None:
        self._registry = registry
        self._clock = clock
        self._rng = rng
        self._stats = ServiceStats()

    @property
    def stats(self) -> ServiceStats:
        """Counts since the start."""
        return self._stats

    async def exchange(self, request: bytes, context: Context) -> bytes:
        """Merge the caller's cards; answer with all that is known then, the own card first."""
        try:
            wires = split_cards(request)
        except KakeyaError as failure:
            self._stats = replace(self._stats, refused=self._stats.refused + 1)
            await abort(context, failure)
            raise
        now = self._clock.wall()
        report = self._registry.merge(wires, now)
        log_report(report, self._registry, context.peer())
        self._stats = replace(
            self._stats,
            exchanges=self._stats.exchanges + 1,
            cards_changed=self._stats.cards_changed + len(report.changed),
            cards_dropped=self._stats.cards_dropped + sum(report.dropped.values()),
        )
        self._registry.restamp(now=now, mono=self._clock.mono())
        view = [card.wire for card in self._registry.snapshot(now)]
        return join_cards(fit_batch(view, MAX_BATCH_BYTES, self._rng))

    async def describe(self, request: bytes, context: Context) -> bytes:
        """Answer with the own card, fresh."""
        own = self._registry.restamp(now=self._clock.wall(), mono=self._clock.mono())
        return join_cards((own.wire,))  # GetNodeCapabilityResponse.node has the same field number


def add_capability_service(
    server: grpc.aio.Server, registry: CapabilityRegistry, *, clock: Clock, rng: random.Random
) -> CapabilityService:
    """Register the service on a server that has not started; returns it for its counts."""
    service = CapabilityService(registry, clock=clock, rng=rng)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "ExchangeCapabilities": grpc.unary_unary_rpc_method_handler(service.exchange),
        "GetNodeCapability": grpc.unary_unary_rpc_method_handler(service.describe),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
    return service
