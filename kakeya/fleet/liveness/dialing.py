"""Calls that find out whether a node answers: dials of the node, and probes through helpers.

Each call goes to one node, which must show its own certificate, even if other nodes claim its
address. One call to a node runs at a time, and later callers wait for the same answer. Each ends
within its deadline, never as an exception of the probe that it is part of.
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
from kakeya.core.errors import DeadlineExceeded, KakeyaError, PeerUnavailable
from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.gossip.describe import ask_card
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1.fleet_pb2 import ProbeRequest, ProbeResponse
from kakeya.wire.calls import call_bytes
from kakeya.wire.channels import Channels

PROBE_METHOD = "/kakeya.v1.GossipService/Probe"
DIAL_TIMEOUT_S = 1.5
MAX_OPEN = 32
"""Connections that stay open after a first meeting: a newcomer meets the whole fleet at once."""
_RELAY_S = 1.0
"""Time that a helper's answer takes beside its dial."""
_LAG_S = 0.5
"""A deadline noticed this late shows that this node was busy, not the other one."""


class DialResult(Enum):
    """The outcome of a dial."""

    REACHED = auto()
    FAILED = auto()
    MISSED = auto()
    UNSURE = auto()
    """Proves nothing: this node was busy, the other one refused, or another node answered."""


class Dial(NamedTuple):
    """One call to a node, and when it ended."""

    reach: DialResult
    ended_mono: float
    rtt_s: float


class Dialer:
    """Dials nodes by their cards; notes in the registry which nodes answered."""

    def __init__(
        self,
        registry: CapabilityRegistry,
        *,
        channels: Channels,
        clock: Clock,
        route: Callable[[Card], str],
        may_dial: Callable[[str], bool] = lambda address: True,
        timeout_s: float = DIAL_TIMEOUT_S,
    ) -> None:
        """`may_dial` checks every address: the addresses on a card are only its owner's claim."""
        self._may_dial = may_dial
        self._registry = registry
        self._channels = channels
        self._clock = clock
        self._route = route
        self._timeout_s = timeout_s
        self._under_way: dict[str, asyncio.Task[Dial]] = {}
        self._last: dict[str, Dial] = {}
        self._used: set[tuple[str, NodeId]] = set()
        """Addresses with a channel that this part may have opened."""

    @property
    def under_way(self) -> int:
        """Count of nodes that are being dialled."""
        return len(self._under_way)

    def last(self, node_id: str) -> Dial | None:
        """The latest dial of a node that has ended, unless it was forgotten."""
        return self._last.get(node_id)

    def is_dialling(self, node_id: str) -> bool:
        """Whether a call to the node is under way, which another dial would join."""
        return node_id in self._under_way

    async def forget(self, *, before_mono: float, peers: Sequence[Card]) -> None:
        """Drop dials that ended before `before_mono`, and channels to nodes outside of `peers`."""
        for node_id in [n for n, dial in self._last.items() if dial.ended_mono < before_mono]:
            del self._last[node_id]
        gone = self._used.difference((self._route(peer), peer.node_id) for peer in peers)
        self._used -= gone
        for address, node_id in gone:  # else the channel would try to connect for ever
            await self._channels.discard(address, node_id)

    async def dial(self, card: Card) -> Dial:
        """Call the node of a card; joins a call that is under way."""
        task = self._under_way.get(card.node_id)
        if task is None:
            task = asyncio.create_task(self._dial(card), name=f"dial {card.node_id}")
            self._under_way[card.node_id] = task
            task.add_done_callback(lambda _: self._under_way.pop(card.node_id, None))
        # A caller that is cancelled must not take the answer from the others.
        return await asyncio.shield(task)

    async def ask(self, helper: Card, node_id: str) -> bool | None:
        """Ask a helper whether it reaches a node; None = the helper gave no answer."""
        request = ProbeRequest(node_id=node_id).SerializeToString()
        try:
            if not self._may_dial(self._route(helper)):
                return None
            answer = await call_bytes(
                await self._channel(helper),
                self._route(helper),
                PROBE_METHOD,
                request,
                timeout_s=self._timeout_s + _RELAY_S,
            )
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
        is_hearsay = self._registry.peers.is_hearsay(card)
        reach = await self._reach(card)
        ended_mono = self._clock.mono()
        if reach is not DialResult.REACHED and ended_mono - started_mono > self._timeout_s + _LAG_S:
            reach = DialResult.UNSURE
        dial = Dial(reach, ended_mono, ended_mono - started_mono)
        self._last[card.node_id] = dial
        match reach:
            case DialResult.REACHED:
                self._registry.meet(card.node_id, self._route(card))
                self._registry.mark_alive(card.node_id)
                if is_hearsay and len(self._used) > MAX_OPEN:
                    await self._close(self._route(card), card.node_id)
            case DialResult.FAILED:
                self._registry.mark_failed(card.node_id, mono=ended_mono)
            case DialResult.MISSED:
                self._registry.mark_missed(card.node_id, mono=ended_mono)
            case DialResult.UNSURE:
                pass
        return dial

    async def _reach(self, card: Card) -> DialResult:
        address = self._route(card)
        if not self._may_dial(address):
            return DialResult.UNSURE
        try:
            found = await ask_card(await self._channel(card), address, timeout_s=self._timeout_s)
        except DeadlineExceeded:
            return DialResult.MISSED
        except PeerUnavailable:
            return await self._reach_of_lost(card, address)
        except KakeyaError:
            return DialResult.UNSURE  # a process lives there, and refuses or is no node
        return DialResult.REACHED if found.node_id == card.node_id else DialResult.UNSURE

    async def _reach_of_lost(self, card: Card, address: str) -> DialResult:
        self._registry.miss(card.node_id, address)
        if not self._registry.met_at(address):
            return DialResult.FAILED
        # Another node answers there, which proves nothing about the node that claims the address.
        await self._close(address, card.node_id)
        return DialResult.UNSURE

    async def _close(self, address: str, node_id: NodeId) -> None:
        self._used.discard((address, node_id))
        await self._channels.discard(address, node_id)

    async def _channel(self, card: Card) -> grpc.aio.Channel:
        address = self._route(card)
        self._used.add((address, card.node_id))
        channel = self._channels.get(address, card.node_id)
        if channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            # The channel repeats its last failure until its backoff ends; a dial must try again.
            await self._channels.discard(address, card.node_id)
            channel = self._channels.get(address, card.node_id)
        return channel
