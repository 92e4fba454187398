"""Prefix blocks between this node and its peers: served, fetched, and named on cards.

    serve    PrefillCacheService over `source.py`, for callers that the permissions let in
    fetch    the missing blocks of a request, before its engine begins; into pages
    card     a filter of the blocks here, made anew now and then

Blocks come from nodes that the fleet trusts: their bytes are checked against the hashes of their
sender, not computed again. In a fleet with a common key, names and calls are made with it.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import ConfigError
from kakeya.core.figures import Figure, Json, as_json
from kakeya.core.tasks import Supervisor, every
from kakeya.fleet.cards.cards import CacheOffer, Card
from kakeya.fleet.cards.convert import cache_to_wire
from kakeya.fleet.paths.link_rates import LinkRates
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.generation.kv import NO_HOLDER, KvHolder
from kakeya.generation.retention import BlockClass
from kakeya.prefix.config import PrecacheConfig
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.figures import peer_figures
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece, longest_at
from kakeya.prefix.pages.pages import FingerprintBlocks, PrefixPages
from kakeya.prefix.peers.auth import FleetKey
from kakeya.prefix.peers.cards import OwnCaches, holders
from kakeya.prefix.peers.choice import BlockHolder, is_worth_asking
from kakeya.prefix.peers.fetch import PeerFetch
from kakeya.prefix.peers.seams import MissingBlocks
from kakeya.prefix.peers.service import PrefillCacheService
from kakeya.prefix.peers.sink import PageSink
from kakeya.prefix.peers.source import NodeSources
from kakeya.prefix.peers.two_sided import is_worth_while
from kakeya.prefix.peers.two_sided_fetch import HeldBlocks, Rendezvous
from kakeya.v1.distributed_pb2 import CacheCapability
from kakeya.v1.distributed_pb2_grpc import add_PrefillCacheServiceServicer_to_server
from kakeya.wire.channels import Channels

TICK_S = 4.0
"""Between two looks for leases that ran out and for a filter that changed."""
_MAX_KEY_BYTES = 4096
_LATE_KEPT = 64


def read_fleet_key(config: PrecacheConfig, node_id: str) -> FleetKey | None:
    """The common key of the fleet, where one is configured. Raises ConfigError."""
    if config.key_file is None:
        return None
    try:
        with Path(config.key_file).open("rb") as file:
            key = file.read(_MAX_KEY_BYTES).strip()
    except OSError as problem:
        raise ConfigError(
            f"{config.key_file}: the fleet key cannot be read: {problem.strerror or problem}"
        ) from problem
    return FleetKey(key=key, tenant=config.tenant, node_id=node_id)


class HeldPrefixes(Protocol):
    """The blocks of this node: `NodePrefixes`."""

    @property
    def pages(self) -> PrefixPages:
        """Those in pages."""
        ...

    @property
    def store(self) -> BlockStore | None:
        """Those on disk; None where there is none."""
        ...


class Ways(Protocol):
    """The choice of a node's address."""

    def address_for(self, card: Card) -> str:
        """The address of the node of a card now."""
        ...


class Neighbourhood(Protocol):
    """The parts of the fleet that are needed here; `NodeFleet` has them."""

    @property
    def registry(self) -> CapabilityRegistry:
        """The peers."""
        ...

    @property
    def channels(self) -> Channels:
        """The channels to peers."""
        ...

    @property
    def routes(self) -> Ways:
        """The addresses of peers."""
        ...

    @property
    def links(self) -> LinkRates:
        """How fast bytes come from peers."""
        ...

    def why_not_dial(self, address: str) -> str:
        """Why an address of a card is not dialled; "" = it may be."""
        ...

    def call_failed(self, address: str) -> None:
        """Note that a call to an address broke."""
        ...


class PrefixPeers:
    """See the module. Implements `PeerSource`; lives on the event loop."""

    def __init__(
        self,
        plane: Neighbourhood,
        prefixes: HeldPrefixes,
        *,
        fleet_key: FleetKey | None,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._plane = plane
        self._pages = prefixes.pages
        self._clock = clock
        self._rng = rng
        self._holder = self._pages.arena.holder("prefixes from peers")
        self._sources = NodeSources(prefixes.pages, prefixes.store)
        self._own = OwnCaches(self._sources)
        self._late: OrderedDict[BlockId, BlockHolder] = OrderedDict()
        """By the last block of a history: the peer that was late a moment ago, before it was
        computed."""
        self.service = PrefillCacheService(
            plane.registry.node_id,
            self._sources,
            summary=self._summary,
            clock=clock,
            draw=lambda: secrets.token_hex(16),
            fleet_key=fleet_key,
        )
        self._fetch = PeerFetch(
            channel_for=self._channel,
            clock=clock,
            rng=rng,
            fleet_key=fleet_key,
            on_lost=plane.call_failed,
            links=plane.links,
        )

    @property
    def caches(self) -> tuple[CacheOffer, ...]:
        """The caches on the card of this node."""
        return self._own.offered

    def register(self, server: grpc.aio.Server) -> None:
        """Serve peers on one more server."""
        add_PrefillCacheServiceServicer_to_server(self.service, server)

    def start(self, supervisor: Supervisor, on_change: Callable[[], None]) -> None:
        """Look after leases and the filter; `on_change` is told when the card has more to say."""

        async def tend() -> None:
            self.service.sweep()
            self._sources.renew()
            nodes = 1 + len(self._plane.registry.live_peers(mono=self._clock.mono()))
            if self._own.refresh(self._clock.mono(), nodes=nodes):
                self.service.epoch = self._own.epoch
                on_change()

        async def run() -> None:
            await every(TICK_S, tend, clock=self._clock, rng=self._rng, is_shared=True)

        supervisor.start("prefixes and peers", run)

    def drain(self) -> None:
        """End all leases: the node is stopping."""
        self.service.drain()

    # --- as PeerSource

    async def fetch(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        have: int,
        block_class: BlockClass,
        told: KvHolder = NO_HOLDER,
    ) -> Collection[BlockId]:
        """Bring whole blocks from the first that is not here on into pages, sooner than they would
        be computed; which came."""
        wanted = _wanted(naming, pieces, have)
        found = self.holders(wanted, told)
        if not found or self._fetch.prefers_meeting(wanted, found) is not None:
            return ()
        sink = PageSink(self._pages, shelf, naming, pieces, block_class, self._holder)
        late: list[BlockHolder] = []
        await self._fetch.fetch(wanted, found, sink, late=late.append)
        if late:
            self._late[wanted.ids[-1]] = max(late, key=lambda holder: holder.blocks)
            if len(self._late) > _LATE_KEPT:
                self._late.popitem(last=False)
        return sink.came

    async def rendezvous(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        have: int,
        block_class: BlockClass,
        told: KvHolder,
        joined: Callable[[list[BlockId]], None],
    ) -> Rendezvous | None:
        """Begin to fetch from the end, where that and computing together are sooner than either
        alone, or where a peer was late before; `joined` gets the blocks that came. End it when the
        request is over."""
        wanted = _wanted(naming, pieces, have)
        holder = self._late.pop(wanted.ids[-1], None)
        if holder is None:
            holder = self._fetch.prefers_meeting(wanted, self.holders(wanted, told))
        if holder is None or not is_worth_while(wanted.missing, block_s=wanted.block_s):
            return None

        def counted(came: list[BlockId]) -> None:
            self._fetch.met()
            joined(came)

        sink = PageSink(self._pages, shelf, naming, pieces, block_class, self._holder)
        held = HeldBlocks(sink)
        made = Rendezvous(held, counted)
        made.begin(asyncio.ensure_future(self._meet(made, held, wanted, holder)))
        return made

    async def _meet(
        self, made: Rendezvous, held: HeldBlocks, wanted: MissingBlocks, holder: BlockHolder
    ) -> None:
        """Fetch from the end beside an engine that does not wait for it."""
        found = await self._fetch.approach(wanted, holder)
        if found is not None:
            hit, meeting = found
            made.agree(meeting)
            await self._fetch.fetch_back(hit, wanted, meeting, held, made.look)

    def holders(self, wanted: MissingBlocks, told: KvHolder = NO_HOLDER) -> list[BlockHolder]:
        """The nodes that have missing blocks of a history by their cards, and the one that is told
        to have them, which may have computed them since; none if it is not worth it."""
        if not is_worth_asking(wanted):
            return []
        registry = self._plane.registry
        cards = registry.live_peers(mono=self._clock.mono())
        caching = [card for card in cards if card.caches or card.node_id == told.node_id]
        if not caching:
            return []
        suspects = registry.suspects()
        trusted = [card for card in caching if card.node_id not in suspects]
        found = holders(
            trusted, wanted.fingerprint, wanted.ids, wanted.have, address_of=self._address
        )
        blocks = min(told.tokens // wanted.fingerprint.block_tokens, len(wanted.ids))
        if told.tokens and blocks <= wanted.have:
            return found
        for card in trusted:
            if card.node_id == told.node_id and (address := self._address(card)):
                found = [holder for holder in found if holder.node_id != told.node_id]
                found.append(BlockHolder(node_id=card.node_id, address=address, blocks=blocks))
        return found

    # --- what there is

    def status(self) -> Json:
        """The counts of served and fetched blocks, as JSON."""
        fetched, served = self._fetch.stats, self.service.stats
        return as_json(self.figures()) | {
            "failures": fetched.failures + fetched.late,
            "fetched_blocks": fetched.blocks,
            "fetched_tokens": fetched.tokens,
            "served_blocks": served.blocks_served,
            "leases": len(self.service.leases),
        }

    def figures(self) -> Iterator[Figure]:
        """The same numbers."""
        leased_bytes = self.service.leases.pinned_bytes
        return peer_figures(self._fetch.stats, self.service.stats, leased_bytes)

    # --- inside

    def _channel(self, holder: BlockHolder) -> grpc.aio.Channel:
        return self._plane.channels.get(holder.address, holder.node_id)

    def _address(self, card: Card) -> str:
        address = self._plane.routes.address_for(card)
        return "" if self._plane.why_not_dial(address) else address

    def _summary(self) -> tuple[CacheCapability, ...]:
        address = self._plane.registry.offer.grpc_address
        return tuple(self._told(cache_to_wire(cache, address)) for cache in self.caches)

    def _told(self, cache: CacheCapability) -> CacheCapability:
        cache.load = self.service.load
        cache.tokens_served = self.service.stats.tokens_served
        return cache


def _wanted(naming: Naming, pieces: Sequence[Piece], have: int) -> MissingBlocks:
    @functools.cache
    def tails(blocks: int) -> tuple[BlockId, ...]:
        behind = longest_at(pieces, blocks)
        return naming.chain.tail_ids(behind.parent, behind.tokens) if behind is not None else ()

    return MissingBlocks(
        fingerprint=naming.fingerprint,
        ids=tuple(piece.id for piece in pieces if not piece.is_tail),
        have=have,
        block_bytes=naming.block_bytes,
        state_bytes=naming.state_bytes,
        prefill_tokens_per_s=naming.prefill_tokens_per_s,
        tails=tails,
    )
