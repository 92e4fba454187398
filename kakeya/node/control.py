"""ControlService: commands of a node's owner, on a socket in the data directory.

Only the owner can open the socket, since the folder is private. On other listeners the service
needs an admin's certificate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import grpc.aio

from kakeya.backends.engine.process import owner_socket
from kakeya.core.errors import ConfigError, InvalidArgument, KakeyaError
from kakeya.dispatch.drain import PATIENCE_S, DrainCall
from kakeya.fleet.identity.invite import VALID_S
from kakeya.fleet.identity.join_server import Invitation
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import ControlServiceServicer
from kakeya.wire.security import CertRole
from kakeya.wire.status import abort, errors_end

SOCKET = "control.sock"
Context = grpc.aio.ServicerContext[object, object]


class Fleet(Protocol):
    """Commands on the fleet of a node: `Membership`, or `NoFleet`."""

    async def invite(self, role: CertRole, valid_s: float) -> Invitation:
        """Make a token with which one machine may join."""
        ...

    def revoke(self, node: str) -> tuple[str, int]:
        """Revoke a node; return its id and the version of the list."""
        ...

    async def save_revoked(self) -> None:
        """Return once the list is on disk. Raises ConfigError when it cannot be written."""
        ...


class NoFleet:
    """The answers of a node without an identity."""

    async def invite(self, role: CertRole, valid_s: float) -> Invitation:
        """Raise ConfigError."""
        raise ConfigError(_NO_FLEET)

    def revoke(self, node: str) -> tuple[str, int]:
        """Raise ConfigError."""
        raise ConfigError(_NO_FLEET)

    async def save_revoked(self) -> None:
        """Raise ConfigError."""
        raise ConfigError(_NO_FLEET)


_NO_FLEET = (
    "this node is in no fleet; stop it, run `kakeya init` on one machine or `kakeya join TOKEN` "
    "on the others, and start it again"
)


class ControlService(ControlServiceServicer):
    """Translates the owner's calls.

    `examine` makes the doctor's report, as JSON. `dispatch` takes a level of memory pressure and
    the free bytes, None = unknown, and returns the level before. `drain` ends the node.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        examine: Callable[[str], Awaitable[str]],
        dispatch: Callable[[str, int | None], str],
        drain: DrainCall,
    ) -> None:
        self._fleet = fleet
        self._drain = drain
        self._examine = examine
        self._dispatch = dispatch

    async def Invite(self, request: pb.InviteRequest, context: Context) -> pb.InviteResponse:
        """Make an invite; `valid_s` 0 = 15 minutes."""
        try:
            made = await self._fleet.invite(_role(request.role), request.valid_s or VALID_S)
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.InviteResponse(token=made.token, expires_at_unix=made.expires_at)

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        """Remove a node from the fleet; answered once the list is on disk."""
        try:
            node_id, version = self._fleet.revoke(request.node)
            await self._fleet.save_revoked()
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.RevokeResponse(node_id=node_id, version=version)

    async def Examine(self, request: pb.ExamineRequest, context: Context) -> pb.ExamineResponse:
        """Let the doctor examine this node and its peers, or one named peer."""
        try:
            report = await self._examine(request.peer)
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.ExamineResponse(report=report)

    async def DispatchPressure(
        self, request: pb.DispatchPressureRequest, context: Context
    ) -> pb.DispatchPressureResponse:
        """Take a level of memory pressure from a host program; it takes effect at once."""
        try:
            before = self._dispatch(request.level, request.free_bytes or None)
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.DispatchPressureResponse(level_before=before)

    async def Drain(  # type: ignore[override]
        self, request: pb.DrainRequest, context: Context
    ) -> None:
        """Drain the node, then stop it; what was begun goes on if the caller leaves."""
        patience_s = request.patience_seconds or PATIENCE_S
        drain = self._drain(patience_s, until_replaced=request.until_replaced)
        async with errors_end(context), aclosing(drain) as steps:
            async for step in steps:
                told = pb.DrainProgress(requests=step.requests, seconds=step.seconds)
                await context.write(told)


def _role(name: str) -> CertRole:
    try:
        return CertRole(name or CertRole.MEMBER)
    except ValueError:
        roles = ", ".join(CertRole)
        raise InvalidArgument(
            f"{name!r} is not a role; give one of {roles}", param="role"
        ) from None


def control_socket(data_dir: Path) -> Path:
    """Return the path of the socket of a data directory; see `owner_socket`."""
    return owner_socket(data_dir, SOCKET)
