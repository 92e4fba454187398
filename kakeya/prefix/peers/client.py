"""One peer's PrefillCacheService, as this node calls it: every answer is checked.

A lookup has a short deadline. Fetched blocks leave here one by one, in the order that was asked
for, each of the announced size, under the name that was asked for, with the SHA-256 that came with
it, of finite numbers; anything else ends the stream, and so does silence. A breaker keeps a peer
that answers no lookups from being asked: three failures in a row, then backoff. The record of its
streams is a `PeerRecord`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from kakeya.core.clock import Clock
from kakeya.core.errors import (
    DeadlineExceeded,
    KakeyaError,
    NotFound,
    PeerUnavailable,
    Refused,
)
from kakeya.core.log import event
from kakeya.decoding.remote.breaker import BreakerState, CircuitBreaker
from kakeya.fleet.paths.link_rates import LinkRate
from kakeya.prefix.peers.answers import Lie, checked, due_part, read_hit, tail_after
from kakeya.prefix.peers.auth import FleetKey, Metadata
from kakeya.prefix.peers.choice import BlockHolder, Hit
from kakeya.prefix.peers.chunks import CHUNK_BYTES, Assembly, BrokenBlock, ChunkFault
from kakeya.prefix.peers.numbers import is_finite
from kakeya.prefix.peers.seams import MAX_IDS, TAIL_NAME_BYTES, MissingBlocks
from kakeya.prefix.peers.standing import PeerRecord
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import PrefillCacheServiceStub
from kakeya.wire.calls import calling

if TYPE_CHECKING:
    from kakeya.v1.distributed_pb2_grpc import PrefillCacheServiceAsyncStub

_log = logging.getLogger(__name__)
FetchCall: TypeAlias = "grpc.aio.UnaryStreamCall[pb.FetchBlocksRequest, pb.FetchBlocksResponse]"
ChannelFor = Callable[[BlockHolder], grpc.aio.Channel]
FETCH_S = 120.0
"""The longest that one stream of blocks lasts."""
_STALLS = 8.0
"""A silence of so many times the duration of a chunk is no pause, nor is one longer than the
slack."""
_THREAD_BYTES = 256 * 1024
"""A shorter chunk is proved sooner than a thread is woken."""
_FAULTLESS = (Refused, NotFound)
"""Answers of a peer that works: it is busy, or a lease is over."""


class PrefixPeer:
    """One peer. Lives on the event loop; `rate` is the rate of its blocks."""

    def __init__(
        self,
        *,
        channel_for: ChannelFor,
        clock: Clock,
        rng: random.Random,
        rate: LinkRate,
        fleet_key: FleetKey | None = None,
    ) -> None:
        self._channel_for = channel_for
        self._clock = clock
        self._fleet_key = fleet_key
        self.breaker = CircuitBreaker(rng)
        self.rate = rate
        self.standing = PeerRecord()

    def may_be_asked(self, now: float) -> bool:
        """Whether neither its breaker nor its standing is against it."""
        is_tried = self.breaker.state is BreakerState.TRYING
        return self.standing.may_be_asked(now) and now >= self.breaker.retry_mono and not is_tried

    async def lookup(
        self, holder: BlockHolder, wanted: MissingBlocks, timeout_s: float
    ) -> Hit | None:
        """Ask for the length of a history at the peer; None = no more than is here, or it is not
        asked now.

        Raises a KakeyaError when the peer gives no proper answer in time.
        """
        now = self._clock.mono()
        if not self.standing.may_be_asked(now) or not self.breaker.admit(now):
            return None
        try:
            async with asyncio.timeout(timeout_s):
                said = await self._ask(holder, wanted, timeout_s)
            hit = read_hit(holder, wanted, said)
        except TimeoutError as late:
            self.breaker.failed(self._clock.mono())
            raise DeadlineExceeded(f"{holder.address}: no answer in {timeout_s:g} s") from late
        except KakeyaError as failure:
            if isinstance(failure, _FAULTLESS):
                self.breaker.succeeded()
            else:
                self.breaker.failed(self._clock.mono())
            if isinstance(failure, Lie):
                self._lied(holder, failure)
            raise
        except asyncio.CancelledError:
            self.breaker.withdrawn()
            raise
        self.breaker.succeeded()
        if hit is None and holder.blocks > wanted.have:
            self.standing.failed(self._clock.mono())
        return hit

    async def fetch(
        self, hit: Hit, wanted: MissingBlocks, order: range
    ) -> AsyncGenerator[tuple[int, bytearray], None]:
        """Yield index and bytes of the blocks in `order`. Raises a KakeyaError when it breaks off.

        A peer without extensions sends its whole lease from the beginning: blocks before `order`
        are passed over, and `order` must ascend.
        """
        sent = order if hit.is_extended else range(order.stop)
        request = pb.FetchBlocksRequest(lease_id=hit.lease_id)
        if hit.is_extended:
            request.first_block = min(order)
            request.block_count = len(order)
            request.back_to_front = order.step < 0
        try:
            with calling(hit.holder.address):
                call = self._stub(hit.holder).FetchBlocks(
                    request, timeout=FETCH_S, metadata=self._metadata(request)
                )
        except PeerUnavailable:
            self.gave_up()
            raise
        self.rate.streams += 1
        try:
            began = self._clock.mono()
            for index in sent:
                payload = await self._block(call, hit, wanted, index)
                now = self._clock.mono()
                self.rate.observe(len(payload), now - began, now)
                began = now
                if index in order:
                    yield index, payload
            self.standing.sent()
        except Lie as lie:
            self._lied(hit.holder, lie)
            raise
        except _FAULTLESS:
            raise
        except KakeyaError:
            self.gave_up()
            raise
        finally:
            self.rate.streams -= 1
            call.cancel()

    def gave_up(self) -> None:
        """The peer was too slow to be of use, or ended."""
        self.standing.failed(self._clock.mono())

    async def _ask(
        self, holder: BlockHolder, wanted: MissingBlocks, timeout_s: float
    ) -> pb.LookupPrefixResponse:
        after = tail_after(holder, wanted)
        request = pb.LookupPrefixRequest(
            compatibility=wanted.fingerprint.to_wire(),
            block_hashes=wanted.ids[:MAX_IDS],
            tail_after=after,
            tail_names=b"".join(name[:TAIL_NAME_BYTES] for name in wanted.tails(after)),
        )
        with calling(holder.address):
            answer: pb.LookupPrefixResponse = await self._stub(holder).LookupPrefix(
                request, timeout=timeout_s, metadata=self._metadata(request)
            )
        return answer

    async def _block(
        self, call: FetchCall, hit: Hit, wanted: MissingBlocks, index: int
    ) -> bytearray:
        """Read one block. Raises PeerProtocol, PeerUnavailable, and the error of the peer."""
        due = due_part(hit, wanted, index)
        most = due.size or wanted.block_bytes + wanted.state_bytes
        layout = wanted.fingerprint.layout
        assembly: Assembly | None = None
        payload: bytearray | None = None
        try:
            while payload is None:
                chunk = await self._chunk(call, hit.holder, wanted.most_slack_s)
                if assembly is None:
                    assembly = Assembly(checked(chunk, due, index, hit.holder), most)
                if len(chunk.data) < _THREAD_BYTES:
                    payload = _add(assembly, chunk, layout)
                else:
                    payload = await asyncio.to_thread(_add, assembly, chunk, layout)
        except BrokenBlock as broken:
            raise Lie(f"{hit.holder.address}: {broken.message}") from broken
        if not (len(payload) == due.size if due.size else wanted.is_size(len(payload))):
            raise Lie(
                f"{hit.holder.address}: block {index} has {len(payload)} bytes and was said to "
                f"have {most}"
            )
        return payload

    async def _chunk(
        self, call: FetchCall, holder: BlockHolder, stall_s: float
    ) -> pb.FetchBlocksResponse:
        if self.rate.bytes_per_s:
            stall_s = max(stall_s, _STALLS * CHUNK_BYTES / self.rate.bytes_per_s)
        with calling(holder.address):
            try:
                async with asyncio.timeout(stall_s):
                    chunk = await call.read()
            except TimeoutError as silence:
                raise PeerUnavailable(f"{holder.address}: silent for {stall_s:.2f} s") from silence
        if not isinstance(chunk, pb.FetchBlocksResponse):
            raise NotFound(
                f"{holder.address}: the stream ended before its last block, which was evicted"
            )
        return chunk

    def _lied(self, holder: BlockHolder, lie: Lie) -> None:
        pause_s = self.standing.lied(self._clock.mono())
        event(
            _log,
            "a peer sends what cannot be true, and is not asked for a while",
            level=logging.WARNING,
            peer=holder.node_id,
            reason=lie.message,
            seconds=pause_s,
        )

    def _stub(self, holder: BlockHolder) -> PrefillCacheServiceAsyncStub:
        return PrefillCacheServiceStub(self._channel_for(holder))

    def _metadata(self, request: Message) -> Metadata:
        if self._fleet_key is None:
            return ()
        return self._fleet_key.sign(request, self._clock.wall())


def _add(assembly: Assembly, chunk: pb.FetchBlocksResponse, layout: str) -> bytearray | None:
    """Add a chunk; the whole block after its last one. Raises BrokenBlock."""
    assembly.add(chunk)
    if not assembly.is_complete:
        return None
    payload = assembly.payload()
    if not is_finite(payload, chunk.token_count, layout):
        raise BrokenBlock(
            ChunkFault.DAMAGED,
            f"block {assembly.index} has numbers that are not finite, so it is no KV",
        )
    return payload
