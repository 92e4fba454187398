"""The fleet half of a node, built and wired here: its identity, its view of peers, its trust.

    identity and trust    none on loopback and with --insecure-lan
    registry, sync        the cards, and their exchange
    gossip, prober        the loops that keep the cards true
    routes, discovery     the chosen address of each node, and new addresses
    membership            renewal, invites, revocations

Models are not known here: the agent passes the offer of this node, and asks for those of others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.figures import Figure
from kakeya.core.ids import NodeId
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Card, Offer
from kakeya.fleet.cards.names import names_of
from kakeya.fleet.config import FleetConfig
from kakeya.fleet.gossip.gossip import Gossip, GossipConfig
from kakeya.fleet.gossip.outcome import Round
from kakeya.fleet.gossip.service import CapabilityService, register
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.gossip.watch_service import FleetWatchService
from kakeya.fleet.identity.identity import load_peers
from kakeya.fleet.identity.membership import FleetSecurity, Membership
from kakeya.fleet.identity.renewal import MembershipService
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.liveness.duplicate_id import refuse_taken_id
from kakeya.fleet.liveness.probing import Prober
from kakeya.fleet.paths.discovery import Discovery
from kakeya.fleet.paths.link_rates import LinkRates
from kakeya.fleet.paths.own_addresses import OwnAddresses
from kakeya.fleet.paths.routes import Routes
from kakeya.fleet.view.merging import LATENCY_S
from kakeya.fleet.view.own_card import PATIENCE_ROUNDS
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.fleet.view.suspicion import Doubt
from kakeya.node import figures
from kakeya.node.state import NodeState
from kakeya.node.status import FleetStatus
from kakeya.v1.fleet_pb2_grpc import (
    add_FleetServiceServicer_to_server,
    add_MembershipServiceServicer_to_server,
)
from kakeya.wire.channels import Channels
from kakeya.wire.security import ChannelSecurity
from kakeya.wire.server.authorization import current_caller

_MAX_ASKED = 8
"""Peers that a start asks about its id: enough that one of them lives."""
_CERTIFICATES_S = 30.0
"""Seconds between two searches for expired certificates of other nodes."""
OPEN_FLEET = "open"
"""The name of a fleet without identities in mDNS announcements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """The clock and the random source of a node; `rng` must not draw secrets."""

    clock: Clock
    rng: random.Random


class NodeFleet:
    """One node's part in the fleet. `offer` makes the card's content from the current models."""

    def __init__(
        self,
        config: FleetConfig,
        *,
        state: NodeState,
        data_dir: Path,
        trust: FleetTrust | None,
        reach: OwnAddresses,
        offer: Offer,
        chances: Chances,
        on_round: Callable[[Round], None],
    ) -> None:
        """`trust` None = a fleet without identities."""
        self._clock, self._rng = clock, rng = chances.clock, chances.rng
        self._closing: set[asyncio.Future[None]] = set()
        self.reach = reach
        self.trust = trust
        self.registry = CapabilityRegistry(
            state.node_id,
            offer,
            now=clock.wall(),
            mono=clock.mono(),
            memory=state.memory,
            trust=self.trust,
            patience_s=PATIENCE_ROUNDS * config.interval_s + LATENCY_S,
        )
        self.security: ChannelSecurity | None = None
        if trust is not None:
            self.security = FleetSecurity(trust, self.registry.node_at)
            trust.subscribe(self._forget)
        self.channels = Channels(security=self.security)
        self._policy = reach.policy()
        self.links = LinkRates()
        self.routes = Routes(
            self.registry,
            channels=self.channels,
            clock=clock,
            may_dial=self._may_dial,
            on_answer=reach.answered,
        )
        self.prober = Prober(
            self.registry,
            channels=self.channels,
            clock=clock,
            rng=rng,
            poke=self.poke,
            route=self.routes.address_for,
            may_dial=self._may_dial,
        )
        self.channels.on_lost = self._connection_lost
        self.sync = Sync(self.registry, rng=rng, revocations=self.trust, suspicion=self.prober)
        self.service = CapabilityService(self.registry, self.sync, clock=clock)
        self.watches = FleetWatchService(self.registry, clock=clock)
        self.discovery = self._discovery(config, state.node_id)
        seeds = config.peers + (load_peers(data_dir) if trust else ())
        self._seeds = tuple(dict.fromkeys(seeds))
        self.gossip = Gossip(
            self.registry,
            GossipConfig(seeds=self._seeds, interval_s=config.interval_s, fanout=config.fanout),
            channels=self.channels,
            clock=clock,
            rng=rng,
            on_round=self._round_done,
            sync=self.sync,
            sightings=self.discovery.sightings if self.discovery else tuple,
            may_dial=self._may_dial,
            routes=self.routes.address_for,
        )
        self._on_round = on_round
        self.membership = self._membership(data_dir, config.join_port)

    def register(self, server: grpc.aio.Server) -> None:
        """Add the services of the fleet to one more server."""
        register(server, self.service, probe=self.prober.answer_probe)
        add_FleetServiceServicer_to_server(self.watches, server)
        if self.membership is not None:
            renewals = MembershipService(self.membership.certify, caller=current_caller)
            add_MembershipServiceServicer_to_server(renewals, server)

    def start(self, supervisor: Supervisor) -> None:
        """Start gossip, probes and discovery, and save the state."""
        self.reach.start(supervisor)
        self.gossip.start(supervisor)
        self.prober.start(supervisor)
        self.routes.start(supervisor)
        if self.discovery is not None:
            self.discovery.start(supervisor)
        if self.membership is not None:
            self.membership.start(supervisor)
            supervisor.start("certificates of others", self._watch_certificates)

    def _round_done(self, done: Round) -> None:
        for outcome in done.outcomes:
            if not outcome.error:
                self.reach.answered(outcome.address, outcome.rtt_s * 1000)
        self._on_round(done)

    async def refuse_taken_id(self) -> None:
        """Raise Conflict while another process serves under this node's id, as peers tell."""
        remembered = self.registry.remembered_addresses(self._clock.wall())
        known = [address for address in remembered if self._may_dial(address)]
        peers = [*self._seeds, *self._rng.sample(known, len(known))]
        await refuse_taken_id(
            self.registry,
            tuple(dict.fromkeys(peers))[:_MAX_ASKED],
            channels=self.channels,
            trust=self.trust,
            clock=self._clock,
            why_not_dial=self.why_not_dial,
        )

    async def tell_all(self) -> None:
        """Exchange cards with every peer that can be reached, once."""
        ways = (self.routes.address_for(card) for card in self.live_peers())
        await self.gossip.round([one for one in ways if one and not self.why_not_dial(one)])

    def poke(self) -> None:
        """Ask for a gossip round soon."""
        self.gossip.poke()

    def call_failed(self, address: str) -> None:
        """Note that a call to an address broke: its node gets another route, or comes in doubt."""
        cards = self._cards_at(address)
        self.routes.lost(address)
        for card in cards:
            if self.routes.address_for(card) == address:
                self.registry.mark_failed(card.node_id, mono=self._clock.mono())
        if not cards:
            self.registry.mark_failed(address, mono=self._clock.mono())
        self.prober.lost(address)

    def _connection_lost(self, address: str) -> None:
        # Honest peers close idle connections too, so this is only a reason for a probe.
        self.routes.lost(address)
        self.prober.lost(address)

    def addresses_changed(self) -> None:
        """Take over the current addresses; the agent then announces the card again."""
        self._policy = self.reach.policy()
        self.routes.interfaces_changed()
        if self.discovery is not None:
            self.discovery.update(hosts=self.reach.hosts, policy=self._policy)

    def why_not_dial(self, address: str) -> str:
        """Return the reason against dialling an address of a card; "" = it may be dialled."""
        return self._policy.may_dial(address)

    def skews(self) -> Mapping[str, float]:
        """Seconds by which the clocks of peers are ahead of this machine's, by node id."""
        return {
            str(node_id): s for node_id, s in self.sync.skews.by_peer(self._clock.mono()).items()
        }

    def view(self, cards: Sequence[Card]) -> FleetStatus:
        """Return the fleet's part of the status; the own card is the first of `cards`."""
        mono = self._clock.mono()
        skews = self.sync.skews
        return FleetStatus(
            ages={card.node_id: self.registry.age_s(card.node_id, mono=mono) for card in cards},
            suspects=self.registry.suspects(),
            doubts=self._doubts(cards),
            gossip=self.gossip.stats,
            skews=skews.by_peer(mono),
            is_clock_wrong=skews.is_own_fault(mono),
            conflicts=self.registry.conflicts(self._clock.wall()),
            round_trips={
                card.node_id: self.reach.round_trip_ms(self.routes.address_for(card))
                for card in cards[1:]
            },
            routes={route.node_id: route for route in self.routes.routes()},
            sightings=len(self.discovery.sightings()) if self.discovery else None,
            identity=self.trust.identity if self.trust else None,
            revoked=self.trust.revoked.node_ids if self.trust else (),
        )

    def _doubts(self, cards: Sequence[Card]) -> Mapping[NodeId, Doubt]:
        book = self.registry.suspicions
        found = ((card.node_id, book.doubt_of(card.grpc_address)) for card in cards)
        return {node_id: doubt for node_id, doubt in found if doubt is not None}

    def figures(self) -> Iterator[Figure]:
        """Figures of the fleet half."""
        view = self.view(cards := self.registry.snapshot(mono=self._clock.mono()))
        known, suspects = len(cards), len(view.suspects)
        yield from figures.fleet_figures(known, suspects, view.gossip, self.service.stats)
        yield from figures.gossip_figures(view.gossip)
        names = names_of(cards)
        trips = {names[of]: ms / 1000 for of, ms in view.round_trips.items() if ms is not None}
        skews = {names[of]: s for of, s in view.skews.items() if of in names}
        yield from figures.peer_figures(self.gossip.news.counts, trips, skews)
        mdns = self.discovery.stats if self.discovery else None
        if self.membership is not None and self.membership.join_server is not None:
            yield from figures.invite_figures(self.membership.join_server.stats)
        yield from figures.route_figures(self.routes.downgrades, mdns)

    def live_peers(self) -> Sequence[Card]:
        """The live cards of all nodes but this one."""
        return self.registry.snapshot(mono=self._clock.mono())[1:]

    async def aclose(self) -> None:
        """Close channels; the loops end with their supervisor."""
        if self.membership is not None:
            await self.membership.aclose()
        await self.channels.aclose()

    def _may_dial(self, address: str) -> bool:
        return not self._policy.may_dial(address)

    def _forget(self, revoked: Collection[str]) -> None:
        """Drop nodes that the fleet has removed, and tell the agent."""
        self.let_go()
        self.poke()

    async def _watch_certificates(self) -> None:
        # A connection is checked once, when it is made, and stays open for weeks.
        while True:
            await self._clock.sleep(_CERTIFICATES_S)
            self.let_go()

    def let_go(self) -> int:
        """Drop the cards and the channels of nodes without trust; return the number of nodes.

        A node loses trust when it is revoked or does not renew its certificate. If the own
        certificate has expired too, the own clock may be far ahead; then no node is dropped.
        """
        now = self._clock.wall()
        if self.trust is None or now > self.trust.identity.not_after_at:
            return 0
        cards = self.live_peers()
        fallen = set(self.registry.recheck(now, mono=self._clock.mono()))
        gone = [card for card in cards if card.node_id in fallen]
        for card in gone:
            for address in card.addresses:
                # Another node may have the address; the untrusted node only claimed it.
                node_id = card.node_id if self._cards_at(address) else ""
                closing = asyncio.ensure_future(self.channels.discard(address, node_id))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return len(gone)

    def _cards_at(self, address: str) -> list[Card]:
        return [card for card in self.live_peers() if address in card.addresses]

    def _discovery(self, config: FleetConfig, node_id: str) -> Discovery | None:
        if config.no_mdns or not self.reach.is_networked:
            return None
        return Discovery(
            NodeId(node_id),
            fleet=self.trust.identity.fleet if self.trust else OPEN_FLEET,
            port=self.reach.port,
            hosts=self.reach.hosts,
            policy=self._policy,
            clock=self._clock,
            rng=self._rng,
            on_change=self.poke,
        )

    def _membership(self, data_dir: Path, join_port: int) -> Membership | None:
        if self.trust is None:
            return None
        return Membership(
            data_dir,
            self.trust,
            cards=lambda: self.registry.snapshot(mono=self._clock.mono()),
            hosts=lambda: self.reach.hosts,
            channels=self.channels,
            clock=self._clock,
            rng=self._rng,
            route=self.routes.address_for,
            join_port=join_port,
        )
