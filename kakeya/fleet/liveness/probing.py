"""Probes nodes that are in doubt: dials them, has helpers dial them, and gives the verdict.

    a call failed, a connection broke, another node accuses, an accused node beats on,
    a node with models is known from relays alone
        -> one probe at a time: GetNodeCapability, then GossipService.Probe through three helpers
        -> `suspicion.py` settles the doubt; a new accusation starts a round at once

A helper that fails too probes for itself, so the news of a death spreads by probes in seconds,
faster than by rounds. Nothing here dials an address from a message: only the cards that this node
holds, and so seldom that no request makes more traffic than it cost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kakeya.core.clock import Clock
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, every
from kakeya.fleet.cards.cards import DEFAULT_INTERVAL_S, Card
from kakeya.fleet.liveness.dialing import DIAL_TIMEOUT_S, Dial, Dialer, DialResult
from kakeya.fleet.liveness.indirect_probe import Context, IndirectProbeService
from kakeya.fleet.liveness.pacing import Moments, Shares
from kakeya.fleet.view.own_card import DEFENCE_S
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.fleet.view.suspicion import Doubt, Sign, is_refuted, judge
from kakeya.wire.channels import Channels

_log = logging.getLogger(__name__)
_SPACING_S = 0.25
"""Least time between two dials of one node: a burst of reasons makes no burst of calls."""
_ASK_SPACING_S = 2.0
"""Least time between two questions to helpers about one node that is not yet judged."""
_ECHOES = 2
"""Extra rounds after the one that begins with a new accusation: a peer that the first round and the
probes missed hears it within two revisits, not at its next round."""
_FALSE_HINT = 4
"""Allowance that a false accusation uses up: liars and heavy loss then cause few calls."""
_DEFENCES = 3
"""Rounds in own defence in an interval, one for each accuser: the beat at its begin refutes every
accusation before it, and the next round is not far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """Patience, count of helpers and pace of probes."""

    timeout_s: float = DIAL_TIMEOUT_S
    helpers: int = 3
    interval_s: float = DEFAULT_INTERVAL_S
    """Time in which an accusation against one node leads to one probe."""
    revisit_s: float = 4.0
    """Time between two dials of a doubted node, so that a returned node is used within 6 s."""
    parallel: int = 16
    """Most probes at a time; also the count of dials above which no peer's request starts one."""
    allowance: int = 32
    """Probes for accusations and dials for peers in an interval, and doubted nodes dialled again
    at a time: more than die at once, and few enough for a fleet of any size."""


class Prober:
    """Settles the doubts of one registry, and answers peers that ask this node to probe.

    `poke` asks for a gossip round soon, with a new beat of this node; `route` gives the best
    address of a node, `may_dial` checks an address that only a card names. Gossip gets this object
    as its `Accusations`, and the channels its `lost`.
    """

    def __init__(
        self,
        registry: CapabilityRegistry,
        *,
        channels: Channels,
        clock: Clock,
        rng: random.Random,
        poke: Callable[[], None],
        route: Callable[[Card], str] = lambda card: card.grpc_address,
        may_dial: Callable[[str], bool] = lambda address: True,
        config: ProbeConfig | None = None,
    ) -> None:
        self._config = config = config or ProbeConfig()
        self._registry = registry
        self._suspicions = registry.suspicions
        self._clock = clock
        self._rng = rng
        self._poke = poke
        self._route = route
        self._dialer = Dialer(
            registry,
            channels=channels,
            clock=clock,
            route=route,
            may_dial=may_dial,
            timeout_s=config.timeout_s,
        )
        self._due: dict[str, None] = {}
        """Addresses to probe, the longest due first."""
        self._wake = asyncio.Event()
        self._looking: set[str] = set()
        self._unproven: dict[str, dict[str, str]] = {}
        """Accused nodes and their accusers, by the address to be probed."""
        self._slots = asyncio.Semaphore(config.parallel)
        self._asked = Moments(config.interval_s)
        self._hinted = Moments(config.interval_s)
        self._defended_mono = float("-inf")
        self._defences = Shares(_DEFENCES, config.interval_s, share=1)
        self._echoes = 0
        # One liar must leave enough allowance for honest accusers.
        share = max(1, config.allowance // 4)
        self._hints = Shares(config.allowance, config.interval_s, share=share)
        allowance = Shares(config.allowance, config.interval_s, share=share)
        self._favours = IndirectProbeService(
            registry, self._dialer, clock=clock, allowance=allowance, parallel=config.parallel
        )
        self._suspicions.subscribe(self._demand)

    def start(self, supervisor: Supervisor) -> None:
        """Probe nodes in doubt, under a supervisor."""
        supervisor.start("probing", self.run)

    @property
    def is_idle(self) -> bool:
        """Whether no look is under way or due."""
        return not self._looking and not self._due

    @property
    def due(self) -> int:
        """Count of probes that have yet to begin."""
        return len(self._due)

    def last(self, node_id: str) -> Dial | None:
        """The latest dial of a node that has ended, unless it was forgotten."""
        return self._dialer.last(node_id)

    async def run(self) -> None:
        """Probe for ever."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._revisit_for_ever())
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    due, self._due = self._due, {}
                    self._looking.update(due)
                    for address in due:
                        group.create_task(self._look(address))
        finally:
            self._looking.clear()
            await self._dialer.aclose()

    # --- reasons to probe

    def lost(self, address: str) -> None:
        """Note that an open connection broke; the channels call this."""
        if self._cards_at(address):
            self._demand(address)

    def outgoing(self) -> tuple[Sign, ...]:
        """This node's own standing verdicts on nodes that it still shows."""
        sign_of = self._registry.sign_of
        return tuple(sign for sign in self._suspicions.accusations() if sign_of(sign.node_id))

    def hear(self, accusations: Sequence[Sign], accuser: str = "") -> None:
        """Probe accused nodes without a later sign of life; refute accusations of this node."""
        mono = self._clock.mono()
        for accusation in accusations:
            held = self._registry.sign_of(accusation.node_id)
            if held is None or is_refuted(accusation, held):
                continue
            if accusation.node_id == self._registry.node_id:
                self._defend(accuser, mono)
            elif self._hinted.is_due(accusation.node_id, mono, self._config.interval_s):
                self._follow(accusation.node_id, accuser, mono)

    def _defend(self, accuser: str, mono: float) -> None:
        if mono - self._defended_mono >= DEFENCE_S and self._defences.take(accuser, mono):
            self._defended_mono = mono
            self._poke()

    def _follow(self, node_id: str, accuser: str, mono: float) -> None:
        card = self._registry.get(node_id, mono=self._clock.mono())
        if card is None or self._suspicions.doubt_of(card.grpc_address) is Doubt.FLEET_WIDE:
            return
        if self._hints.take(accuser, mono):
            self._hinted.note(node_id, mono)
            self._unproven.setdefault(card.grpc_address, {})[node_id] = accuser
            self._demand(card.grpc_address)

    def _demand(self, address: str) -> None:
        if address not in self._looking:
            self._due[address] = None
            self._wake.set()

    async def _revisit_for_ever(self) -> None:
        revisit_s = self._config.revisit_s
        await every(revisit_s, self._revisit, clock=self._clock, rng=self._rng, is_shared=True)

    async def _revisit(self) -> None:
        """Dial doubted nodes again, and those known from relays alone: no other node can tell when
        this edge works.

        New accusations are told once more, too.
        """
        unmet = self._registry.unmet(mono=self._clock.mono())
        doubted = sorted({*self._suspicions.doubted(), *(card.grpc_address for card in unmet)})
        for address in self._rng.sample(doubted, min(len(doubted), self._config.allowance)):
            self._demand(address)
        if self._echoes:
            self._echoes -= 1
            self._poke()
        oldest_mono = self._clock.mono() - self._config.interval_s
        await self._dialer.forget(before_mono=oldest_mono, peers=self._peers())

    # --- one probe

    async def _look(self, address: str) -> None:
        try:
            async with self._slots:
                for card in self._cards_at(address):  # a node may claim an address where it is not
                    await self._look_at(card)
        finally:
            self._looking.discard(address)
            self._unproven.pop(address, None)

    async def _look_at(self, card: Card) -> None:
        self._suspicions.hold(card.grpc_address)
        try:
            reach = await self._dial(card)
            accuser = self._unproven.get(card.grpc_address, {}).pop(card.node_id, None)
            if reach is DialResult.REACHED and accuser is not None:
                self._hints.fine(accuser, _FALSE_HINT)
            if reach in (DialResult.FAILED, DialResult.MISSED) and self._may_ask(card):
                await self._judge(card, is_missed=reach is DialResult.MISSED)
        finally:
            self._suspicions.release(card.grpc_address)

    async def _dial(self, card: Card) -> DialResult:
        last = self._dialer.last(card.node_id)
        if last is not None:
            await self._clock.sleep(last.ended_mono + _SPACING_S - self._clock.mono())
        return (await self._dialer.dial(card)).reach

    async def _judge(self, card: Card, *, is_missed: bool) -> None:
        self._asked.note(card.node_id, self._clock.mono())
        helpers = self._choose_helpers(card)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._dialer.ask(one, card.node_id)) for one in helpers]
            # A deadline can pass by one lost packet, so meanwhile this node tries again itself.
            is_silent = not is_missed or await self._dial(card) in (
                DialResult.FAILED,
                DialResult.MISSED,
            )
        doubt = judge([task.result() for task in asked])
        sign = self._registry.sign_of(card.node_id)
        if not is_silent or sign is None or sign.incarnation != card.incarnation:
            return  # it answers, is gone, or started again meanwhile
        if doubt is not self._suspicions.doubt_of(card.grpc_address):
            words = {"node": card.node_id, "doubt": doubt, "asked": len(helpers)}
            event(_log, "node does not answer", level=logging.DEBUG, **words)
        if self._suspicions.settle(card, sign, doubt, self._clock.mono()):
            self._echoes = _ECHOES
            self._poke()

    def _may_ask(self, card: Card) -> bool:
        mono = self._clock.mono()
        match self._suspicions.doubt_of(card.grpc_address):
            case Doubt.FLEET_WIDE:
                return False  # until a sign of life, the helpers would answer the same
            case Doubt.ASYMMETRIC:
                return self._asked.is_due(card.node_id, mono, self._config.interval_s)
            case _:
                return self._asked.is_due(card.node_id, mono, _ASK_SPACING_S)

    def _choose_helpers(self, card: Card) -> list[Card]:
        has = self._suspicions.has
        able = [
            peer
            for peer in self._peers()
            if peer.is_extended and peer.node_id != card.node_id and not has(peer.grpc_address)
        ]
        return self._rng.sample(able, min(len(able), self._config.helpers))

    def _cards_at(self, address: str) -> list[Card]:
        peers, route = self._peers(), self._route
        return [card for card in peers if address in (card.grpc_address, route(card))]

    def _peers(self) -> Sequence[Card]:
        return self._registry.snapshot(mono=self._clock.mono())[1:]

    async def answer_probe(self, request: bytes, context: Context) -> bytes:
        """Serve GossipService.Probe for peers that cannot reach a node."""
        return await self._favours.answer(request, context)
