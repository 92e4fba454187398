"""Members of one fleet with all parts of a node's fleet side, over real mutual TLS on loopback."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kakeya.core.clock import SystemClock
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Endpoint, Offer, OfferedModel
from kakeya.fleet.cards.convert import to_wire
from kakeya.fleet.gossip.outcome import Round
from kakeya.fleet.gossip.round import exchange_once
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.identity.membership import FleetSecurity
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.liveness.probing import ProbeConfig, Prober
from kakeya.fleet.paths.routes import Routes
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.wire.channels import Channels
from kakeya.wire.server.listeners import Listeners

QUICK = ProbeConfig(timeout_s=1.0, interval_s=1.0, revisit_s=0.2)


class House:
    """A fleet's authority."""

    def __init__(self) -> None:
        self.founder = new_fleet("founder", time.time())
        authority = authority_of(self.founder)
        assert authority is not None
        self._authority = authority

    def identity(self, name: str) -> Identity:
        return self._authority.new_identity(name, now=time.time())


def sealed_card(
    identity: Identity,
    address: str,
    *,
    models: Sequence[OfferedModel] = (),
    endpoints: Sequence[Endpoint] = (),
) -> bytes:
    """What a member can say of itself: any address, signed with its own key."""
    offer = Offer(grpc_address=address, models=tuple(models), endpoints=tuple(endpoints))
    body = to_wire(identity.node_id, offer, incarnation=1, announced_at=time.time(), life=1)
    return FleetTrust(identity).seal(body)


@dataclass
class Member:
    registry: CapabilityRegistry
    sync: Sync
    channels: Channels
    prober: Prober
    routes: Routes
    clock: SystemClock
    address: str

    @property
    def node_id(self) -> str:
        return self.registry.node_id

    async def exchange(self, *addresses: str) -> Round:
        return await exchange_once(
            self.registry,
            addresses,
            channels=self.channels,
            clock=self.clock,
            rng=random.Random(1),
            sync=self.sync,
        )

    def learn(self, *wires: bytes) -> None:
        """Hear of cards as from a relay."""
        report = self.registry.merge(wires, now=self.clock.wall(), mono=self.clock.mono())
        assert not report.dropped

    def known(self) -> set[str]:
        return {str(card.node_id) for card in self.registry.snapshot(mono=self.clock.mono())}


@asynccontextmanager
async def member(
    identity: Identity, *, models: Sequence[OfferedModel] = (), is_looking: bool = True
) -> AsyncIterator[Member]:
    """Run one; with `is_looking` False it makes no probes of its own."""
    clock, trust = SystemClock(), FleetTrust(identity)
    registry = CapabilityRegistry(
        identity.node_id, Offer(), now=clock.wall(), mono=clock.mono(), trust=trust
    )
    channels = Channels(
        security=FleetSecurity(trust, registry.node_at), is_plain=lambda address: False
    )
    routes = Routes(registry, channels=channels, clock=clock)
    prober = Prober(
        registry,
        channels=channels,
        clock=clock,
        rng=random.Random(identity.label),
        poke=lambda: None,
        route=routes.address_for,
        config=QUICK,
    )
    sync = Sync(registry, rng=random.Random(2), suspicion=prober)
    service = CapabilityService(registry, sync, clock=clock)
    listeners = Listeners(
        lambda server: register(server, service, probe=prober.answer_probe),
        clock=clock,
        material=trust.material,
        trust=trust,
    )
    address = await listeners.open_tls("127.0.0.1:0", flag="--bind")
    await listeners.start()
    offer = Offer(grpc_address=address, label=identity.label, models=tuple(models))
    registry.announce(offer, now=clock.wall(), mono=clock.mono())
    try:
        async with Supervisor(clock) as supervisor:
            if is_looking:
                prober.start(supervisor)
            yield Member(registry, sync, channels, prober, routes, clock, address)
    finally:
        await routes.aclose()
        await channels.aclose()
        await listeners.stop(None)
