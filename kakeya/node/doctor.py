"""The doctor as a part of a running node: it examines the node, and answers doctors of peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.doctor.dials import Dialler
from kakeya.doctor.examiner import Examiner, FleetView
from kakeya.doctor.machine import Machine
from kakeya.doctor.service import CheckBackService
from kakeya.node.fleet import NodeFleet
from kakeya.v1.fleet_pb2_grpc import add_DoctorServiceServicer_to_server
from kakeya.wire.channels import Channels


class Doctor:
    """Built on the fleet half of a node; its dials make new connections."""

    def __init__(
        self, plane: NodeFleet, folder: Path, *, clock: Clock, environ: Mapping[str, str]
    ) -> None:
        """`environ` is the environment of the node."""
        self.warnings: Callable[[], Sequence[str]] = list
        """Lists sentences about the node; set once there is one."""
        dialler = Dialler(
            clock, open_channels=lambda keepalive: Channels(keepalive, security=plane.security)
        )
        self._check_back = CheckBackService(
            plane.registry,
            clock=clock,
            dialler=dialler,
            may_dial=plane.why_not_dial,
            version=version("kakeya"),
        )
        view = FleetView(
            identity=lambda: plane.trust.identity if plane.trust else None,
            is_revoked=plane.trust.is_revoked if plane.trust else _is_never_revoked,
            skews=plane.skews,
            route=plane.routes.address_for,
            why_not_dial=plane.why_not_dial,
            warnings=lambda: self.warnings(),
            mdns=lambda: plane.discovery.stats if plane.discovery else None,
        )
        self._examiner = Examiner(
            plane.registry, view, Machine(folder, environ=environ), clock=clock, dialler=dialler
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service for other nodes' doctors to one more server."""
        add_DoctorServiceServicer_to_server(self._check_back, server)

    async def examine_json(self, peer: str) -> str:
        """Examine this node and its peers, or one named peer; return the report as JSON."""
        return await self._examiner.examine_json(peer)


def _is_never_revoked(node_id: str) -> bool:
    return False
