"""The nodes of a fleet that sessions move between, and what is sent of a session."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import grpc.aio

from kakeya.core.units import pack_ids
from kakeya.fleet.cards.cards import CardRole
from kakeya.generation.engine_wire import ids_from_wire
from kakeya.prefix.peers.peers import Neighbourhood
from kakeya.prefix.seam import Warmed
from kakeya.sessions.session import MovedSession
from kakeya.v1 import sessions_pb2 as pb
from kakeya.v1.sessions_pb2_grpc import SessionMoveServiceStub
from kakeya.wire.calls import calling

if TYPE_CHECKING:
    from kakeya.v1.sessions_pb2_grpc import SessionMoveServiceAsyncStub

MOVE_S = 2.0
WARM_S = 30.0
"""How long the KV of a session may take; what is missing then is computed by its next turn."""


class SessionPeer(Protocol):
    """A node that sessions can be given to and taken from. Calls raise its errors."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def address(self) -> str:
        """Its HOST:PORT of gRPC."""
        ...

    async def give(self, session: MovedSession) -> None:
        """Have it take a session over."""
        ...

    async def warm(self, session_id: str) -> Warmed:
        """Have it fetch or compute the KV of a session that was given to it."""
        ...

    async def take(self, session_id: str, *, taker: str = "", remove: bool = False) -> MovedSession:
        """Get a session of it, which it then has no more with `remove`."""
        ...


class SessionPeers(Protocol):
    """The other nodes."""

    def offering(self, model_id: str) -> Sequence[SessionPeer]:
        """Those with a model, the trusted ones first."""
        ...

    def all(self) -> Sequence[SessionPeer]:
        """Every live one."""
        ...


class RemotePeer:
    """A `SessionPeer` over a channel."""

    def __init__(self, channel: grpc.aio.Channel, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._stub: SessionMoveServiceAsyncStub = SessionMoveServiceStub(channel)

    async def give(self, session: MovedSession) -> None:
        """See `SessionPeer`."""
        with calling(self.name):
            await self._stub.GiveSession(
                pb.GiveSessionRequest(session=moved_to_wire(session)), timeout=MOVE_S
            )

    async def warm(self, session_id: str) -> Warmed:
        """See `SessionPeer`."""
        with calling(self.name):
            request = pb.WarmSessionRequest(session_id=session_id)
            reply = await self._stub.WarmSession(request, timeout=WARM_S)
        return Warmed(cached=reply.cached_tokens, computed=reply.computed_tokens)

    async def take(self, session_id: str, *, taker: str = "", remove: bool = False) -> MovedSession:
        """See `SessionPeer`."""
        with calling(self.name):
            request = pb.TakeSessionRequest(session_id=session_id, taker=taker, remove=remove)
            return moved_from_wire((await self._stub.TakeSession(request, timeout=MOVE_S)).session)


class FleetPeers:
    """`SessionPeers` by their cards."""

    def __init__(self, plane: Neighbourhood, mono: Callable[[], float]) -> None:
        self._plane = plane
        self._mono = mono

    def offering(self, model_id: str) -> Sequence[RemotePeer]:
        """See `SessionPeers`; of BASE:NAME those with the base."""
        return self._found({model_id, model_id.rpartition(":")[0]} - {""})

    def all(self) -> Sequence[RemotePeer]:
        """See `SessionPeers`."""
        return self._found(None)

    def _found(self, models: Collection[str] | None) -> Sequence[RemotePeer]:
        plane, found = self._plane, []
        suspects = plane.registry.suspects()
        for card in plane.registry.live_peers(mono=self._mono()):
            offered = {str(one.model_id) for one in card.offers(CardRole.VERIFIER)}
            if not card.is_extended or (models is not None and offered.isdisjoint(models)):
                continue
            address = plane.routes.address_for(card)
            if address and not plane.why_not_dial(address):
                channel = plane.channels.get(address, card.node_id)
                peer = RemotePeer(channel, card.label or card.node_id, address)
                found.append((card.node_id in suspects, peer))
        return [peer for _, peer in sorted(found, key=lambda one: one[0])]


def moved_to_wire(session: MovedSession) -> pb.MovedSession:
    """The message of a session."""
    return pb.MovedSession(
        session_id=session.session_id,
        model_id=session.model_id,
        client=session.client,
        label=session.label,
        stop_token_ids=session.stop_token_ids,
        token_ids_le32=pack_ids(session.history),
        idle_seconds=session.idle_s,
        weights=session.weights,
    )


def moved_from_wire(message: pb.MovedSession) -> MovedSession:
    """The session in a message. Raises InvalidArgument for torn token ids."""
    return MovedSession(
        session_id=message.session_id,
        model_id=message.model_id,
        client=message.client,
        label=message.label,
        stop_token_ids=frozenset(message.stop_token_ids),
        history=ids_from_wire(message.token_ids_le32),
        idle_s=max(0.0, message.idle_seconds),  # nor NaN
        weights=message.weights,
    )
