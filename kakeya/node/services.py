"""The services of every listener of a node. The listener decides which caller may call them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from kakeya.adapters.service import AdapterService
from kakeya.backends.added.on_demand import OnDemandPulls
from kakeya.backends.relay.relays import Relays
from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring.groups import RingGroups
from kakeya.backends.ring.own_share import OwnShare
from kakeya.backends.ring.service import RingService
from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict
from kakeya.core.ids import NGRAM
from kakeya.core.tasks import Supervisor
from kakeya.decoding.ngram.ngram import NGramProposer
from kakeya.decoding.serve.service import ProposerService
from kakeya.decoding.serve.stream_service import DraftStreamService
from kakeya.dispatch.clients import Clients
from kakeya.dispatch.directory import VerifierDirectory
from kakeya.dispatch.drain import NodeDrain
from kakeya.dispatch.peers.held_answers import HeldAnswers
from kakeya.dispatch.peers.neighbours import ServingPeers
from kakeya.dispatch.peers.relay_service import RelayService
from kakeya.dispatch.peers.ring_survey import RingSurvey
from kakeya.dispatch.peers.service import ServingService
from kakeya.dispatch.peers.text_files import TextFiles
from kakeya.dispatch.routed.copied import AnswerCopies
from kakeya.dispatch.routed.declared_copies import DeclaredCopies
from kakeya.dispatch.routed.history import RouteHistory
from kakeya.dispatch.routed.models import RoutedModels
from kakeya.dispatch.routed.pulls import FleetPulls
from kakeya.dispatch.routed.relays import RoutedRelays
from kakeya.dispatch.watch.facts import OwnSections
from kakeya.dispatch.watch.fleet import FleetWatch
from kakeya.fleet.placement.draft_sources import FleetDrafts
from kakeya.generation.facts import ModelState
from kakeya.node.control import ControlService, NoFleet
from kakeya.node.doctor import Doctor
from kakeya.node.fleet import NodeFleet
from kakeya.node.handover import DrainedHttp
from kakeya.node.pages import NodePages
from kakeya.prefix.peers.peers import PrefixPeers
from kakeya.prefix.warm.ahead import NodePrecache
from kakeya.sessions.config import SessionConfig
from kakeya.sessions.move_service import SessionMoveService
from kakeya.sessions.mover import SessionMover
from kakeya.sessions.peers import FleetPeers
from kakeya.sessions.prefix_service import PrecacheService
from kakeya.sessions.service import RuntimeService
from kakeya.sessions.store import SessionLimits, SessionStore
from kakeya.v1.adapters_pb2_grpc import add_AdapterServiceServicer_to_server
from kakeya.v1.distributed_pb2_grpc import add_ProposerServiceServicer_to_server
from kakeya.v1.drafts_pb2_grpc import add_DraftStreamServiceServicer_to_server
from kakeya.v1.fleet_pb2_grpc import add_ControlServiceServicer_to_server
from kakeya.v1.precache_pb2_grpc import add_PrecacheServiceServicer_to_server
from kakeya.v1.relay_pb2_grpc import add_RelayServiceServicer_to_server
from kakeya.v1.ring_pb2_grpc import add_RingServiceServicer_to_server
from kakeya.v1.runtime_pb2_grpc import add_RuntimeServiceServicer_to_server
from kakeya.v1.serving_pb2_grpc import add_ServingServiceServicer_to_server
from kakeya.v1.sessions_pb2_grpc import add_SessionMoveServiceServicer_to_server
from kakeya.weights.weights import NodeWeights
from kakeya.wire.channels import is_local
from kakeya.wire.server.health import NodeHealth

RUNTIME = "kakeya.v1.RuntimeService"
TEXTS = "texts"
"""The folder of the text of peers' models, in the data directory."""
_ALWAYS_SERVING = ("kakeya.v1.CapabilityService", "kakeya.v1.ProposerService")


class Services:
    """The servicers of one node: made once, added to as many servers as it has addresses."""

    def __init__(
        self,
        plane: NodeFleet,
        models: VerifierDirectory,
        relays: Relays,
        sessions: SessionConfig,
        pages: NodePages,
        precache: NodePrecache,
        weights: NodeWeights,
        on_demand: OnDemandPulls,
        rings: RingGroups,
        *,
        data_dir: Path,
        wait_s: float,
        resume_bytes: int,
        warm_nodes: int,
        share: OwnShare,
        dispatch: Callable[[str, int | None], str],
        on_drain: Callable[[], None],
        port: DrainedHttp,
        heard: Callable[[], Awaitable[object]],
        health: NodeHealth,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._plane = plane
        self._weights = weights
        self._health = health
        self.drafts = FleetDrafts(
            plane.registry,
            clock,
            is_secured=plane.security is not None,
            route=plane.routes.address_for,
        )
        store = SessionStore(
            clock=clock,
            rng=random.SystemRandom(),  # session ids are the only key to a history
            limits=SessionLimits(
                capacity=sessions.capacity, idle_ttl_s=sessions.idle_ttl_s, model_wait_s=wait_s
            ),
        )
        self.clients = Clients(clock.mono)
        texts = TextFiles(data_dir / TEXTS)
        self.routes = RouteHistory(clock)
        shares_kv = pages.shares_prefixes
        self.serving_peers = ServingPeers(plane, texts, clock, shares_kv=shares_kv)
        pulls = FleetPulls(on_demand, self.serving_peers)
        self.models = RoutedModels(models, self.serving_peers, self.routes, pulls)
        """The models of the fleet, for clients of this node."""
        precache.elsewhere = self.models.turn_elsewhere
        self.relays = RoutedRelays(relays, self.models, self.serving_peers)
        self._relay = RelayService(relays, models, self.clients)
        held = HeldAnswers(most_bytes=resume_bytes, mono=clock.mono)
        self.declared_copies = DeclaredCopies(
            precache.declared,
            self.serving_peers,
            nodes=warm_nodes,
            facts=lambda model_id: models.get(model_id).facts,
            is_private=lambda peer: plane.security is not None or is_local(peer.address),
            clock=clock,
        )
        self.copies = AnswerCopies(self.serving_peers, held, clock)
        self.facts = OwnSections(clock)
        self.ring = RingSurvey(plane, share, clock, health.reason)
        self._serving = ServingService(
            models,
            self.drafts,
            texts,
            self.clients,
            precache,
            precache.for_peers,
            held,
            kv_rates=self.serving_peers.kv_rates,
            share=self.ring.describe,
            facts=self.facts,
        )
        peers = self.serving_peers
        self.watch = FleetWatch(
            self.facts,
            clock,
            own_id=peers.own_id,
            live=peers.live,
            watch=lambda peer: peers.calls(peer).watch(),
        )
        self.mover = SessionMover(
            store,
            models,
            self.models,
            FleetPeers(plane, clock.mono),
            precache,
            node_id=self.serving_peers.own_id,
            heard=heard,
            clock=clock,
        )
        self._moves = SessionMoveService(self.mover)
        self._rings = RingService(rings, lambda: self.draining.is_under_way)
        self.runtime = RuntimeService(
            models=self.models,
            drafts=self.drafts,
            store=store,
            clock=clock,
            rng=rng,
            precache=precache,
            clients=self.clients,
            mover=self.mover,
        )
        self._precache = PrecacheService(models, precache)
        self._proposers = ProposerService({NGRAM: NGramProposer()}, clock=clock)
        self._streams = DraftStreamService(self._proposers, clock=clock)
        self.doctor = Doctor(plane, data_dir, clock=clock, environ=os.environ)
        self._on_drain = on_drain
        self._port = port
        self.draining = NodeDrain(
            begin=self._begin_drain,
            left=lambda mono: self.clients.begun_by(mono) + self.mover.leaving,
            port=port,
            close=self.mover.close,
            stop=lambda: os.kill(os.getpid(), signal.SIGTERM),
            clock=clock,
        )
        self._control = ControlService(
            plane.membership or NoFleet(),
            examine=self.doctor.examine_json,
            dispatch=dispatch,
            drain=self.draining.run,
        )
        self._adapters = AdapterService(pages.adapters.manager)
        self.peers = PrefixPeers(
            plane, pages.prefixes, fleet_key=pages.fleet_key, clock=clock, rng=rng
        )
        self._shares_prefixes = shares_kv
        if self._shares_prefixes:
            pages.prefixes.elsewhere = self.peers
        for name in _ALWAYS_SERVING:
            health.set(name, serves=True)
        self._tasks: Supervisor | None = None

    @property
    def served(self) -> int:
        """Answers that were begun for peers."""
        return self._serving.served + self._relay.served

    def start(self, supervisor: Supervisor, on_change: Callable[[], None]) -> None:
        """Start background work; `on_change` is called when the card needs new facts."""
        self._tasks = supervisor
        if self._shares_prefixes:
            self.peers.start(supervisor, on_change)
        self.declared_copies.start(supervisor)

    def register(self, server: grpc.aio.Server) -> None:
        """Add every service to one more server."""
        self._plane.register(server)
        if self._shares_prefixes:
            self.peers.register(server)
        self.doctor.register(server)
        self._weights.register(server)
        add_RuntimeServiceServicer_to_server(self.runtime, server)
        add_SessionMoveServiceServicer_to_server(self._moves, server)
        add_RingServiceServicer_to_server(self._rings, server)
        add_ServingServiceServicer_to_server(self._serving, server)
        add_RelayServiceServicer_to_server(self._relay, server)
        add_PrecacheServiceServicer_to_server(self._precache, server)
        add_ProposerServiceServicer_to_server(self._proposers, server)
        add_DraftStreamServiceServicer_to_server(self._streams, server)
        add_ControlServiceServicer_to_server(self._control, server)
        add_AdapterServiceServicer_to_server(self._adapters, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    def _begin_drain(self, reason: str) -> None:
        if self._tasks is None:
            raise Conflict("the node does not serve yet; drain it once it is ready, or stop it")
        self.runtime.drain(reason)
        self._serving.drain(reason)
        self._relay.drain(reason)
        self.models.drain(reason)
        self.mover.leave()
        self._health.hold("drain", reason)
        self._tasks.start("port handover", self._port.run)
        self._on_drain()

    def drain(self, reason: str) -> None:
        """Refuse new work for peers; running calls may end, idle streams end now."""
        self.runtime.drain(reason)
        self._serving.drain(reason)
        self._relay.drain(reason)
        self._rings.drain(reason)
        self.facts.drain()
        self._streams.drain()
        self._plane.watches.drain()
        self.peers.drain()

    def follow(self, drafters: Iterable[ResidentModel], *, is_runtime_ready: bool) -> None:
        """Draft with the models that are ready now; set the health of generations."""
        served = self._proposers.served()
        for model in drafters:
            is_ready = model.state is ModelState.READY
            if is_ready and model.model_id not in served:
                self._proposers.serve(model.model_id, model)
            elif not is_ready:
                self._proposers.withdraw(model.model_id)
        self._health.set(RUNTIME, serves=is_runtime_ready)
