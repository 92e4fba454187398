"""grpc.health.v1 for a node: what each service is, and why none is served at the moment.

A *hold* is a reason for which the whole node does not serve, whatever its services are: its loop
was stuck, its name is taken. While there is one, every service and "" answer NOT_SERVING. All
methods take effect at once, before a call that is answered after them, and watchers are told.

Nothing on a stuck loop can answer. A caller sees its own deadline then, and NOT_SERVING from the
first answer afterwards on: `LoopWatchdog` puts its hold in front of the calls that piled up.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

_SERVING: int = pb.HealthCheckResponse.SERVING
_NOT_SERVING: int = pb.HealthCheckResponse.NOT_SERVING
_Context = grpc.aio.ServicerContext[Any, Any]


class NodeHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # it has no types
    """The servicer; used on the event loop only."""

    def __init__(self) -> None:
        self._serves = {"": True}
        self._holds: dict[str, str] = {}
        self._is_draining = False
        self._changed = asyncio.Event()

    def set(self, service: str, *, serves: bool) -> None:
        """Say what a service is; "" is the node as a whole."""
        self._serves[service] = serves
        self._tell()

    def hold(self, cause: str, reason: str) -> None:
        """Serve nothing until this cause is released; `reason` is a sentence for people."""
        self._holds[cause] = reason
        self._tell()

    def release(self, cause: str) -> None:
        """Take a hold back; one that is not there is fine."""
        self._holds.pop(cause, None)
        self._tell()

    def drain(self) -> None:
        """Serve nothing from now on: the node is stopping."""
        self._is_draining = True
        self.hold("stopping", "the node is stopping")

    def reason(self) -> str:
        """Why the node serves nothing, in a sentence; "" while it serves."""
        return "; ".join(self._holds.values())

    def status(self, service: str) -> int | None:
        """What is answered for a service; None for an unknown one."""
        if service not in self._serves:
            return None
        if self._serves[service] and not self._holds:
            return _SERVING
        return _NOT_SERVING

    async def Check(
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> pb.HealthCheckResponse:
        """Answer what a service is now."""
        status = self.status(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:80]!r} here"
            )
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: _Context) -> None:
        """Tell what a service is, and each change of it; ends when the node stops."""
        told = None
        while True:
            changed, is_last = self._changed, self._is_draining
            status = self.status(request.service)
            if status is None:
                status = pb.HealthCheckResponse.SERVICE_UNKNOWN
            if status != told:
                await context.write(pb.HealthCheckResponse(status=status))
                told = status
            if is_last:
                return
            await changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
