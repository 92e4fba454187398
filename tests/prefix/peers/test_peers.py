"""Blocks between nodes: real pages, real disks, real servers and cards; no engine is needed."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio
import pytest

from kakeya.config import config
from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError
from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import Offer
from kakeya.fleet.paths.link_rates import LinkRates
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.generation.kv import NO_HOLDER
from kakeya.generation.retention import BlockClass, Retention
from kakeya.memory.pages.node_arena import PAGE_BYTES, NodeArena, page_config
from kakeya.prefix.names.blocks import BlockChain
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import pieces_of
from kakeya.prefix.peers import fetch as peer_fetch
from kakeya.prefix.peers import peers as node_peers
from kakeya.prefix.peers.auth import FleetKey
from kakeya.prefix.peers.peers import PrefixPeers, read_fleet_key
from kakeya.prefix.peers.seams import MissingBlocks
from kakeya.prefix.prefixes import NodePrefixes
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import PrefillCacheServiceStub
from kakeya.wire.channels import Channels
from kakeya.wire.server.permissions import PERMISSIONS
from tests.fakes import set_by
from tests.memory.pages.test_node_arena import Room

BLOCK_TOKENS = 32
BLOCK_BYTES = 700_000
BLOCKS = 5
TEXT = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 7))
SECRET = bytes(range(32))


def naming(key: bytes = b"", tenant: str = "", state_bytes: int = 0, **more) -> Naming:
    fields = {"model_id": "m", "weights_digest": "w", "layout": "l", "exactness": "e"}
    kind = KvFingerprint(**(fields | more), block_tokens=BLOCK_TOKENS, tenant=tenant)
    return Naming(
        fingerprint=kind,
        chain=BlockChain(kind.exact(), BLOCK_TOKENS, key),
        block_bytes=BLOCK_BYTES,
        state_bytes=state_bytes,
        prefill_tokens_per_s=0.4,  # 80 s a block: time on a machine that tests keep busy
    )


@pytest.fixture(autouse=True)
def ample_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests keep the machine busy."""
    ample = functools.partial(MissingBlocks, most_slack_s=20.0)
    monkeypatch.setattr(node_peers, "MissingBlocks", ample)


def payload_of(block_id: bytes, size: int = BLOCK_BYTES) -> bytes:
    return hashlib.shake_128(block_id).digest(size)


class Plain:
    """Each node is called where its card says."""

    def address_for(self, card):
        return card.grpc_address


class Fleet:
    """What one node sees of the others."""

    def __init__(self, node_id: str, address: str) -> None:
        clock = SystemClock()
        self.registry = CapabilityRegistry(
            node_id, Offer(grpc_address=address), now=clock.wall(), mono=clock.mono()
        )
        self.channels = Channels()
        self.routes = Plain()
        self.links = LinkRates()
        self.forbidden: set[str] = set()
        self.failed: list[str] = []

    def why_not_dial(self, address):
        return "forbidden" if address in self.forbidden else ""

    def call_failed(self, address):
        self.failed.append(address)


@dataclass(eq=False)
class Station:
    """A node without engines."""

    prefixes: NodePrefixes
    peers: PrefixPeers
    fleet: Fleet
    server: grpc.aio.Server

    async def lay(
        self, named: Naming, blocks: int = BLOCKS, *, tokens=TEXT, tail: bool = False
    ) -> None:
        """Fill pages as an engine does, and have them written to disk."""
        shelf = self.prefixes.pages.shelf(named)
        await self.fetch_from(shelf, named, tokens, blocks, tail=tail)
        if self.prefixes.store is not None:
            async with asyncio.timeout(60):
                while not self.prefixes.is_at_rest:
                    await asyncio.sleep(0.01)
                await self.prefixes.store.flush()
                await asyncio.sleep(0.01)

    def clear(self, named: Naming) -> None:
        """Forget what is in pages."""
        shelf = self.prefixes.pages.shelf(named)
        for node in sorted(shelf.tree, key=lambda node: -node.index):
            shelf.tree.unstored(node.id)
            self.prefixes.pages.lose(shelf, node.id, for_room=True)

    async def fetch_from(self, shelf, named, tokens, blocks, *, tail=False) -> None:
        from kakeya.prefix.peers.sink import PageSink

        pieces = pieces_of(named.chain, tokens)
        holder = self.prefixes.pages.arena.holder("an engine")
        pages = self.prefixes.pages
        sink = PageSink(pages, shelf, named, pieces, BlockClass.USER, holder)
        for index in range(blocks):
            assert await sink.put(index, bytearray(payload_of(pieces[index].id)))
        if tail:
            size = named.size(len(pieces[-1].tokens), has_state=False)
            payload = bytearray(payload_of(pieces[-1].id, size))
            assert await sink.put(blocks, payload, len(pieces[-1].tokens))
            assert sink.came[-1] == pieces[-1].id
        pages.touch(shelf, sink.came, block_class=BlockClass.USER, retention=Retention.LONG)
        for block_id in sink.came:
            self.prefixes._landed(shelf, block_id)

    def held(self, named: Naming, tokens=TEXT) -> list[bytes | None]:
        """What lies in pages of each whole block of a text."""
        shelf = self.prefixes.pages.shelf(named)
        found: list[bytes | None] = []
        for piece in pieces_of(named.chain, tokens):
            node = shelf.tree.node(piece.id)
            if not piece.is_tail:
                is_here = node is not None and node.payload is not None
                found.append(bytes(self.prefixes.pages.view(node.payload)) if is_here else None)
        return found

    async def fetch(self, named: Naming, tokens=TEXT) -> int:
        """Ask the others for what is missing of a text, as an offer does."""
        shelf = self.prefixes.pages.shelf(named)
        pieces = pieces_of(named.chain, tokens)
        whole = [piece.id for piece in pieces if not piece.is_tail]
        have = shelf.tree.match(whole).depth_ram
        came = await self.peers.fetch(shelf, named, pieces, have, BlockClass.USER)
        assert list(came)[: len(whole) - have] == whole[have : have + len(came)]
        return len(came)

    def announce(self) -> None:
        """Make the card anew, if it is time."""
        clock = SystemClock()
        if self.peers._own.refresh(clock.mono(), nodes=2):
            offer = replace(self.fleet.registry.offer, caches=self.peers.caches)
            self.fleet.registry.announce(offer, now=clock.wall(), mono=clock.mono())

    def hear(self, other: Station) -> None:
        """Take in another's card as gossip does."""
        clock = SystemClock()
        wire = other.fleet.registry.own.wire
        self.fleet.registry.merge([wire], now=clock.wall(), mono=clock.mono())


@asynccontextmanager
async def station(
    folder: Path, node_id: str, *, fleet_key: FleetKey | None = None, memory_mb: int = 16
) -> AsyncIterator[Station]:
    clock, rng = SystemClock(), random.Random(str(folder))
    arena = await asyncio.to_thread(
        NodeArena,
        folder / "arena",
        page_config(8 * PAGE_BYTES, memory_mb * MIB),
        ledger=Room(),
        clock=clock,
        rng=rng,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, arena.__exit__, None, None, None)
        async with NodePrefixes(
            arena,
            memory_bytes=memory_mb * MIB,
            disk_bytes=64 * MIB,
            data_dir=folder,
            served=tuple,
            adapters=tuple,
            adapter_digest=str,
            clock=clock,
            rng=rng,
        ) as prefixes:
            server = grpc.aio.server()
            port = server.add_insecure_port("127.0.0.1:0")
            fleet = Fleet(node_id, f"127.0.0.1:{port}")
            peers = PrefixPeers(fleet, prefixes, fleet_key=fleet_key, clock=clock, rng=rng)
            peers._fetch._lookup_s = 5.0  # tests keep the machine busy
            peers.register(server)
            await server.start()
            prefixes.elsewhere = peers
            try:
                yield Station(prefixes, peers, fleet, server)
            finally:
                peers.drain()
                await fleet.channels.aclose()
                await server.stop(0)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Station, Station]]:
    async with station(tmp_path / "a", "a") as a, station(tmp_path / "b", "b") as b:
        yield a, b


def introduce(a: Station, b: Station) -> None:
    a.announce()
    b.hear(a)


async def test_what_one_node_has_another_gets_byte_for_byte(two):
    (a, b), named = two, naming()
    await a.lay(named)
    introduce(a, b)
    assert await b.fetch(named) == BLOCKS
    assert b.held(named) == a.held(named)
    assert b.peers.status()["fetched_blocks"] == BLOCKS
    assert a.peers.status()["served_bytes"] == BLOCKS * BLOCK_BYTES


async def test_a_tail_that_a_text_goes_on_from_comes_with_the_blocks(two):
    (a, b), named = two, naming()
    await a.lay(named, tail=True)
    introduce(a, b)
    for tokens, came in ((TEXT, BLOCKS + 1), (TEXT[:-5], BLOCKS), ([*TEXT, 1, 2], BLOCKS + 1)):
        b.clear(named)
        assert await b.fetch(named, tokens) == came
    shelf = b.prefixes.pages.shelf(named)
    pieces = pieces_of(named.chain, TEXT)
    tail = shelf.tree.node(pieces[-1].id)
    assert tail.facts == a.prefixes.pages.shelf(named).tree.node(pieces[-1].id).facts
    size = named.size(len(pieces[-1].tokens), has_state=False)
    assert bytes(b.prefixes.pages.view(tail.payload)) == payload_of(tail.id, size)


async def test_only_what_is_missing_is_fetched(two):
    (a, b), named = two, naming()
    await a.lay(named)
    await b.lay(named, 2)
    introduce(a, b)
    assert await b.fetch(named) == BLOCKS - 2
    assert b.held(named) == a.held(named)


async def test_blocks_that_lie_on_disk_alone_are_served_too(two):
    (a, b), named = two, naming()
    await a.lay(named)
    shelf = a.prefixes.pages.shelf(named)
    for piece in reversed(pieces_of(named.chain, TEXT)):
        a.prefixes.pages.lose(shelf, piece.id, for_room=True)
    assert a.held(named) == [None] * BLOCKS
    introduce(a, b)
    assert await b.fetch(named) == BLOCKS
    assert b.held(named) == [payload_of(piece.id) for piece in pieces_of(named.chain, TEXT)[:-1]]


async def test_a_fingerprint_that_was_not_asked_for_since_the_start_is_served(tmp_path):
    named = naming()
    async with station(tmp_path / "a", "a") as a:
        await a.lay(named)
    async with station(tmp_path / "a", "a") as a, station(tmp_path / "b", "b") as b:
        await a.prefixes.store.ready()
        introduce(a, b)
        assert await b.fetch(named) == BLOCKS
        assert b.peers.status()["hits"] == 1


async def test_nobody_is_asked_whose_card_does_not_name_the_next_block(two):
    (a, b), named = two, naming()
    await a.lay(named, 2)
    await b.lay(named, 2)
    introduce(a, b)
    assert await b.fetch(named) == 0
    assert await b.fetch(named, tokens=TEXT[::-1]) == 0
    assert a.peers.status()["lookups"] == 0


@pytest.mark.parametrize("field", ["weights_digest", "layout", "exactness", "adapter", "rope"])
async def test_nobody_is_asked_whose_kv_is_of_another_kind(two, field):
    (a, b) = two
    await a.lay(naming())
    introduce(a, b)
    assert await b.fetch(naming(**{field: "other"})) == 0
    assert a.peers.status()["lookups"] == 0


async def test_nobody_is_called_at_an_address_that_may_not_be_dialled_or_is_in_doubt(two):
    (a, b), named = two, naming()
    await a.lay(named)
    introduce(a, b)
    address = a.fleet.registry.offer.grpc_address
    b.fleet.forbidden = {address}
    assert await b.fetch(named) == 0
    b.fleet.forbidden = set()
    b.fleet.registry.mark_failed("a", mono=SystemClock().mono())
    assert await b.fetch(named) == 0
    assert a.peers.status()["lookups"] == 0


async def test_a_node_that_is_gone_is_told_to_the_fleet_and_costs_nothing_more(two):
    (a, b), named = two, naming()
    await a.lay(named)
    introduce(a, b)
    await a.server.stop(None)
    assert await b.fetch(named) == 0
    assert b.fleet.failed == [a.fleet.registry.offer.grpc_address]


async def test_what_a_lease_pins_makes_room_for_nothing(tmp_path):
    named = naming()
    async with station(tmp_path / "a", "a", memory_mb=8) as a:
        await a.lay(named)
        stub = PrefillCacheServiceStub(a.fleet.channels.get(a.fleet.registry.offer.grpc_address))
        ids = named.chain.ids(TEXT)
        asked = pb.LookupPrefixRequest(compatibility=named.fingerprint.to_wire(), block_hashes=ids)
        assert (await stub.LookupPrefix(asked)).hit_block_count == BLOCKS
        other = naming(weights_digest="other")
        shelf = a.prefixes.pages.shelf(other)
        holder = a.prefixes.pages.arena.holder("an engine")
        fillings = []
        while (filling := await a.prefixes.pages.prepare(other, BLOCK_BYTES, holder)) is not None:
            fillings.append(filling)
        assert None not in a.held(named)
        for filling in fillings:
            a.prefixes.pages.give_back(filling)
        a.peers.drain()
        for room in range(16):  # noqa: B007 - it is looked at after the loop
            filling = await a.prefixes.pages.prepare(other, BLOCK_BYTES, holder)
            if filling is None:
                break
            fillings.append(filling)
        assert room >= 7
        assert None in a.held(named)
        assert shelf.tree.stats().ram_blocks == 0


async def test_who_is_late_is_met_while_the_engine_computes(two, monkeypatch):
    (a, b), named = two, naming()
    await a.lay(named)
    introduce(a, b)
    real = b.peers._fetch._ask

    async def ask(holder, wanted, limit_s, *told):
        if told:  # a lookup that is waited for; the peer is busy
            told[0](holder)
            return None
        return await real(holder, wanted, 5.0)

    monkeypatch.setattr(b.peers._fetch, "_ask", ask)
    monkeypatch.setattr(peer_fetch, "due_s", lambda *said: 20.0)  # tests keep the machine busy
    assert await b.fetch(named) == 0
    shelf, pieces = b.prefixes.pages.shelf(named), pieces_of(named.chain, TEXT)
    joined: list[bytes] = []
    wanted = (shelf, named, pieces, 0, BlockClass.USER, NO_HOLDER)
    made = await b.peers.rendezvous(*wanted, joined.extend)
    await set_by(made._task, made.met)
    assert joined == [piece.id for piece in pieces if not piece.is_tail]
    assert b.held(named) == a.held(named)
    again = await b.peers.rendezvous(*wanted, joined.extend)
    assert again is None


async def test_without_pages_for_them_nothing_is_fetched(tmp_path):
    named = naming()
    async with (
        station(tmp_path / "a", "a") as a,
        station(tmp_path / "b", "b", memory_mb=3) as b,
    ):
        await a.lay(named)
        introduce(a, b)
        assert 1 <= await b.fetch(named) < BLOCKS
        assert b.prefixes.pages.is_at_rest


async def test_a_card_is_not_made_anew_for_each_block(two):
    (a, _), named = two, naming()
    await a.lay(named, 2)
    a.announce()
    card = a.fleet.registry.own
    await a.lay(named)
    a.announce()
    assert a.fleet.registry.own == card
    assert len(card.caches) == 1
    assert card.caches[0].blocks == 2
    clock = SystemClock()
    assert not a.peers._own.refresh(clock.mono() + 29, nodes=2)
    assert not a.peers._own.refresh(clock.mono() + 60, nodes=1000)
    assert a.peers._own.refresh(clock.mono() + 31, nodes=2)
    assert not a.peers._own.refresh(clock.mono() + 300, nodes=2)
    assert a.peers.caches[0].blocks == BLOCKS


async def test_a_summary_tells_what_the_card_tells(two):
    (a, b), named = two, naming()
    await a.lay(named)
    introduce(a, b)
    address = a.fleet.registry.offer.grpc_address
    stub = PrefillCacheServiceStub(b.fleet.channels.get(address))
    said = await stub.GetCacheSummary(pb.GetCacheSummaryRequest())
    assert said.node_id == "a"
    (cache,) = said.caches
    assert cache.compatibility == named.fingerprint.to_wire()
    assert (cache.cache_address, cache.entry_count) == (address, BLOCKS)
    other = naming(layout="other").fingerprint.to_wire()
    assert not (await stub.GetCacheSummary(pb.GetCacheSummaryRequest(compatibility=other))).caches
    same = pb.GetCacheSummaryRequest(compatibility=named.fingerprint.to_wire())
    assert len((await stub.GetCacheSummary(same)).caches) == 1


async def test_in_a_fleet_with_a_key_only_its_holders_exchange_blocks(tmp_path):
    def key(node_id: str, secret: bytes = SECRET) -> FleetKey:
        return FleetKey(key=secret, tenant="acme", node_id=node_id)

    named = naming(key("a").block_key, "acme")
    async with (
        station(tmp_path / "a", "a", fleet_key=key("a")) as a,
        station(tmp_path / "b", "b", fleet_key=key("b")) as b,
        station(tmp_path / "c", "c", fleet_key=key("c", bytes(32))) as c,
        station(tmp_path / "d", "d") as d,
    ):
        await a.lay(named)
        for other in (b, c, d):
            introduce(a, other)
        assert await b.fetch(named) == BLOCKS
        assert await c.fetch(named) == await d.fetch(named) == 0
        assert a.peers.service.stats.hits == 1


async def test_of_two_nodes_that_have_it_either_may_end(tmp_path):
    named = naming()
    async with (
        station(tmp_path / "a", "a") as a,
        station(tmp_path / "b", "b") as b,
        station(tmp_path / "c", "c") as c,
    ):
        for other in (a, b):
            await other.lay(named)
            introduce(other, c)
        await a.server.stop(None)
        assert await c.fetch(named) == BLOCKS
        assert None not in c.held(named)


def test_every_method_of_the_service_is_in_the_table_of_permissions():
    methods = pb.DESCRIPTOR.services_by_name["PrefillCacheService"].methods
    for method in methods:
        allowed = PERMISSIONS[f"/kakeya.v1.PrefillCacheService/{method.name}"]
        assert {role.value for role in allowed.roles} == {"member", "admin"}


def test_the_fleet_key_is_read_from_its_file(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(SECRET.hex().encode() + b"\n")
    flags = {"KAKEYA_PRECACHE_KEY_FILE": str(file), "KAKEYA_PRECACHE_TENANT": "acme"}
    found = read_fleet_key(config.load((), flags).precache, "me")
    assert found == FleetKey(key=SECRET.hex().encode(), tenant="acme", node_id="me")
    assert read_fleet_key(config.load((), {}).precache, "me") is None


@pytest.mark.parametrize(("content", "reason"), [(b"short\n", "16"), (None, "cannot be read")])
def test_a_key_file_that_is_of_no_use_ends_the_start(tmp_path, content, reason):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    settings = config.load((), {"KAKEYA_PRECACHE_KEY_FILE": str(file)}).precache
    with pytest.raises(ConfigError, match=reason):
        read_fleet_key(settings, "me")
