"""A node's fleet plane in a process of its own: registry, gossip, probes and routes, no models.

    child_fleet.py '{"node_id": ..., "seeds": [...], "ttl_s": ..., "interval_s": ...}'

Listens on port 50051 of every address of its machine, plain. Prints `ready`; then it answers each
line of its stdin with one line of JSON:

    view        what it sees now
    sleep S     stand still for S seconds, the monotonic clock too, as on a Mac
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from kakeya.core.clock import SystemClock
from kakeya.core.log import configure
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Offer
from kakeya.fleet.gossip.gossip import Gossip, GossipConfig
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.liveness.probing import Prober
from kakeya.fleet.paths.discovery import Discovery
from kakeya.fleet.paths.endpoints import RouteChange
from kakeya.fleet.paths.interfaces import (
    choose_listeners,
    endpoints_of,
    policy_for,
    read_interfaces,
)
from kakeya.fleet.paths.routes import Routes
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.wire.channels import Channels, Keepalive
from tests.fleet.nodes import proposer

PORT = 50051


class SleepyClock(SystemClock):
    """A clock whose monotonic half leaves out the time that the machine slept."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def mono(self) -> float:
        return super().mono() - self.slept_s

    def fall_asleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.slept_s += seconds


@dataclass
class Plane:
    registry: CapabilityRegistry
    gossip: Gossip
    routes: Routes
    clock: SleepyClock
    changes: list[RouteChange] = field(default_factory=list)

    def view(self) -> dict[str, Any]:
        _, *peers = self.registry.snapshot(mono=self.clock.mono())
        doubts = self.registry.suspicions.doubt_of
        return {
            "view": [card.node_id for card in peers],
            "suspects": sorted(self.registry.suspects()),
            "doubts": {card.node_id: doubts(card.grpc_address) for card in peers},
            "addresses": {card.node_id: self.routes.address_for(card) for card in peers},
            "downgrades": self.routes.downgrades,
            "downgraded": [r.node_id for r in self.routes.routes() if r.is_downgraded],
            "changes": len(self.changes),
            "rounds": self.gossip.stats.rounds,
        }

    def do(self, line: str) -> dict[str, Any]:
        word, _, rest = line.strip().partition(" ")
        if word == "sleep":
            self.clock.fall_asleep(float(rest))
        return self.view()


async def build(stack: AsyncExitStack, options: dict[str, Any]) -> Plane:
    clock, rng = SleepyClock(), random.Random()
    found = read_interfaces(sys.platform)
    listeners = choose_listeners(found)
    endpoints = endpoints_of(listeners, PORT)
    own = [i.address(PORT) for i in listeners]
    policy = policy_for(found, own=own, typed=options["seeds"])
    offer = Offer(
        grpc_address=options.get("advertise") or endpoints[-1].address,
        endpoints=endpoints,
        models=(proposer("ngram"),),
        ttl_s=options["ttl_s"],
    )
    registry = CapabilityRegistry(options["node_id"], offer, now=clock.wall(), mono=clock.mono())
    keepalive = Keepalive(interval_s=2, timeout_s=1)
    channels = Channels(keepalive)
    stack.push_async_callback(channels.aclose)
    changes: list[RouteChange] = []
    routes = Routes(
        registry, channels=channels, clock=clock, may_dial=policy.allows, on_change=changes.append
    )
    prober = Prober(
        registry,
        channels=channels,
        clock=clock,
        rng=rng,
        poke=lambda: gossip.poke(),
        route=routes.address_for,
    )
    channels.on_lost = prober.lost
    sync = Sync(registry, rng=rng, suspicion=prober)
    discovery = Discovery(
        options["node_id"],
        fleet="test",
        port=PORT,
        hosts=[i.host for i in listeners],
        policy=policy,
        clock=clock,
        rng=rng,
        on_change=lambda: gossip.poke(),
    )
    gossip = Gossip(
        registry,
        GossipConfig(seeds=tuple(options["seeds"]), interval_s=options["interval_s"], timeout_s=2),
        channels=channels,
        clock=clock,
        rng=rng,
        sync=sync,
        sightings=discovery.sightings,
        may_dial=policy.allows,
        routes=routes.address_for,
    )
    service = CapabilityService(registry, sync, clock=clock)
    for address in own:
        server = grpc.aio.server(options=keepalive.server_options())
        server.add_insecure_port(address)
        register(server, service, probe=prober.answer_probe)
        await server.start()
        stack.push_async_callback(server.stop, None)
    tasks = await stack.enter_async_context(Supervisor(clock))
    gossip.start(tasks)
    prober.start(tasks)
    routes.start(tasks)
    if options.get("mdns"):
        discovery.start(tasks)
    return Plane(registry, gossip, routes, clock, changes)


async def main(options: dict[str, Any]) -> None:
    configure()
    async with AsyncExitStack() as stack:
        plane = await build(stack, options)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(plane.do(line)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
