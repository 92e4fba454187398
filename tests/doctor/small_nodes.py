"""Small nodes for the doctor's tests: a registry, real listeners, the services that it asks."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from kakeya.core.clock import SystemClock
from kakeya.core.host import platform_name
from kakeya.core.programs import Output
from kakeya.doctor.dials import Dialler
from kakeya.doctor.examiner import Examiner, FleetView
from kakeya.doctor.machine import Machine
from kakeya.doctor.service import CheckBackService
from kakeya.fleet.cards.cards import Card, Endpoint, Offer
from kakeya.fleet.gossip import service as gossip
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1.fleet_pb2_grpc import add_DoctorServiceServicer_to_server
from kakeya.wire.channels import Channels, Keepalive
from kakeya.wire.security import TlsMaterial
from kakeya.wire.server.listeners import Listeners

GOOD_TEST = '{"mlx": "0.32.4", "device": "cpu", "blas": true, "share_off": 0.0, "is_same": true}'


class SkewedClock(SystemClock):
    """The machine's clock, ahead by some seconds."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def wall(self) -> float:
        return super().wall() + self.ahead_s


class _Security:
    """Expects one name everywhere: that of any member."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def material(self) -> TlsMaterial:
        return self._identity.tls

    def server_name(self, address: str) -> str:
        return self._identity.member_name


def opener(identity: Identity | None) -> Callable[[Keepalive], Channels]:
    """What opens a node's channels; members use TLS even on loopback, where the tests run."""

    def open_channels(keepalive: Keepalive) -> Channels:
        if identity is None:
            return Channels(keepalive)
        return Channels(keepalive, security=_Security(identity), is_plain=lambda address: False)

    return open_channels


async def no_program(command: Sequence[str], limit_s: float) -> Output | None:
    """Stands in for pmset, ping and the self-test, which has a test of its own."""
    return Output(status=0, stdout=GOOD_TEST, stderr="")


@dataclass
class SmallNode:
    """A node that gossips with nobody; tests hand its card to others."""

    registry: CapabilityRegistry
    clock: SkewedClock
    listeners: Listeners
    dialler: Dialler
    folder: Path
    identity: Identity | None = None
    skews: Mapping[str, float] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    address: str = ""
    revoked: set[str] = field(default_factory=set)
    forbidden: dict[str, str] = field(default_factory=dict)
    """Why the policy is against an address."""
    warnings: tuple[str, ...] = ()

    def offer(self, *endpoints: Endpoint, label: str = "") -> None:
        """Say on the card where this node is."""
        offer = Offer(
            grpc_address=self.address,
            label=label,
            endpoints=endpoints,
            platform=platform_name(),
        )
        self.registry.announce(offer, now=self.clock.wall(), mono=self.clock.mono())

    def meet(self, other: SmallNode) -> None:
        """Learn the other's card as it is now."""
        clock = self.clock
        self.registry.merge([other.registry.own.wire], now=clock.wall(), mono=clock.mono())

    def examiner(self, limit_s: float = 60.0, machine: Machine | None = None) -> Examiner:
        view = FleetView(
            identity=lambda: self.identity,
            is_revoked=self.revoked.__contains__,
            skews=lambda: self.skews,
            route=self._route,
            why_not_dial=lambda address: self.forbidden.get(address, ""),
            warnings=lambda: self.warnings,
        )
        return Examiner(
            self.registry,
            view,
            machine or Machine(self.folder, environ={}, platform="linux", run=no_program),
            clock=self.clock,
            dialler=self.dialler,
            limit_s=limit_s,
        )

    def _route(self, card: Card) -> str:
        return self.routes.get(card.node_id, card.grpc_address)


@asynccontextmanager
async def small_node(
    folder: Path,
    node_id: str,
    *,
    identity: Identity | None = None,
    ahead_s: float = 0.0,
    has_doctor: bool = True,
    may_dial: Callable[[str], str] = lambda address: "",
    dial_s: float = 30.0,
) -> AsyncIterator[SmallNode]:
    """Run a node on loopback, encrypted when it has an identity."""
    clock = SkewedClock(ahead_s)
    trust = FleetTrust(identity) if identity else None
    node_id = identity.node_id if identity else node_id
    registry = CapabilityRegistry(
        node_id, Offer(), now=clock.wall(), mono=clock.mono(), trust=trust
    )
    dialler = Dialler(clock, open_channels=opener(identity), limit_s=dial_s)
    doctor = CheckBackService(
        registry, clock=clock, dialler=dialler, may_dial=may_dial, version="0.1.0"
    )

    def register(server: grpc.aio.Server) -> None:
        sync = Sync(registry, rng=random.Random(1))
        gossip.register(server, gossip.CapabilityService(registry, sync, clock=clock))
        if has_doctor:
            add_DoctorServiceServicer_to_server(doctor, server)

    listeners = Listeners(
        register,
        clock=clock,
        material=(lambda: identity.tls) if identity else None,
        trust=trust,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(listeners.stop, None)
        bind = listeners.open_tls if identity else listeners.open_plain
        address = await bind("127.0.0.1:0", flag="--bind")
        await listeners.start()
        node = SmallNode(registry, clock, listeners, dialler, folder, identity, address=address)
        node.offer(label=node_id[:10])
        yield node


@contextmanager
def silent_port() -> Iterator[str]:
    """A port that takes connections, since its backlog does, and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def full_port() -> Iterator[str]:
    """A port whose backlog is full: Linux drops what comes, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        where = listening.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(where)
            yield f"127.0.0.1:{where[1]}"
        finally:
            for filler in fillers:
                filler.close()


@contextmanager
def closed_port() -> Iterator[str]:
    """A port that is bound, so that nobody else gets it, and on which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@asynccontextmanager
async def http_port() -> AsyncIterator[str]:
    """A web server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
