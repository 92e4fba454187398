"""SessionMoveService on grpc.aio: sessions that come from and go to the other nodes."""

from __future__ import annotations

from typing import Any

import grpc.aio

from kakeya.sessions.mover import SessionMover
from kakeya.sessions.peers import moved_from_wire, moved_to_wire
from kakeya.v1 import sessions_pb2 as pb
from kakeya.v1.sessions_pb2_grpc import SessionMoveServiceServicer
from kakeya.wire.status import errors_end

Context = grpc.aio.ServicerContext[Any, Any]


class SessionMoveService(SessionMoveServiceServicer):
    """Translates the calls of peers."""

    def __init__(self, mover: SessionMover) -> None:
        self._mover = mover

    async def GiveSession(
        self, request: pb.GiveSessionRequest, context: Context
    ) -> pb.GiveSessionResponse:
        """Take a session over."""
        async with errors_end(context):
            self._mover.accept(moved_from_wire(request.session))
        return pb.GiveSessionResponse()

    async def WarmSession(
        self, request: pb.WarmSessionRequest, context: Context
    ) -> pb.WarmSessionResponse:
        """Have the KV of a session warm."""
        async with errors_end(context):
            warmed = await self._mover.warm(request.session_id)
            return pb.WarmSessionResponse(
                cached_tokens=warmed.cached, computed_tokens=warmed.computed
            )
        raise AssertionError("abort returned")

    async def TakeSession(
        self, request: pb.TakeSessionRequest, context: Context
    ) -> pb.TakeSessionResponse:
        """Give a session to the node that a client asked for it."""
        async with errors_end(context):
            session = self._mover.hand_out(
                request.session_id, taker=request.taker, remove=request.remove
            )
            return pb.TakeSessionResponse(session=moved_to_wire(session))
        raise AssertionError("abort returned")
