"""GossipService.Probe: this node, as a helper, tries to reach a node for a peer that cannot.

It dials only nodes by the live cards that it holds, never an address from a request, one call to a
node at a time and so seldom that no peer can use it to burden another node.
"""

from __future__ import annotations

import grpc.aio
from google.protobuf.message import DecodeError

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument, KakeyaError, NotFound, Refused
from kakeya.fleet.cards.cards import MAX_ID_BYTES
from kakeya.fleet.liveness.dialing import Dialer, DialResult
from kakeya.fleet.liveness.pacing import Shares
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1.fleet_pb2 import ProbeRequest, ProbeResponse
from kakeya.wire.server.authorization import calling_node
from kakeya.wire.status import abort

Context = grpc.aio.ServicerContext[bytes, bytes]
_MAX_REQUEST_BYTES = MAX_ID_BYTES + 16
_FRESH_S = 1.0
"""Time for which the result of the last dial of a node is used again."""


class IndirectProbeService:
    """Dials for peers: at most `parallel` at a time, and as often as `allowance` permits."""

    def __init__(
        self,
        registry: CapabilityRegistry,
        dialer: Dialer,
        *,
        clock: Clock,
        allowance: Shares,
        parallel: int,
    ) -> None:
        self._registry = registry
        self._dialer = dialer
        self._clock = clock
        self._allowance = allowance
        self._parallel = parallel

    async def answer(self, request: bytes, context: Context) -> bytes:
        """Say whether this node reaches the named node.

        NOT_FOUND for a node without a live card here, RESOURCE_EXHAUSTED above the allowance.
        """
        try:
            return await self._try_for(_read_node_id(request))
        except KakeyaError as failure:
            await abort(context, failure)
            raise

    async def _try_for(self, node_id: str) -> bytes:
        if node_id == self._registry.node_id:
            return ProbeResponse(is_reached=True).SerializeToString()
        mono = self._clock.mono()
        card = self._registry.get(node_id, mono=mono)
        if card is None:
            raise NotFound(
                f"no live card of node {node_id[:80]!r} is held; ask a node that has one"
            )
        dial = self._dialer.last(node_id)
        if dial is None or mono - dial.ended_mono > _FRESH_S:
            if not self._dialer.is_dialling(node_id):
                self._charge(mono)
            dial = await self._dialer.dial(card)
        if dial.reach is DialResult.UNSURE:
            raise Refused(f"whether node {node_id[:80]!r} answers could not be told; ask again")
        is_reached = dial.reach is DialResult.REACHED
        return ProbeResponse(is_reached=is_reached, rtt_ms=dial.rtt_s * 1e3).SerializeToString()

    def _charge(self, mono: float) -> None:
        if self._dialer.under_way >= self._parallel or not self._allowance.take(
            calling_node(), mono
        ):
            raise Refused(
                f"this node dials for others {self._allowance.limit} times in "
                f"{self._allowance.interval_s:g} s and {self._parallel} at a time; "
                "ask later or another",
                retry_after_s=self._allowance.interval_s,
            )


def _read_node_id(request: bytes) -> str:
    if len(request) > _MAX_REQUEST_BYTES:
        raise InvalidArgument(f"a probe request has {len(request)} bytes; a node id has fewer")
    try:
        return ProbeRequest.FromString(request).node_id
    except DecodeError as failure:
        raise InvalidArgument("a probe request must hold a node id") from failure
