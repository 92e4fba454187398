from __future__ import annotations

import asyncio
import random
import time

import grpc
import pytest

from kakeya.core.errors import Denied
from kakeya.prefix.peers.auth import FleetKey, tenant_key
from kakeya.prefix.peers.leases import LeaseLimits
from kakeya.prefix.peers.service import ServiceLimits
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import PrefillCacheServiceStub
from tests.fakes import SettableClock
from tests.prefix.peers import world as w

BLOCKS = 4
KEY = bytes(range(32))
FIELDS = {
    "model_revision": "other",
    "tokenizer_revision": "other",
    "cache_format_version": "kvb1/sha256:" + 64 * "0",
    "quantization": "other",
    "rope_hash": "sha256:" + 64 * "0",
    "layer_geometry_hash": "sha256:" + 64 * "0",
    "kv_dtype": "other",
    "block_size_tokens": 32,
    "sink_size": 4,
    "window_size": 512,
}


@pytest.fixture
async def world():
    async with w.a_world() as world:
        yield world


def held(blocks: int = BLOCKS, kind=None, key: bytes = b"") -> tuple[w.Sources, w.MemorySource]:
    kind = kind or w.fingerprint()
    source = w.MemorySource(w.chain(blocks, kind, key))
    return w.Sources().add(kind, source), source


def stub_of(world: w.World, peer: w.Peer) -> PrefillCacheServiceStub:
    return PrefillCacheServiceStub(world.channel(peer.holder()))


def lookup(blocks: int = BLOCKS, **more) -> pb.LookupPrefixRequest:
    compatibility = w.fingerprint().to_wire()
    for name, value in more.items():
        setattr(compatibility, name, value)
    return pb.LookupPrefixRequest(compatibility=compatibility, block_hashes=w.chain(blocks))


async def status_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    return refusal.value.code()


async def read(stub, lease_id: str, **more) -> list[int]:
    request = pb.FetchBlocksRequest(lease_id=lease_id, **more)
    chunks = [chunk async for chunk in stub.FetchBlocks(request)]
    return list(dict.fromkeys(chunk.block_index for chunk in chunks))


# --- lookups


async def test_a_lookup_finds_the_longest_leading_run_and_leases_it(world):
    sources, source = held()
    peer = await world.peer(sources)
    said = await stub_of(world, peer).LookupPrefix(lookup(BLOCKS + 3))
    assert (said.hit_block_count, said.hit_token_count) == (BLOCKS, BLOCKS * w.BLOCK_TOKENS)
    assert said.transfer_bytes == BLOCKS * w.BLOCK_BYTES
    assert list(said.block_bytes) == [w.BLOCK_BYTES] * BLOCKS
    assert said.node_id == peer.node_id
    assert time.time() + 25 < said.lease_expires_at_unix < time.time() + 35
    assert source.pins == [w.chain(BLOCKS)]


async def test_nothing_here_is_a_miss_without_a_lease(world):
    peer = await world.peer(held(0)[0])
    said = await stub_of(world, peer).LookupPrefix(lookup())
    assert (said.hit_block_count, said.lease_id) == (0, "")


@pytest.mark.parametrize("field", FIELDS)
async def test_any_other_field_of_the_fingerprint_is_a_miss(world, field):
    peer = await world.peer(held()[0])
    said = await stub_of(world, peer).LookupPrefix(lookup(**{field: FIELDS[field]}))
    assert said.lease_id == ""
    assert (await stub_of(world, peer).LookupPrefix(lookup())).lease_id


async def test_a_model_may_have_another_name_on_another_node(world):
    peer = await world.peer(held()[0])
    assert (await stub_of(world, peer).LookupPrefix(lookup(model_id="mine"))).lease_id


@pytest.mark.parametrize(
    "hashes", [[], [b"short"], [bytes(32)] * 4097], ids=["none", "short", "too many"]
)
async def test_hashes_that_cannot_be_meant_are_refused(world, hashes):
    peer = await world.peer(held()[0])
    request = pb.LookupPrefixRequest(compatibility=w.fingerprint().to_wire(), block_hashes=hashes)
    call = stub_of(world, peer).LookupPrefix(request)
    assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_namespace_of_a_tenant_is_denied_where_there_are_none(world):
    peer = await world.peer(held()[0])
    call = stub_of(world, peer).LookupPrefix(lookup(tenant_namespace="acme"))
    assert await status_of(call) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_lease_ends_with_the_longest_tail_that_is_named_behind_its_blocks(world):
    sources, source = held()
    names = w.tails(BLOCKS)
    for tokens in (3, w.TAIL_TOKENS):
        source.blocks[names[tokens - 1]] = w.payload_of(names[tokens - 1], tokens * 100)
    peer = await world.peer(sources)
    request = lookup()
    request.tail_names = b"".join(name[:8] for name in names)
    stub = stub_of(world, peer)
    assert not (await stub.LookupPrefix(request)).tail_tokens  # behind none of the blocks
    request.tail_after = BLOCKS
    said = await stub.LookupPrefix(request)
    assert (said.hit_block_count, len(said.block_bytes)) == (BLOCKS, BLOCKS)
    assert (said.tail_tokens, said.tail_bytes) == (w.TAIL_TOKENS, w.TAIL_TOKENS * 100)
    assert said.transfer_bytes == BLOCKS * w.BLOCK_BYTES + said.tail_bytes
    assert source.pins[-1] == (*w.chain(BLOCKS), names[w.TAIL_TOKENS - 1])
    assert await read(stub, said.lease_id, back_to_front=True) == [4, 3, 2, 1, 0]
    request.tail_names = request.tail_names[: 2 * 8]
    assert not (await stub.LookupPrefix(request)).tail_tokens


@pytest.mark.parametrize("size", [1, 8 * w.BLOCK_TOKENS + 8])
async def test_names_of_tails_that_cannot_be_meant_are_refused(world, size):
    peer = await world.peer(held()[0])
    request = lookup()
    request.tail_names = bytes(size)
    call = stub_of(world, peer).LookupPrefix(request)
    assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


# --- fetches


async def test_a_lease_is_read_from_the_beginning_unless_more_is_said(world):
    peer = await world.peer(held()[0])
    stub = stub_of(world, peer)
    lease_id = (await stub.LookupPrefix(lookup())).lease_id
    assert await read(stub, lease_id) == [0, 1, 2, 3]
    assert await read(stub, lease_id, first_block=2) == [2, 3]
    assert await read(stub, lease_id, first_block=1, block_count=2) == [1, 2]
    assert await read(stub, lease_id, back_to_front=True) == [3, 2, 1, 0]
    assert await read(stub, lease_id, first_block=1, back_to_front=True) == [3, 2, 1]


@pytest.mark.parametrize(("first", "count"), [(4, 0), (0, 5), (3, 2), (2**32 - 1, 2**32 - 1)])
async def test_blocks_outside_of_the_lease_are_refused(world, first, count):
    peer = await world.peer(held()[0])
    stub = stub_of(world, peer)
    lease_id = (await stub.LookupPrefix(lookup())).lease_id
    call = read(stub, lease_id, first_block=first, block_count=count)
    assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_lease_is_not_found(world):
    peer = await world.peer(held()[0])
    assert await status_of(read(stub_of(world, peer), "nobody's")) is grpc.StatusCode.NOT_FOUND


async def test_a_lease_ends_after_30_seconds_and_lets_its_blocks_go(world):
    clock = SettableClock()
    sources, source = held()
    peer = await world.peer(sources, clock=clock)
    stub = stub_of(world, peer)
    lease_id = (await stub.LookupPrefix(lookup())).lease_id
    clock.advance(29)
    peer.service.sweep()
    assert not source.evict(w.chain(1)[0])
    clock.advance(2)
    peer.service.sweep()
    assert source.evict(w.chain(1)[0])
    assert await status_of(read(stub, lease_id)) is grpc.StatusCode.NOT_FOUND


async def test_a_lease_that_is_used_begins_anew_and_keeps_nothing_from_eviction(world):
    clock = SettableClock()
    sources, source = held()
    peer = await world.peer(sources, clock=clock)
    stub = stub_of(world, peer)
    lease_id = (await stub.LookupPrefix(lookup())).lease_id
    clock.advance(20)
    assert await read(stub, lease_id) == [0, 1, 2, 3]
    assert source.pins == []
    clock.advance(20)
    assert await read(stub, lease_id) == [0, 1, 2, 3]


async def test_a_stream_ends_before_a_block_that_was_evicted(world):
    sources, source = held()
    peer = await world.peer(sources)
    stub = stub_of(world, peer)
    lease_id = (await stub.LookupPrefix(lookup())).lease_id
    source.evict(w.chain(3)[2], by_force=True)
    assert await read(stub, lease_id) == [0, 1]


async def test_leases_pin_no_more_than_their_budget(world):
    sources, source = held()
    limits = LeaseLimits(pinned_bytes=BLOCKS * w.BLOCK_BYTES)
    peer = await world.peer(sources, lease_limits=limits)
    stub = stub_of(world, peer)
    first, second = [(await stub.LookupPrefix(lookup())).lease_id for _ in range(2)]
    assert len(source.pins) == 1
    assert await read(stub, second) == await read(stub, first) == [0, 1, 2, 3]


async def test_the_oldest_lease_of_a_caller_makes_room_for_its_next(world):
    peer = await world.peer(held()[0], lease_limits=LeaseLimits(per_caller=2))
    stub = stub_of(world, peer)
    first, *others = [(await stub.LookupPrefix(lookup())).lease_id for _ in range(3)]
    assert await status_of(read(stub, first)) is grpc.StatusCode.NOT_FOUND
    for lease_id in others:
        assert await read(stub, lease_id) == [0, 1, 2, 3]


def test_no_streams_there_may_be_read_all_leases_of_a_caller_or_of_a_node():
    """So a lookup always finds an idle lease, which makes room."""
    leases, streams = LeaseLimits(), ServiceLimits()
    assert streams.streams_per_caller < leases.per_caller
    assert streams.streams < leases.leases


class GatedSource(w.MemorySource):
    """Gives no block before `gate` is open."""

    def __init__(self, ids) -> None:
        super().__init__(ids)
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def read(self, block_id):
        self.asked.set()
        await self.gate.wait()
        return await super().read(block_id)


async def test_too_many_streams_are_refused(world):
    source = GatedSource(w.chain(BLOCKS))
    sources = w.Sources().add(w.fingerprint(), source)
    peer = await world.peer(sources, limits=ServiceLimits(streams_per_caller=1))
    stub = stub_of(world, peer)
    lease_id = (await stub.LookupPrefix(lookup())).lease_id
    first = stub.FetchBlocks(pb.FetchBlocksRequest(lease_id=lease_id))
    await source.asked.wait()
    assert await status_of(read(stub, lease_id)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
    while peer.service.load:
        await asyncio.sleep(0.01)
    source.gate.set()
    assert await read(stub, lease_id) == [0, 1, 2, 3]


async def test_a_reader_that_is_slow_is_left_after_a_time(world):
    source, clock = GatedSource(w.chain(BLOCKS)), SettableClock()
    peer = await world.peer(w.Sources().add(w.fingerprint(), source), clock=clock)
    stub = stub_of(world, peer)
    lease_id = (await stub.LookupPrefix(lookup())).lease_id
    call = stub.FetchBlocks(pb.FetchBlocksRequest(lease_id=lease_id))
    reading = asyncio.ensure_future(call.read())
    await source.asked.wait()
    clock.advance(200)
    source.gate.set()
    assert await reading is grpc.aio.EOF


async def test_drained_it_lets_go_of_everything(world):
    sources, source = held()
    peer = await world.peer(sources)
    await stub_of(world, peer).LookupPrefix(lookup())
    peer.service.drain()
    assert source.pins == []
    assert len(peer.service.leases) == 0


# --- published blocks


def published(**more) -> pb.PublishBlockRequest:
    fields = {
        "block_hash": bytes(32),
        "block_index": 0,
        "token_count": w.BLOCK_TOKENS,
        "chunk_index": 0,
        "total_chunks": 100,
        "data": bytes(1 << 20),
        "block_sha256": bytes(32),
        "compatibility": w.fingerprint().to_wire(),
    }
    return pb.PublishBlockRequest(**(fields | more))


async def test_a_published_block_is_declined_before_it_is_sent(world):
    peer = await world.peer(held()[0])
    sent = 0

    async def chunks():
        nonlocal sent
        for index in range(100):
            sent += 1
            yield published(chunk_index=index)

    said = await stub_of(world, peer).PublishBlock(chunks())
    assert not said.stored
    assert sent < 100


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"block_hash": b"x"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"block_sha256": b""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"chunk_index": 1}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"total_chunks": 0}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"data": b""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_count": w.BLOCK_TOKENS + 1}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"block_index": 1 << 31}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"total_chunks": 1000}, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (
            {"compatibility": w.fingerprint(weights_digest="other").to_wire()},
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
        ({"compatibility": pb.CacheCompatibility()}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
    ids=str,
)
async def test_what_could_never_be_stored_is_refused_with_the_reason(world, more, status):
    peer = await world.peer(held()[0])

    async def chunks():
        yield published(**more)

    assert await status_of(stub_of(world, peer).PublishBlock(chunks())) is status


async def test_an_empty_stream_of_chunks_is_refused(world):
    peer = await world.peer(held()[0])

    async def nothing():
        return
        yield

    call = stub_of(world, peer).PublishBlock(nothing())
    assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT


# --- a fleet with a common key


def a_key(node_id: str = "me", tenant: str = "acme", key: bytes = KEY) -> FleetKey:
    return FleetKey(key=key, tenant=tenant, node_id=node_id)


def tenants_kind():
    return w.fingerprint(tenant="acme")


async def keyed(world: w.World, clock=None) -> w.Peer:
    sources, _ = held(kind=tenants_kind(), key=tenant_key(KEY, "acme"))
    return await world.peer(sources, fleet_key=a_key("peer"), clock=clock)


def tenants_wanted():
    kind = tenants_kind()
    return w.wanted(BLOCKS, kind=kind, ids=w.chain(BLOCKS, kind, tenant_key(KEY, "acme")))


async def test_members_with_the_key_fetch_their_tenants_blocks(world):
    peer = await keyed(world)
    fetcher = await world.fetcher(peer, fleet_key=a_key())
    sink = w.Sink()
    assert await fetcher.fetch(tenants_wanted(), [peer.holder()], sink) == BLOCKS
    assert sink.is_right(tenants_wanted().ids)


@pytest.mark.parametrize(
    ("key", "status"),
    [
        (None, grpc.StatusCode.UNAUTHENTICATED),
        (a_key(key=bytes(32)), grpc.StatusCode.UNAUTHENTICATED),
        (a_key(tenant="other"), grpc.StatusCode.PERMISSION_DENIED),
    ],
    ids=["unsigned", "another key", "another tenant"],
)
async def test_others_are_told_nothing(world, key, status):
    peer = await keyed(world)
    stub = stub_of(world, peer)
    request = lookup(tenant_namespace="acme")
    metadata = key.sign(request, time.time()) if key else ()
    assert await status_of(stub.LookupPrefix(request, metadata=metadata)) is status
    for call, ask in (
        (stub.GetCacheSummary, pb.GetCacheSummaryRequest()),
        (stub.LookupPrefix, request),
    ):
        signed = key.sign(ask, time.time()) if key else ()
        assert await status_of(call(ask, metadata=signed)) is status
    fetch = pb.FetchBlocksRequest(lease_id="l")
    signed = key.sign(fetch, time.time()) if key else ()
    assert await status_of(stub.FetchBlocks(fetch, metadata=signed).read()) is status


async def test_the_namespace_in_the_request_must_be_the_signers_own(world):
    peer = await keyed(world)
    request = lookup(tenant_namespace="other")
    call = stub_of(world, peer).LookupPrefix(request, metadata=a_key().sign(request, time.time()))
    assert await status_of(call) is grpc.StatusCode.PERMISSION_DENIED


async def test_names_made_without_the_tenants_key_find_nothing(world):
    peer = await keyed(world)
    fetcher = await world.fetcher(peer, fleet_key=a_key())
    kind = tenants_kind()
    wanted = w.wanted(BLOCKS, kind=kind, ids=w.chain(BLOCKS, kind))
    assert await fetcher.fetch(wanted, [peer.holder()], w.Sink()) == 0


@pytest.mark.parametrize(("skew_s", "counts"), [(-59, True), (59, True), (-62, False), (62, False)])
def test_a_signature_counts_for_a_minute(skew_s, counts):
    request, now = lookup(tenant_namespace="acme"), 1_700_000_000.0
    headers = a_key().sign(request, now + skew_s)
    if counts:
        assert a_key("peer").check(headers, request, now) == "me"
    else:
        with pytest.raises(Exception, match="clocks is wrong"):
            a_key("peer").check(headers, request, now)


def test_every_bit_of_a_signed_call_counts():
    request, now = lookup(tenant_namespace="acme"), 1_700_000_000.0
    headers = dict(a_key().sign(request, now))
    rng = random.Random(3)
    for name, text in headers.items():
        at = rng.randrange(len(text))
        changed = headers | {name: text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :]}
        with pytest.raises(Exception) as refusal:
            a_key("peer").check(changed.items(), request, now)
        assert not isinstance(refusal.value, Denied) or name == "x-kakeya-tenant-id"
    request.block_hashes[0] = bytes(32)
    with pytest.raises(Exception, match="MAC"):
        a_key("peer").check(headers.items(), request, now)


@pytest.mark.parametrize(
    "wrong", [{"key": bytes(15)}, {"tenant": ""}, {"node_id": ""}, {"tenant": "a\nb"}], ids=str
)
def test_a_key_that_cannot_sign_is_refused(wrong):
    fields = {"key": KEY, "tenant": "acme", "node_id": "me"} | wrong
    with pytest.raises(Exception, match="give"):
        FleetKey(**fields)


def test_a_key_does_not_show_itself():
    assert KEY.hex() not in repr(a_key())
    assert repr(KEY) not in repr(a_key())
