"""ControlService: what the owner of a node tells it, on a socket in the data directory.

Whoever can open the socket is the owner: the folder is his alone. Elsewhere it takes an admin's
certificate.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import grpc.aio

from kakeya.backends.engine.process import MAX_SOCKET_PATH_BYTES
from kakeya.core.errors import ConfigError, InvalidArgument, KakeyaError
from kakeya.fleet.identity.invite import VALID_S
from kakeya.fleet.identity.join_server import Invitation
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import ControlServiceServicer
from kakeya.wire.security import CertRole
from kakeya.wire.status import abort

SOCKET = "control.sock"
Context = grpc.aio.ServicerContext[object, object]


class Fleet(Protocol):
    """What a node can do for its fleet: `Membership`, or `NoFleet`."""

    async def invite(self, role: CertRole, valid_s: float) -> Invitation:
        """Let one machine join."""
        ...

    def revoke(self, node: str) -> tuple[str, int]:
        """Put a node out; return its id and the version of the list."""
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
    """Translates the owner's calls; `examine` makes the doctor's report, as JSON, `dispatch` takes
    a level of memory pressure and the free bytes, None = not said, and returns the level before."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        examine: Callable[[str], Awaitable[str]],
        dispatch: Callable[[str, int | None], str],
    ) -> None:
        self._fleet = fleet
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
        """Put a node out of the fleet; answered once a restart would remember it."""
        try:
            node_id, version = self._fleet.revoke(request.node)
            await self._fleet.save_revoked()
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.RevokeResponse(node_id=node_id, version=version)

    async def Examine(self, request: pb.ExamineRequest, context: Context) -> pb.ExamineResponse:
        """Have the doctor look at this node, and at a peer if one is named."""
        try:
            report = await self._examine(request.peer)
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.ExamineResponse(report=report)

    async def DispatchPressure(
        self, request: pb.DispatchPressureRequest, context: Context
    ) -> pb.DispatchPressureResponse:
        """Take what a host program was told of memory; it takes effect at once."""
        try:
            before = self._dispatch(request.level, request.free_bytes or None)
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        return pb.DispatchPressureResponse(level_before=before)


def _role(name: str) -> CertRole:
    try:
        return CertRole(name or CertRole.MEMBER)
    except ValueError:
        roles = ", ".join(CertRole)
        raise InvalidArgument(f"{name!r} is no role; give one of {roles}", param="role") from None


def control_socket(data_dir: Path) -> Path:
    """Where the socket of a data directory lies: in it, or, where its path would be too long to
    bind, in a folder of this user's in /tmp, made here. Not in $TMPDIR, which is another one for
    a node that launchd started than for a shell.

    Raises ConfigError when that folder is somebody else's.
    """
    inside = data_dir.absolute() / SOCKET
    if len(os.fsencode(inside)) <= MAX_SOCKET_PATH_BYTES:
        return inside
    name = hashlib.sha256(os.fsencode(inside)).hexdigest()[:16]
    folder = Path("/tmp") / f"kakeya-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(
            f"{folder} is not this user's alone; remove it, or choose a shorter --data-dir"
        )
    return folder / SOCKET
