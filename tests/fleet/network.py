"""A fleet in virtual time: the real registry, service and gossip over edges that can be cut."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import grpc
import grpc.aio

from kakeya.fleet.gossip import Gossip, GossipConfig
from kakeya.fleet.registry import CapabilityRegistry
from kakeya.fleet.service import CapabilityService
from kakeya.fleet.sync import Sync
from tests.fleet.nodes import NOW, make_registry


class VirtualClock:
    """Time that the simulation sets."""

    def __init__(self) -> None:
        self.now = NOW

    def wall(self) -> float:
        return self.now

    def mono(self) -> float:
        return self.now - NOW

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("rounds are driven by the simulation")


class _Context:
    def peer(self) -> str:
        return "virtual"


class _Edge:
    """Stands for a channel: calls the service of the other node, unless the edge is cut."""

    def __init__(self, fleet: VirtualFleet, source: str, target: str) -> None:
        self._fleet, self._source, self._target = fleet, source, target

    def unary_unary(self, method: str) -> Callable[..., object]:
        async def call(request: bytes, timeout: float) -> bytes:
            self._fleet.calls += 1
            service = self._fleet.services.get(self._target)
            if service is None or self._fleet.is_cut(self._source, self._target):
                empty = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, "cut")
            handler = {"Sync": service.sync, "Push": service.push}.get(
                method.rpartition("/")[2], service.exchange
            )
            return await handler(request, _Context())  # type: ignore[arg-type]

        return call


class _Edges:
    def __init__(self, fleet: VirtualFleet, source: str) -> None:
        self._fleet, self._source = fleet, source

    def get(self, address: str) -> _Edge:
        return _Edge(self._fleet, self._source, address)

    async def discard(self, address: str) -> None:
        pass


class VirtualFleet:
    """N nodes whose rounds happen in order of virtual time."""

    def __init__(self, names: list[str], seed: int, **config: object) -> None:
        self.clock = VirtualClock()
        self.rng = random.Random(seed)
        self.services: dict[str, CapabilityService] = {}
        self.registries: dict[str, CapabilityRegistry] = {}
        self.gossips: dict[str, Gossip] = {}
        self.is_cut: Callable[[str, str], bool] = lambda source, target: False
        self.calls = 0
        self.config = GossipConfig(**config)  # type: ignore[arg-type]
        self._due: list[tuple[float, str]] = []
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        address = f"{name}:1"
        registry = make_registry(name, now=self.clock.wall(), address=address)
        rng = random.Random(self.rng.random())
        sync = Sync(registry, rng=rng)
        self.registries[name] = registry
        self.services[address] = CapabilityService(registry, sync, clock=self.clock)
        self.gossips[name] = Gossip(
            registry,
            self.config,
            channels=_Edges(self, address),  # type: ignore[arg-type]
            clock=self.clock,
            rng=rng,
            sync=sync,
        )
        start = self.clock.now + self.rng.random() * self.config.interval_s
        heapq.heappush(self._due, (start, name))

    def introduce_all(self) -> None:
        wires = [registry.own.wire for registry in self.registries.values()]
        for registry in self.registries.values():
            registry.merge(wires, now=self.clock.now, mono=self.clock.mono())

    async def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self._due[0][0] <= end:
            self.clock.now, name = heapq.heappop(self._due)
            await self.gossips[name].round()
            jitter = 1 + self.config.jitter * (2 * self.rng.random() - 1)
            heapq.heappush(self._due, (self.clock.now + self.config.interval_s * jitter, name))
        self.clock.now = end

    def completeness(self) -> float:
        """Share of (viewer, node) pairs in which the node is seen."""
        count = len(self.registries)
        seen = sum(len(r.snapshot(mono=self.clock.mono())) for r in self.registries.values())
        return seen / count**2
