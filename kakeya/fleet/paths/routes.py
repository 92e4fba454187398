"""Probes the addresses of nodes that have several, and chooses the address to use.

The choice is made in `endpoints.py`; here are the clock, the calls and the log. An answer counts
only if it names the node: another machine may have the same address on another cable. Nodes with a
single address are not probed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError
from kakeya.core.ids import NodeId
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, shared_pause_s
from kakeya.fleet.cards.cards import Card, Endpoint
from kakeya.fleet.gossip.describe import ask_card
from kakeya.fleet.paths.endpoints import EdgeState, Route, RouteBook, RouteChange
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.wire.channels import Channels

_log = logging.getLogger(__name__)
TICK_S = 1.0
REST_S = 4.0
"""Between two looks where no node has several addresses and no card brings news."""
PROBE_S = 1.0
MAX_PROBES = 16
"""Most probes in one tick: a small fleet is watched each two seconds, a large one more seldom."""
_LAG_S = 0.5
"""A deadline noticed this late shows that this node was busy, not the other one."""


class Routes:
    """Keeps a RouteBook by probing; `address_for` is where calls to a node go.

    `may_dial` checks every endpoint that a card names; `on_change` gets each change of way, after
    it was logged; `on_answer` gets each address that answered, with its time in milliseconds.
    """

    def __init__(
        self,
        registry: CapabilityRegistry,
        *,
        channels: Channels,
        clock: Clock,
        may_dial: Callable[[str], bool] = lambda address: True,
        on_change: Callable[[RouteChange], None] | None = None,
        on_answer: Callable[[str, float], None] | None = None,
    ) -> None:
        self._registry = registry
        self._channels = channels
        self._clock = clock
        self._may_dial = may_dial
        self._on_change, self._on_answer = on_change, on_answer
        self._book = RouteBook()
        self._news = asyncio.Event()
        registry.subscribe(self._news.set)
        self._under_way: dict[tuple[NodeId, str], asyncio.Task[None]] = {}
        self._downgrades = 0

    def address_for(self, card: Card) -> str:
        """The address to use for the node of a card."""
        return self._book.address(card.node_id) or card.grpc_address

    def routes(self) -> tuple[Route, ...]:
        """The way to each node that has several, for status and metrics."""
        return self._book.routes()

    @property
    def downgrades(self) -> int:
        """Count of lost better links since the start."""
        return self._downgrades

    def lost(self, address: str) -> None:
        """Probe at once an address where a call or a connection broke."""
        self._book.retry(address)

    def interfaces_changed(self) -> None:
        """Probe failed addresses at once: a cable came or went."""
        self._book.retry_all()

    def start(self, supervisor: Supervisor) -> None:
        """Probe under a supervisor."""
        supervisor.start("routes", self.run)

    async def run(self) -> None:
        """Probe for ever; a node without peers waits for the first one."""
        try:
            while True:
                self._news.clear()
                if not self.tick():
                    await self._news.wait()
                    continue
                is_watched = bool(self._book.routes())
                if not is_watched:
                    rest_s = shared_pause_s(REST_S, self._clock.mono())
                    await self._clock.sleep(rest_s, self._news)
                if is_watched or self._news.is_set():
                    await self._clock.sleep(TICK_S)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Give up the probes under way."""
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def tick(self) -> bool:
        """Take in the cards as they are now and start the probes that are due; return whether a
        peer is held: one whose time is over comes back by a beat, without news."""
        mono = self._clock.mono()
        _, *peers = self._registry.snapshot(mono=mono)
        for card in peers:
            self._book.learn(card.node_id, self._ways(card))
        self._book.keep_only({card.node_id for card in peers})
        room = MAX_PROBES - len(self._under_way)
        for way in self._book.due(mono, max(0, room)):
            if way not in self._under_way:
                task = asyncio.get_running_loop().create_task(self._probe(*way))
                self._under_way[way] = task
                task.add_done_callback(functools.partial(self._ended, way))
        return len(self._registry) > 1

    def _ended(self, way: tuple[NodeId, str], _: asyncio.Task[None]) -> None:
        self._under_way.pop(way, None)

    def _ways(self, card: Card) -> tuple[Endpoint, ...]:
        if not card.endpoints:
            return ()
        ways = {way.address: way for way in card.endpoints if self._may_dial(way.address)}
        if card.grpc_address not in ways and self._may_dial(card.grpc_address):
            ways[card.grpc_address] = Endpoint(card.grpc_address)
        return tuple(ways.values())

    async def _probe(self, node_id: NodeId, address: str) -> None:
        if self._book.state(node_id, address) is EdgeState.FAILED:
            # The old channel would wait out a backoff, or for packets that were lost long ago.
            await self._channels.discard(address, node_id)
        started_mono = self._clock.mono()
        answerer = await self._who_answers(node_id, address)
        ended_mono = self._clock.mono()
        rtt_s = ended_mono - started_mono
        if answerer == node_id:
            self._registry.meet(node_id, address)
            if self._on_answer is not None:
                self._on_answer(address, rtt_s * 1000)
            change = self._book.worked(node_id, address, rtt_ms=rtt_s * 1000, mono=ended_mono)
            if change is not None:
                self._tell(change)
        elif rtt_s <= PROBE_S + _LAG_S:
            self._book.failed(address, node_id=node_id, mono=ended_mono)
        if self._book.is_spare(node_id, address):
            # Peers bound the connections of one node; those that are used come first.
            await self._channels.discard(address, node_id)

    async def _who_answers(self, node_id: NodeId, address: str) -> str:
        try:
            channel = self._channels.get(address, node_id)
            found = await ask_card(channel, address, timeout_s=PROBE_S)
        except KakeyaError:
            return ""
        return found.node_id

    def _tell(self, change: RouteChange) -> None:
        self._downgrades += change.is_downgrade
        event(
            _log,
            "a better link was lost" if change.is_downgrade else "another link is in use",
            level=logging.WARNING if change.is_downgrade else logging.INFO,
            node=change.node_id,
            before=f"{change.before.network or 'unnamed'} {change.before.address}",
            after=f"{change.after.network or 'unnamed'} {change.after.address}",
        )
        if self._on_change is not None:
            self._on_change(change)
