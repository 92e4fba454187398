"""FleetService: this node's view, told to programs as it changes.

A watcher is no node: it sends no card, and no other node hears of it. A call costs the difference
between what its caller was told and the view, so changes that come together travel together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1.fleet_pb2 import WatchRequest, WatchResponse
from kakeya.v1.fleet_pb2_grpc import FleetServiceServicer

GATHER_S = 0.05
"""How long further changes are gathered after one."""
MAX_PART_BYTES = MIB
"""Bytes of cards in one message."""


class FleetWatchService(FleetServiceServicer):
    """Tells each watcher all cards, then what changes, until it leaves or the node stops."""

    def __init__(self, registry: CapabilityRegistry, *, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._wakes: set[asyncio.Event] = set()
        self._is_stopping = False
        registry.subscribe(self._wake)

    def drain(self) -> None:
        """End every call, and take no more: the node is stopping."""
        self._is_stopping = True
        self._wake()

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    async def Watch(  # type: ignore[override]
        self, request: WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Tell one watcher."""
        wake = asyncio.Event()
        self._wakes.add(wake)
        try:
            told: Mapping[str, Card] | None = None
            suspects: Sequence[str] = ()
            while not self._is_stopping:
                wake.clear()
                cards = {
                    str(card.node_id): card
                    for card in self._registry.snapshot(mono=self._clock.mono())
                }
                doubted = sorted(map(str, self._registry.suspects() & cards.keys()))
                if told != cards or suspects != doubted:
                    for part in _parts(told or {}, cards, doubted):
                        await context.write(part)
                told, suspects = cards, doubted
                await wake.wait()
                if self._is_stopping:
                    return
                await self._clock.sleep(GATHER_S)
        finally:
            self._wakes.discard(wake)


def _parts(
    told: Mapping[str, Card], cards: Mapping[str, Card], suspects: Sequence[str]
) -> Iterator[WatchResponse]:
    """The messages that turn the view that was told into that of `cards`."""
    part, size = WatchResponse(gone=sorted(told.keys() - cards.keys()), suspects=suspects), 0
    for node_id, card in cards.items():
        if told.get(node_id) == card:
            continue
        if size + len(card.wire) > MAX_PART_BYTES:
            part.more = True
            yield part
            part, size = WatchResponse(suspects=suspects), 0
        part.cards.append(card.wire)
        size += len(card.wire)
    yield part
