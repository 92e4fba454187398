"""PrefillCacheService: this node's blocks of KV, for peers; no engine is woken for them.

    GetCacheSummary   the blocks here, by fingerprint
    LookupPrefix      how many leading blocks of a chain are here, leased to the caller
    FetchBlocks       the bytes of a lease, chunk by chunk, as fast as the caller reads
    PublishBlock      a block that a peer would like to see kept: politely declined

A block is read, and hashed in a thread, when its turn comes. A block that was evicted under its
lease ends the stream early: the blocks before it are a whole run, and the caller computes the rest.
Published blocks are not kept, as a name alone does not say which text it is of, so the block could
not be checked or find its place among the others; the first chunk is judged and the rest is not
even read.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    Denied,
    InvalidArgument,
    QueueFull,
    Refused,
    Unauthenticated,
)
from kakeya.core.units import MIB, format_bytes
from kakeya.generation.place_rate import PlaceRate
from kakeya.prefix.names.blocks import ID_BYTES, BlockId
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.peers.auth import FleetKey
from kakeya.prefix.peers.chunks import CHUNK_BYTES, SHA256_BYTES, cut
from kakeya.prefix.peers.leases import BlockLease, BlockLeases, LeaseLimits
from kakeya.prefix.peers.seams import MAX_IDS, TAIL_NAME_BYTES, BlockSources
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import PrefillCacheServiceServicer
from kakeya.wire.server.authorization import current_caller
from kakeya.wire.status import errors_end

Context = grpc.aio.ServicerContext[Any, Any]
HASHES_KEPT = 4096
MAX_PUBLISHED_BYTES = 256 * MIB
_INLINE_BYTES = 256 * 1024
"""A shorter block is hashed sooner than a thread is woken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The limits of peers at once; `stream_s` bounds a slow reader."""

    streams: int = 8
    streams_per_caller: int = 4
    stream_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerServiceStats:
    """Counts of calls of peers since the start."""

    lookups: int = 0
    hits: int = 0
    fetches: int = 0
    blocks_served: int = 0
    tokens_served: int = 0
    bytes_served: int = 0
    blocks_gone: int = 0
    declined: int = 0


class PrefillCacheService(PrefillCacheServiceServicer):
    """Serves `sources`. `summary` makes the caches that GetCacheSummary tells; `fleet_key` None =
    unsigned calls."""

    def __init__(
        self,
        node_id: str,
        sources: BlockSources,
        *,
        summary: Callable[[], tuple[pb.CacheCapability, ...]],
        clock: Clock,
        draw: Callable[[], str],
        fleet_key: FleetKey | None = None,
        lease_limits: LeaseLimits | None = None,
        limits: ServiceLimits | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._node_id = node_id
        self._sources = sources
        self._summary = summary
        self._clock = clock
        self._fleet_key = fleet_key
        self._limits = limits or ServiceLimits()
        self._chunk_bytes = chunk_bytes
        self._streams: Counter[str] = Counter()
        self._rate = PlaceRate(clock.mono)
        self._hashes: OrderedDict[tuple[BlockId, int], bytes] = OrderedDict()
        self.leases = BlockLeases(draw, lease_limits)
        self.epoch = 0
        self.stats = PeerServiceStats()

    @property
    def load(self) -> float:
        """Share of the streams that are taken, 0 to 1."""
        return min(1.0, self._streams.total() / self._limits.streams)

    def sweep(self) -> None:
        """End leases whose time is over; called now and then."""
        self.leases.expire(self._clock.mono())

    def drain(self) -> None:
        """End all leases: the node is stopping."""
        self.leases.clear()

    # --- calls

    async def GetCacheSummary(
        self, request: pb.GetCacheSummaryRequest, context: Context
    ) -> pb.GetCacheSummaryResponse:
        """Tell the caches of one fingerprint or, without one, of all."""
        async with errors_end(context):
            self._caller(request, context)
            asked = None
            if request.HasField("compatibility"):
                asked = self._fingerprint(request.compatibility)
            caches = [
                cache
                for cache in self._summary()
                if asked is None or KvFingerprint.from_wire(cache.compatibility) == asked
            ]
            return pb.GetCacheSummaryResponse(node_id=self._node_id, caches=caches)
        raise AssertionError("abort returned")

    async def LookupPrefix(
        self, request: pb.LookupPrefixRequest, context: Context
    ) -> pb.LookupPrefixResponse:
        """Find the longest leading run that is here, and lease it."""
        async with errors_end(context):
            caller = self._caller(request, context)
            self._count(lookups=1)
            missed = pb.LookupPrefixResponse(node_id=self._node_id, cache_epoch=self.epoch)
            fingerprint = self._fingerprint(request.compatibility)
            ids = _checked(request.block_hashes)
            names = _tail_names(request)
            source = None if fingerprint is None else self._sources.source(fingerprint.exact())
            sizes = () if source is None else source.leading(ids)
            if source is None or fingerprint is None or not sizes:
                return missed
            held = ids[: len(sizes)]
            tail = source.tail(held[-1], names) if len(held) == request.tail_after else None
            now = self._clock.mono()
            lease = self.leases.grant(caller, source, fingerprint, held, sizes, now, tail=tail)
            self._count(hits=1)
            return pb.LookupPrefixResponse(
                node_id=self._node_id,
                hit_block_count=len(sizes),
                hit_token_count=len(sizes) * fingerprint.block_tokens,
                transfer_bytes=sum(lease.sizes),
                cache_epoch=self.epoch,
                lease_id=lease.lease_id,
                lease_expires_at_unix=self._clock.wall() + lease.ends_mono - now,
                block_bytes=sizes,
                tail_tokens=lease.tail_tokens,
                tail_bytes=0 if tail is None else tail.size,
            )
        raise AssertionError("abort returned")

    async def FetchBlocks(
        self, request: pb.FetchBlocksRequest, context: Context
    ) -> AsyncIterator[pb.FetchBlocksResponse]:
        """Stream the blocks of a lease, or those of it that are asked for."""
        async with errors_end(context):
            caller = self._caller(request, context)
            with self.leases.open(request.lease_id, caller, self._clock.mono) as lease:
                order = _order(request, len(lease.ids))
                with self._seat(caller):
                    until = self._clock.mono() + self._limits.stream_s
                    async with aclosing(self._stream(lease, order, until)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                lease.let_go()

    async def PublishBlock(
        self, requests: AsyncIterator[pb.PublishBlockRequest], context: Context
    ) -> pb.PublishBlockResponse:
        """Decline a block, or say why it could not even be meant."""
        async with errors_end(context):
            first = await anext(aiter(requests), None)
            if first is None:
                raise InvalidArgument("no chunk came; a block has at least one")
            self._caller(first, context)
            fingerprint = self._fingerprint(first.compatibility)
            if fingerprint is None or self._sources.source(fingerprint.exact()) is None:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "blocks of this fingerprint are of no use to this node",
                )
            else:
                _check_published(first, fingerprint)
            self._count(declined=1)
            return pb.PublishBlockResponse(stored=False, cache_epoch=self.epoch)
        raise AssertionError("abort returned")

    # --- the caller and its request

    def _caller(self, request: Any, context: Context) -> str:  # noqa: ANN401 - any message
        """Name the caller as far as it is known. Raises Unauthenticated, Denied."""
        if self._fleet_key is not None:
            headers = [(str(name), text) for name, text in context.invocation_metadata() or ()]
            signer = self._fleet_key.check(headers, request, self._clock.wall())
            return f"{_connection(context)} {signer}"
        return _connection(context)

    def _fingerprint(self, said: pb.CacheCompatibility) -> KvFingerprint | None:
        """Read the fingerprint of a request; None = of no kind that is here.

        Raises Denied for the namespace of another tenant.
        """
        tenant = self._fleet_key.tenant if self._fleet_key is not None else ""
        if said.tenant_namespace != tenant:
            raise Denied(
                f"namespace {said.tenant_namespace[:64]!r} has no blocks here; "
                f"this node serves {tenant!r}"
            )
        return KvFingerprint.from_wire(said)

    # --- serving

    def _is_full(self, caller: str) -> bool:
        limits, own = self._limits, self._streams[caller]
        return self._streams.total() >= limits.streams or own >= limits.streams_per_caller

    @contextmanager
    def _seat(self, caller: str) -> Iterator[None]:
        limits, own = self._limits, self._streams[caller]
        if self._is_full(caller):
            raise QueueFull(
                f"{self._streams.total()} streams of blocks are open, {own} of them to {caller}; "
                f"there may be {limits.streams}, {limits.streams_per_caller} to one caller",
                retry_after_s=self._rate.retry_after_s(),
            )
        self._streams[caller] += 1
        if self._is_full(caller):
            self._rate.full()
        self._count(fetches=1)
        try:
            yield
        finally:
            self._rate.freed(is_full=self._is_full(caller))
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _stream(
        self, lease: BlockLease, order: range, until_mono: float
    ) -> AsyncGenerator[pb.FetchBlocksResponse, None]:
        for index in order:
            loan = await lease.source.read(lease.ids[index])
            if loan is None:
                self._count(blocks_gone=1)
                return
            try:
                if len(loan.view) != lease.sizes[index]:  # kept anew, with or without its state
                    self._count(blocks_gone=1)
                    return
                sha256 = await self._sha256(lease.ids[index], loan.view)
                for chunk in self._chunks(lease, index, loan.view, sha256):
                    if self._clock.mono() > until_mono:
                        return
                    if chunk.chunk_index == chunk.total_chunks - 1:
                        # The reader may leave once it has this one.
                        self._count(
                            blocks_served=1,
                            tokens_served=lease.tokens_of(index),
                            bytes_served=lease.sizes[index],
                        )
                    yield chunk
            finally:
                loan.release()

    def _chunks(
        self, lease: BlockLease, index: int, view: memoryview, sha256: bytes
    ) -> Iterator[pb.FetchBlocksResponse]:
        for chunk_index, total, data in cut(view, self._chunk_bytes):
            yield pb.FetchBlocksResponse(
                block_hash=lease.ids[index],
                block_index=index,
                token_count=lease.tokens_of(index),
                chunk_index=chunk_index,
                total_chunks=total,
                data=data,
                block_sha256=sha256,
                cache_epoch=self.epoch,
            )

    async def _sha256(self, block_id: BlockId, view: memoryview) -> bytes:
        # One name may stand for two lengths: with and without the recurrent state behind it.
        key = block_id, len(view)
        known = self._hashes.get(key)
        if known is None:
            if len(view) <= _INLINE_BYTES:
                known = hashlib.sha256(view).digest()
            else:
                known = await _hashed_in_thread(view)
            self._hashes[key] = known
            if len(self._hashes) > HASHES_KEPT:
                self._hashes.popitem(last=False)
        return known

    def _count(self, **more: int) -> None:
        was = self.stats
        self.stats = replace(was, **{name: getattr(was, name) + n for name, n in more.items()})


async def _hashed_in_thread(view: memoryview) -> bytes:
    """Hash lent bytes; they are read no more when this ends, also by cancellation."""
    work = asyncio.ensure_future(asyncio.to_thread(lambda: hashlib.sha256(view).digest()))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise


def _connection(context: Context) -> str:
    try:
        caller = current_caller()
    except Unauthenticated:  # a server without a guard
        return context.peer().rpartition(":")[0]
    return caller.node_id or caller.address.rpartition(":")[0]


def _checked(hashes: Sequence[bytes]) -> tuple[BlockId, ...]:
    if not 1 <= len(hashes) <= MAX_IDS:
        raise InvalidArgument(
            f"{len(hashes)} block hashes; give 1 to {MAX_IDS}", param="block_hashes"
        )
    if any(len(block_id) != ID_BYTES for block_id in hashes):
        raise InvalidArgument(f"a block hash has {ID_BYTES} bytes", param="block_hashes")
    return tuple(hashes)


def _tail_names(request: pb.LookupPrefixRequest) -> tuple[bytes, ...]:
    packed, size = request.tail_names, TAIL_NAME_BYTES
    most = request.compatibility.block_size_tokens * size
    if len(packed) % size or len(packed) > most:
        raise InvalidArgument(
            f"the names of tails have {len(packed)} bytes; {size} of each, one for each token of "
            f"a block, are {most}",
            param="tail_names",
        )
    return tuple(packed[at : at + size] for at in range(0, len(packed), size))


def _order(request: pb.FetchBlocksRequest, blocks: int) -> range:
    """Which blocks of a lease are sent, in which order."""
    first, count = request.first_block, request.block_count
    end = first + count if count else blocks
    if not first < end <= blocks:
        raise InvalidArgument(
            f"blocks {first} to {end} of a lease of {blocks}",
            param="block_count" if count else None,
        )
    order = range(first, end)
    return order[::-1] if request.back_to_front else order


def _check_published(chunk: pb.PublishBlockRequest, fingerprint: KvFingerprint) -> None:
    """Raise InvalidArgument for a chunk that begins no block, Refused for a block that is too
    large."""
    is_named = len(chunk.block_hash) == ID_BYTES and len(chunk.block_sha256) == SHA256_BYTES
    is_first = chunk.chunk_index == 0 and chunk.total_chunks >= 1 and bool(chunk.data)
    is_placed = chunk.block_index < MAX_IDS and 1 <= chunk.token_count <= fingerprint.block_tokens
    if not (is_named and is_first and is_placed):
        raise InvalidArgument(
            f"the first message must be chunk 0 of a block of 1 to {fingerprint.block_tokens} "
            f"tokens, with a hash and a SHA-256 of {ID_BYTES} bytes each and some data"
        )
    size = chunk.total_chunks * len(chunk.data)
    if size > MAX_PUBLISHED_BYTES:
        raise Refused(
            f"a block of about {format_bytes(size)} is not taken; "
            f"at most {format_bytes(MAX_PUBLISHED_BYTES)}"
        )
