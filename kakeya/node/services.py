"""What every listener of a node serves. Who may call which method is the listener's matter."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from kakeya.core.clock import Clock
from kakeya.core.ids import NGRAM
from kakeya.decoding.ngram import NGramProposer
from kakeya.decoding.service import ProposerService
from kakeya.decoding.stream_service import DraftStreamService
from kakeya.node.config import SessionConfig
from kakeya.node.control import ControlService, NoFleet
from kakeya.node.directory import Models
from kakeya.node.doctor.wiring import Doctor
from kakeya.node.drafting import FleetDrafts
from kakeya.node.health import NodeHealth
from kakeya.node.plane import FleetPlane
from kakeya.runtime.generation import ModelState
from kakeya.runtime.service import RuntimeService
from kakeya.runtime.store import SessionLimits, SessionStore
from kakeya.serving.backends.engine_backend import EngineBackend
from kakeya.v1.distributed_pb2_grpc import add_ProposerServiceServicer_to_server
from kakeya.v1.drafts_pb2_grpc import add_DraftStreamServiceServicer_to_server
from kakeya.v1.fleet_pb2_grpc import add_ControlServiceServicer_to_server
from kakeya.v1.runtime_pb2_grpc import add_RuntimeServiceServicer_to_server

RUNTIME = "kakeya.v1.RuntimeService"
_ALWAYS_SERVING = ("kakeya.v1.CapabilityService", "kakeya.v1.ProposerService")


class Services:
    """The servicers of one node: made once, added to as many servers as it has addresses."""

    def __init__(
        self,
        plane: FleetPlane,
        models: Models,
        sessions: SessionConfig,
        *,
        data_dir: Path,
        health: NodeHealth,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._plane = plane
        self._health = health
        self.drafts = FleetDrafts(
            plane.registry,
            clock,
            is_secured=plane.security is not None,
            route=plane.routes.address_for,
        )
        limits = SessionLimits(capacity=sessions.capacity, idle_ttl_s=sessions.idle_ttl_s)
        secret = random.SystemRandom()  # session ids are the only key to a history
        self.runtime = RuntimeService(
            models=models,
            drafts=self.drafts,
            store=SessionStore(clock=clock, rng=secret, limits=limits),
            clock=clock,
            rng=rng,
        )
        self._proposers = ProposerService({NGRAM: NGramProposer()}, clock=clock)
        self._streams = DraftStreamService(self._proposers, clock=clock)
        self._doctor = Doctor(plane, data_dir, clock=clock, environ=os.environ)
        self._control = ControlService(
            plane.membership or NoFleet(), examine=self._doctor.examine_json
        )
        for name in _ALWAYS_SERVING:
            health.set(name, serves=True)

    def register(self, server: grpc.aio.Server) -> None:
        """Add every service to one more server."""
        self._plane.register(server)
        self._doctor.register(server)
        add_RuntimeServiceServicer_to_server(self.runtime, server)
        add_ProposerServiceServicer_to_server(self._proposers, server)
        add_DraftStreamServiceServicer_to_server(self._streams, server)
        add_ControlServiceServicer_to_server(self._control, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    def drain(self, reason: str) -> None:
        """Take no new work for others; what runs may end, streams that only wait end now."""
        self.runtime.drain(reason)
        self._streams.drain()

    def follow(self, drafters: Iterable[EngineBackend], *, is_runtime_ready: bool) -> None:
        """Draft with the models that are ready now; say whether generations are served."""
        served = self._proposers.served()
        for backend in drafters:
            is_ready = backend.state is ModelState.READY
            if is_ready and backend.model_id not in served:
                self._proposers.serve(backend.model_id, backend)
            elif not is_ready:
                self._proposers.withdraw(backend.model_id)
        self._health.set(RUNTIME, serves=is_runtime_ready)
