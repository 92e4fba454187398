"""grpc.health.v1 for a node: the state of each service, and the reason if none is served.

A *hold* is a reason why the whole node does not serve: its event loop was stuck, or another node
has its id. During a hold, every service and "" answer NOT_SERVING. All methods take effect at
once, for every call that is answered after them, and watchers are told.

A stuck event loop answers no call; a caller then sees its own deadline. The first answers after
that are NOT_SERVING: `LoopWatchdog` sets its hold before the waiting calls are handled.
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
    """The gRPC servicer; used on the event loop only."""

    def __init__(self) -> None:
        self._serves = {"": True}
        self._holds: dict[str, str] = {}
        self._is_draining = False
        self._changed = asyncio.Event()

    def set(self, service: str, *, serves: bool) -> None:
        """Set the state of a service; "" is the node as a whole."""
        self._serves[service] = serves
        self._tell()

    def hold(self, cause: str, reason: str) -> None:
        """Serve nothing until this cause is released; `reason` is a sentence for the owner."""
        self._holds[cause] = reason
        self._tell()

    def release(self, cause: str) -> None:
        """Take a hold back; an unknown cause is ignored."""
        self._holds.pop(cause, None)
        self._tell()

    def drain(self) -> None:
        """Serve nothing from now on: the node is stopping."""
        self._is_draining = True
        self.hold("stopping", "the node is stopping")

    def reason(self) -> str:
        """The reason why the node serves nothing; "" while it serves."""
        return "; ".join(self._holds.values())

    def status(self, service: str) -> int | None:
        """Return the state of a service; None for an unknown one."""
        if service not in self._serves:
            return None
        if self._serves[service] and not self._holds:
            return _SERVING
        return _NOT_SERVING

    async def Check(
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> pb.HealthCheckResponse:
        """Answer the current state of a service."""
        status = self.status(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:80]!r} here"
            )
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: _Context) -> None:
        """Stream the state of a service at each change; ends when the node stops."""
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
