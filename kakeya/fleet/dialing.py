"""Calls that find out whether a node answers: to itself, and to others that are asked to try.

One call to a node at a time: who wants to know meanwhile waits for the same answer. Each ends
within its deadline, never as an exception of the look that it is part of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    DeadlineExceeded,
    KakeyaError,
    PeerProtocol,
    PeerUnavailable,
)
from kakeya.fleet.cards import Card
from kakeya.fleet.convert import MalformedCard, from_wire, split_cards
from kakeya.fleet.registry import CapabilityRegistry
from kakeya.v1.fleet_pb2 import ProbeRequest, ProbeResponse
from kakeya.wire.channels import Channels
from kakeya.wire.status import error_from_rpc

DESCRIBE_METHOD = "/kakeya.v1.CapabilityService/GetNodeCapability"
PROBE_METHOD = "/kakeya.v1.GossipService/Probe"
DIAL_TIMEOUT_S = 1.5
_RELAY_S = 1.0
"""What asking another node takes beside its dial."""
_LAG_S = 0.5
"""A deadline noticed this late says that this node was busy, not that the other one was."""


class Reach(Enum):
    """What came of a dial."""

    REACHED = auto()
    FAILED = auto()
    MISSED = auto()
    UNSURE = auto()
    """Says nothing: this node was busy, the other one refused, or somebody else answered."""


class Dial(NamedTuple):
    """One call to a node, and when it ended."""

    reach: Reach
    ended_mono: float
    rtt_s: float


class Dialer:
    """Dials nodes by their cards; notes in the registry who answered and who did not."""

    def __init__(
        self,
        registry: CapabilityRegistry,
        *,
        channels: Channels,
        clock: Clock,
        route: Callable[[Card], str],
        timeout_s: float = DIAL_TIMEOUT_S,
    ) -> None:
        self._registry = registry
        self._channels = channels
        self._clock = clock
        self._route = route
        self._timeout_s = timeout_s
        self._under_way: dict[str, asyncio.Task[Dial]] = {}
        self._last: dict[str, Dial] = {}
        self._used: set[str] = set()
        """Addresses of which this part may have opened the channel."""

    @property
    def under_way(self) -> int:
        """How many nodes are being dialled."""
        return len(self._under_way)

    def last(self, node_id: str) -> Dial | None:
        """The latest dial of a node that has ended, unless it was forgotten."""
        return self._last.get(node_id)

    def is_dialling(self, node_id: str) -> bool:
        """Whether a call to the node is under way, which another dial would join."""
        return node_id in self._under_way

    async def forget(self, *, before_mono: float, peers: Sequence[Card]) -> None:
        """Drop dials that ended before then, and the channels to who is not among the peers."""
        for node_id in [n for n, dial in self._last.items() if dial.ended_mono < before_mono]:
            del self._last[node_id]
        gone = self._used.difference(map(self._route, peers))
        self._used -= gone
        for address in gone:  # else it would try to connect for ever
            await self._channels.discard(address)

    async def dial(self, card: Card) -> Dial:
        """Call the node that a card is of; joins a call that is under way."""
        task = self._under_way.get(card.node_id)
        if task is None:
            task = asyncio.create_task(self._dial(card), name=f"dial {card.node_id}")
            self._under_way[card.node_id] = task
            task.add_done_callback(lambda _: self._under_way.pop(card.node_id, None))
        # Who loses interest must not take the answer from the others.
        return await asyncio.shield(task)

    async def ask(self, helper: Card, node_id: str) -> bool | None:
        """Ask another node whether it reaches one; None = it gave no answer."""
        request = ProbeRequest(node_id=node_id).SerializeToString()
        try:
            answer = await self._call(helper, PROBE_METHOD, request, self._timeout_s + _RELAY_S)
            return ProbeResponse.FromString(answer).is_reached
        except (KakeyaError, DecodeError):
            return None

    async def aclose(self) -> None:
        """Give up the calls under way."""
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dial(self, card: Card) -> Dial:
        started_mono = self._clock.mono()
        reach = await self._reach(card)
        ended_mono = self._clock.mono()
        if reach is not Reach.REACHED and ended_mono - started_mono > self._timeout_s + _LAG_S:
            reach = Reach.UNSURE
        dial = Dial(reach, ended_mono, ended_mono - started_mono)
        self._last[card.node_id] = dial
        match reach:
            case Reach.REACHED:
                self._registry.mark_alive(card.node_id)
            case Reach.FAILED:
                self._registry.mark_failed(card.node_id, mono=ended_mono)
            case Reach.MISSED:
                self._registry.mark_missed(card.node_id, mono=ended_mono)
            case Reach.UNSURE:
                pass
        return dial

    async def _reach(self, card: Card) -> Reach:
        try:
            answer = await self._call(card, DESCRIBE_METHOD, b"", self._timeout_s)
            is_it = _owner_of(answer) == card.node_id
        except DeadlineExceeded:
            return Reach.MISSED
        except PeerUnavailable:
            return Reach.FAILED
        except KakeyaError:
            return Reach.UNSURE  # something lives there, and refuses or is no node
        return Reach.REACHED if is_it else Reach.UNSURE

    async def _call(self, card: Card, method: str, request: bytes, timeout_s: float) -> bytes:
        address = self._route(card)
        self._used.add(address)
        channel = self._channels.get(address)
        if channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # It would repeat its last failure until its backoff ends; a dial is to find out anew.
            await self._channels.discard(address)
            channel = self._channels.get(address)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        try:
            answer: bytes = await call(request, timeout=timeout_s)
        except grpc.RpcError as failure:
            raise error_from_rpc(failure, address) from failure
        except grpc.aio.UsageError as failure:
            raise PeerUnavailable(f"{address}: the channel was closed before the call") from failure
        except asyncio.CancelledError as failure:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise PeerUnavailable(f"{address}: the channel was closed during the call") from failure
        return answer


def _owner_of(answer: bytes) -> str:
    """Read whose card a node answers with; `GetNodeCapabilityResponse` is a batch of one."""
    try:
        wires = split_cards(answer)
        return from_wire(wires[0]).node_id if wires else ""
    except (MalformedCard, KakeyaError) as failure:
        raise PeerProtocol(f"a node answers with what is no card: {failure}") from failure
