"""Looks at nodes that are in doubt: dials them, has others dial them, and gives the verdict.

    a call failed, a connection broke, another node accuses, an accused node beats on,
    a node that offers something was only heard of
        -> one look at a time: GetNodeCapability, then GossipService.Probe through three others
        -> the book (`suspicion.py`) settles the doubt; a new accusation starts a round at once

Who is asked and fails too looks for itself, so a death goes through the fleet by probes in
seconds, faster than rounds would carry it. Nothing here dials what a message names: only cards
that this node holds, and so seldom that no request makes more traffic than it cost.
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
from kakeya.fleet.liveness.dialing import DIAL_TIMEOUT_S, Dialer, DialResult
from kakeya.fleet.liveness.indirect_probe import Context, IndirectProbeService
from kakeya.fleet.liveness.pacing import Moments, Shares
from kakeya.fleet.view.own_card import DEFENCE_S
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.fleet.view.suspicion import Doubt, Sign, is_refuted, judge
from kakeya.wire.channels import Channels

_log = logging.getLogger(__name__)
_SPACING_S = 0.25
"""Between two dials of one node: no burst of reasons to look makes a burst of calls."""
_ASK_SPACING_S = 2.0
"""Between two times that others are asked about one node that is not yet judged."""
_ECHOES = 2
"""More rounds after the one that begins with a new accusation: who was missed by the first round
and by the probes hears it within two revisits, not at its next round."""
_FALSE_HINT = 4
"""Accusations that one which proves false uses up: liars and heavy loss make few calls."""
_DEFENCES = 3
"""Rounds for one's own defence in an interval, one for each accuser: the beat that it begins with
refutes every accusation before it, and the next round is not far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """How patiently, through how many, how often."""

    timeout_s: float = DIAL_TIMEOUT_S
    helpers: int = 3
    interval_s: float = DEFAULT_INTERVAL_S
    """The accusation of one node is followed once in it."""
    revisit_s: float = 4.0
    """Doubted nodes are dialled again once in it, so one that returns is used within 6 s."""
    parallel: int = 16
    """Looks at a time; also dials at a time above which nobody's request starts another."""
    allowance: int = 32
    """Looks for accusations and dials for others in an interval, and doubted nodes dialled again
    at a time: more than die at once, and a fleet of any size bears it."""


class Prober:
    """Settles the doubts of one registry's book, and answers those who ask this node to try.

    `poke` asks for a gossip round soon, with a new beat of this node; `route` says where a node is
    best dialled, `may_dial` whether an address may be that only a card names. Give it to gossip as
    its `Accusations`, and `lost` to the channels.
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
        self._book = registry.suspicions
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
        """Addresses to look at, the longest due first."""
        self._wake = asyncio.Event()
        self._looking: set[str] = set()
        self._unproven: dict[str, dict[str, str]] = {}
        """By address that is looked at: the nodes there that are accused, and who accuses."""
        self._slots = asyncio.Semaphore(config.parallel)
        self._asked = Moments(config.interval_s)
        self._hinted = Moments(config.interval_s)
        self._defended_mono = float("-inf")
        self._defences = Shares(_DEFENCES, config.interval_s, share=1)
        self._echoes = 0
        # One liar must leave enough for those who tell the truth.
        share = max(1, config.allowance // 4)
        self._hints = Shares(config.allowance, config.interval_s, share=share)
        allowance = Shares(config.allowance, config.interval_s, share=share)
        self._favours = IndirectProbeService(
            registry, self._dialer, clock=clock, allowance=allowance, parallel=config.parallel
        )
        self._book.subscribe(self._demand)

    def start(self, supervisor: Supervisor) -> None:
        """Look at what is in doubt, under a supervisor."""
        supervisor.start("probing", self.run)

    async def run(self) -> None:
        """Look for ever."""
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

    # --- reasons to look

    def lost(self, address: str) -> None:
        """Take note that an open connection broke, as the channels tell it."""
        if self._cards_at(address):
            self._demand(address)

    def outgoing(self) -> tuple[Sign, ...]:
        """This node's own standing verdicts on nodes that it still shows."""
        sign_of = self._registry.sign_of
        return tuple(sign for sign in self._book.accusations() if sign_of(sign.node_id))

    def hear(self, accusations: Sequence[Sign], accuser: str = "") -> None:
        """Look at the accused of whom nothing later is held; refute what is said of oneself."""
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
        if card is None or self._book.doubt_of(card.grpc_address) is Doubt.FLEET_WIDE:
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
        await every(revisit_s, self._revisit, clock=self._clock, rng=self._rng)

    async def _revisit(self) -> None:
        """Dial doubted nodes again, and those that were only heard of: nobody else can tell when an
        edge works.

        New accusations are told once more, too.
        """
        unmet = self._registry.unmet(mono=self._clock.mono())
        doubted = sorted({*self._book.doubted(), *(card.grpc_address for card in unmet)})
        for address in self._rng.sample(doubted, min(len(doubted), self._config.allowance)):
            self._demand(address)
        if self._echoes:
            self._echoes -= 1
            self._poke()
        oldest_mono = self._clock.mono() - self._config.interval_s
        await self._dialer.forget(before_mono=oldest_mono, peers=self._peers())

    # --- a look

    async def _look(self, address: str) -> None:
        try:
            async with self._slots:
                for card in self._cards_at(address):  # one may lie about being there
                    await self._look_at(card)
        finally:
            self._looking.discard(address)
            self._unproven.pop(address, None)

    async def _look_at(self, card: Card) -> None:
        self._book.hold(card.grpc_address)
        try:
            reach = await self._dial(card)
            accuser = self._unproven.get(card.grpc_address, {}).pop(card.node_id, None)
            if reach is DialResult.REACHED and accuser is not None:
                self._hints.fine(accuser, _FALSE_HINT)
            if reach in (DialResult.FAILED, DialResult.MISSED) and self._may_ask(card):
                await self._judge(card, is_missed=reach is DialResult.MISSED)
        finally:
            self._book.release(card.grpc_address)

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
        if doubt is not self._book.doubt_of(card.grpc_address):
            event(_log, "node does not answer", node=card.node_id, doubt=doubt, asked=len(helpers))
        if self._book.settle(card, sign, doubt, self._clock.mono()):
            self._echoes = _ECHOES
            self._poke()

    def _may_ask(self, card: Card) -> bool:
        mono = self._clock.mono()
        match self._book.doubt_of(card.grpc_address):
            case Doubt.FLEET_WIDE:
                return False  # until a sign of life, asking again says nothing new
            case Doubt.ASYMMETRIC:
                return self._asked.is_due(card.node_id, mono, self._config.interval_s)
            case _:
                return self._asked.is_due(card.node_id, mono, _ASK_SPACING_S)

    def _choose_helpers(self, card: Card) -> list[Card]:
        has = self._book.has
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
        """Serve GossipService.Probe for those who cannot reach a node."""
        return await self._favours.answer(request, context)
