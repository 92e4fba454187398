"""Peers with blocks of random bytes, behind real servers on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc.aio

from kakeya.core.clock import Clock, SystemClock
from kakeya.prefix.names.blocks import BlockChain
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.peers.auth import FleetKey
from kakeya.prefix.peers.choice import BlockHolder
from kakeya.prefix.peers.fetch import PeerFetch
from kakeya.prefix.peers.seams import (
    TAIL_NAME_BYTES,
    BlockPart,
    FingerprintUsage,
    Loan,
    MissingBlocks,
)
from kakeya.prefix.peers.service import PrefillCacheService, ServiceLimits
from kakeya.v1.distributed_pb2_grpc import add_PrefillCacheServiceServicer_to_server

BLOCK_TOKENS = 16
BLOCK_BYTES = 100_000
LOOKUP_S = 3.0
"""Enough on a machine that tests keep busy; what the deadline does has tests of its own."""
CHUNK_BYTES = 32 * 1024  # four chunks a block


def fingerprint(**more) -> KvFingerprint:
    fields = {
        "model_id": "toy",
        "weights_digest": "w",
        "layout": "l",
        "exactness": "e",
        "block_tokens": BLOCK_TOKENS,
    }
    return KvFingerprint(**(fields | more))


def payload_of(block_id: bytes, size: int = BLOCK_BYTES) -> bytes:
    """The KV of a block, which its name decides."""
    return hashlib.shake_128(block_id).digest(size)


def chain(blocks: int, kind: KvFingerprint | None = None, key: bytes = b"") -> tuple[bytes, ...]:
    """The names of a history of so many blocks."""
    kind = kind or fingerprint()
    return BlockChain(kind.exact(), kind.block_tokens, key).ids(range(blocks * kind.block_tokens))


def wanted(
    blocks: int, have: int = 0, *, rate: float = BLOCK_TOKENS / 80.0, **more
) -> MissingBlocks:
    """Wants a history; a block takes BLOCK_TOKENS / rate seconds here, 80 s unless said.

    So a fetch has time on a machine that tests keep busy; what the slack does, tests of its own
    say with other figures.
    """
    kind = more.pop("kind", None) or fingerprint()
    fields = {
        "fingerprint": kind,
        "ids": more.pop("ids", None) or chain(blocks, kind),
        "have": have,
        "block_bytes": BLOCK_BYTES,
        "prefill_tokens_per_s": rate,
        "most_slack_s": 20.0,
    }
    return MissingBlocks(**(fields | more))


TAIL_TOKENS = 10
TAIL_BYTES = BLOCK_BYTES * TAIL_TOKENS // BLOCK_TOKENS


def tails(blocks: int) -> tuple[bytes, ...]:
    """What may lie behind so many blocks of a history, which never ends."""
    kind = fingerprint()
    made = BlockChain(kind.exact(), kind.block_tokens)
    behind = range(blocks * BLOCK_TOKENS, (blocks + 1) * BLOCK_TOKENS)
    return made.tail_ids(chain(blocks)[-1], behind)


class MemorySource:
    """A BlockSource in a dict; what is pinned is not evicted unless it is forced."""

    def __init__(self, ids: Sequence[bytes], size: int = BLOCK_BYTES) -> None:
        self.blocks = {block_id: payload_of(block_id, size) for block_id in ids}
        self.pins: list[tuple[bytes, ...]] = []
        self.reads: list[bytes] = []
        self.evictions = 0
        self.lent = 0

    def leading(self, ids):
        found = []
        for block_id in ids:
            if block_id not in self.blocks:
                break
            found.append(len(self.blocks[block_id]))
        return tuple(found)

    def tail(self, behind, names):
        for size in range(len(names), 0, -1):
            for block_id, payload in self.blocks.items():
                if block_id[:TAIL_NAME_BYTES] == names[size - 1]:
                    return BlockPart(id=block_id, tokens=size, size=len(payload))
        return None

    def pin(self, ids) -> Callable[[], None]:
        pinned = tuple(ids)
        self.pins.append(pinned)
        return lambda: self.pins.remove(pinned)

    async def read(self, block_id):
        self.reads.append(block_id)
        payload = self.blocks.get(block_id)
        if payload is None:
            return None
        self.lent += 1
        return Loan(memoryview(payload), self._returned)

    def _returned(self) -> None:
        self.lent -= 1

    def resident(self):
        return list(self.blocks)

    def usage(self):
        return FingerprintUsage(
            blocks=len(self.blocks),
            used_bytes=sum(map(len, self.blocks.values())),
            free_bytes=1 << 20,
            evictions=self.evictions,
        )

    def evict(self, block_id: bytes, *, by_force: bool = False) -> bool:
        if not by_force and any(block_id in pinned for pinned in self.pins):
            return False
        return self.blocks.pop(block_id, None) is not None


class Sources:
    """The BlockSources of one node."""

    def __init__(self, **by_kind) -> None:
        self.by_exact: dict[bytes, tuple[KvFingerprint, MemorySource]] = {}

    def add(self, kind: KvFingerprint, source: MemorySource) -> Sources:
        self.by_exact[kind.exact()] = (kind, source)
        return self

    def source(self, exact):
        found = self.by_exact.get(exact)
        return found and found[1]

    def fingerprints(self):
        return tuple(kind for kind, _ in self.by_exact.values())


class Sink:
    """Keeps what comes; `on_put` is told before a block is taken."""

    def __init__(self, on_put: Callable[[int], None] | None = None, room: int = 1 << 30) -> None:
        self.taken: dict[int, bytes] = {}
        self.order: list[int] = []
        self.tail_tokens = 0
        self._on_put = on_put
        self._room = room

    async def put(self, index, payload, tail_tokens=0):
        if self._on_put is not None:
            answer = self._on_put(index)
            if asyncio.iscoroutine(answer):
                await answer
        if len(self.order) >= self._room:
            return False
        self.order.append(index)
        self.taken[index] = bytes(payload)
        self.tail_tokens = tail_tokens or self.tail_tokens
        return True

    def is_right(self, ids: Sequence[bytes]) -> bool:
        return all(
            hashlib.sha256(data).digest() == hashlib.sha256(payload_of(ids[i], len(data))).digest()
            for i, data in self.taken.items()
        )


class Peer:
    """A service behind a server of its own."""

    def __init__(self, service: PrefillCacheService, node_id: str) -> None:
        self.service = service
        self.node_id = node_id
        self.server = grpc.aio.server()
        add_PrefillCacheServiceServicer_to_server(service, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def holder(self, blocks: int = 0) -> BlockHolder:
        return BlockHolder(node_id=self.node_id, address=self.address, blocks=blocks)


class World:
    """Starts peers and fetches from them; everything ends with it."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.lost: list[str] = []

    async def peer(
        self,
        sources: Sources,
        *,
        kind: type[PrefillCacheService] = PrefillCacheService,
        clock: Clock | None = None,
        fleet_key: FleetKey | None = None,
        limits: ServiceLimits | None = None,
        **more,
    ) -> Peer:
        node_id = f"peer-{len(self.peers)}"
        rng = random.Random(len(self.peers))
        service = kind(
            node_id,
            sources,
            summary=tuple,
            clock=clock or SystemClock(),
            draw=lambda: rng.randbytes(16).hex(),
            fleet_key=fleet_key,
            limits=limits,
            chunk_bytes=CHUNK_BYTES,
            **more,
        )
        peer = Peer(service, node_id)
        await peer.server.start()
        self.peers.append(peer)
        return peer

    def channel(self, holder: BlockHolder) -> grpc.aio.Channel:
        if holder.address not in self.channels:
            self.channels[holder.address] = grpc.aio.insecure_channel(
                holder.address, options=(("grpc.use_local_subchannel_pool", 1),)
            )
        return self.channels[holder.address]

    async def fetcher(
        self,
        *peers: Peer,
        fleet_key: FleetKey | None = None,
        lookup_s: float = LOOKUP_S,
        clock: Clock | None = None,
    ) -> PeerFetch:
        """A fetcher whose connections to these peers stand, as gossip's do."""
        for peer in peers:
            await self.channel(peer.holder()).channel_ready()
        return PeerFetch(
            channel_for=self.channel,
            clock=clock or SystemClock(),
            rng=random.Random(1),
            fleet_key=fleet_key,
            on_lost=self.lost.append,
            lookup_s=lookup_s,
        )

    async def aclose(self) -> None:
        for channel in self.channels.values():
            await channel.close()
        for peer in self.peers:
            await peer.server.stop(0)


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    world = World()
    try:
        yield world
    finally:
        await world.aclose()
