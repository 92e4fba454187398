"""Histories of GGUF models in the node's store of prefixes: what a slot of llama-server held.

A file in the store is what llama-server writes of a slot, tokens and KV, with the store's own head,
proofs, retention and bounds. It is named by its tokens behind a seed: the digest of the weights,
the build of the server, and what its KV depends on beside these. So it is found by content alone,
and no other model, server or layout takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from kakeya.core.errors import PeerProtocol
from kakeya.core.units import KIB
from kakeya.generation.retention import Retention
from kakeya.prefix.disk.kvb import HEADER_LIMIT_BYTES, StoredBlock
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.names.blocks import ROOT, TOKEN_BYTES, BlockId, shared_tokens

INDEX_S = 2.0
"""Seconds that a first request waits for the scan of the store."""
MOST_TOKENS = (HEADER_LIMIT_BYTES - 64 * KIB) * 3 // 4 // TOKEN_BYTES
"""Of a history that is kept: its tokens lie in the head of the file, in base64."""
_HOLDS = "slot"
_HEAD = struct.Struct("<III")
_MAGIC = 0x67677371
_MARK = b"\xff" * TOKEN_BYTES
"""In front of the tokens of newer servers: a mark, a version, and how many there are."""


Weights = Callable[[Path, str], asyncio.Future[str]]
"""Finds the digest of the weights in a file, which has this state (`weights_state`)."""


class Holder(Protocol):
    """What holds histories in memory: the slots of one server."""

    async def keep(self, timeout_s: float) -> None:
        """Have the histories of idle slots in the store, as many as that time allows."""
        ...

    async def forget(self) -> None:
        """Empty the slots, and keep nothing of those that are busy."""
        ...


class SlotArchive:
    """The archive of a node. Without a store nothing is kept."""

    def __init__(self) -> None:
        self.store: BlockStore | None = None
        self.holders: set[Holder] = set()
        self._weights: Weights | None = None
        self._seeds: dict[str, bytes] = {}
        self._known: dict[BlockId, StoredBlock] = {}
        self._is_scanned = False

    def open(self, store: BlockStore | None, weights: Weights) -> None:
        """Keep histories in a store from now on."""
        self.store, self._weights = store, weights

    def seeds(self) -> frozenset[bytes]:
        """The seeds of the models that were loaded since the start."""
        return frozenset(self._seeds.values())

    async def seed(self, model_id: str, path: Path, state: str, traits: Sequence[str]) -> bytes:
        """Make the seed of a model's histories; b"" = nothing is kept.

        Raises InvalidArgument where the file is another one than the server has loaded.
        """
        if self.store is None or self._weights is None:
            return b""
        said = [_HOLDS, await asyncio.shield(self._weights(path, state)), *traits]
        seed = hashlib.sha256("\0".join(said).encode()).digest()
        self._seeds[model_id] = seed
        return seed

    def holds(self, model_id: str) -> bool:
        """Whether there is a history of a model of this name."""
        wanted = {"model_id": model_id, "holds": _HOLDS}
        return any(block.facts == wanted for block in self._blocks())

    async def ready(self) -> None:
        """Wait a moment for the scan of the store, right after a start."""
        store = self.store
        if store is None or self._is_scanned:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INDEX_S):
                await store.ready()
            self._is_scanned = True
            found = [entry.block for entry in store.entries()]
            self._known |= {one.id: one for one in found if one.facts.get("holds") == _HOLDS}

    def best(self, seed: bytes, packed: bytes) -> tuple[StoredBlock | None, int]:
        """Find the history that begins like a prompt, and how many tokens they share."""
        found, most = None, 0
        for block in self._of(seed):
            shared = shared_tokens(block.packed_ids, packed)
            if shared > most and block.id == _name(seed, block.packed_ids):
                found, most = block, shared
        return found, most

    async def put(
        self, seed: bytes, model_id: str, payload: memoryview, retention: Retention, wall: float
    ) -> int:
        """Store what a server wrote; return its tokens, 0 = it is not stored.

        Shorter histories that it goes on from make place for it. Raises PeerProtocol for a file
        that is not llama-server's.
        """
        packed = packed_history(payload)
        if self.store is None or not 0 < len(packed) <= MOST_TOKENS * TOKEN_BYTES:
            return 0
        block = StoredBlock(
            id=_name(seed, packed),
            parent=ROOT,
            fingerprint=seed,
            facts={"model_id": model_id, "holds": _HOLDS},
            index=0,
            packed_ids=packed,
            payload_bytes=payload.nbytes,
            retention=retention,
            created_at=wall,
        )
        if await self.store.put(block, payload, is_mapped=True):
            self._known[block.id] = block
            self.store.forget(
                [
                    one.id
                    for one in self._of(seed)
                    if one.id != block.id and packed.startswith(one.packed_ids)
                ]
            )
        return block.tokens if self.store.has(block.id) else 0

    async def aclose(self, timeout_s: float) -> None:
        """Have all histories in the store, and keep nothing from then on."""
        await asyncio.gather(*(one.keep(timeout_s) for one in self.holders))
        self.store = None

    async def forget(self) -> None:
        """Empty the slots of all servers."""
        await asyncio.gather(*(one.forget() for one in self.holders))

    def _of(self, seed: bytes) -> Iterator[StoredBlock]:
        return (block for block in self._blocks() if block.fingerprint == seed)

    def _blocks(self) -> Iterator[StoredBlock]:
        """What the store holds, on disk or on its way there."""
        store = self.store
        for block in tuple(self._known.values()):
            if store is not None and store.has(block.id):
                yield block
            else:
                del self._known[block.id]


def packed_history(payload: memoryview) -> bytes:
    """The tokens at the beginning of what llama-server wrote of a slot, packed.

    Raises PeerProtocol for anything else.
    """
    if payload.nbytes < _HEAD.size:
        raise PeerProtocol(f"the file of a slot has only {payload.nbytes} bytes")
    magic, _, count = _HEAD.unpack_from(payload)
    ids = bytes(payload[_HEAD.size : _HEAD.size + count * TOKEN_BYTES])
    if magic != _MAGIC or len(ids) != count * TOKEN_BYTES:
        raise PeerProtocol(f"the file of a slot begins with {magic:#x} and {count} tokens")
    if ids[:TOKEN_BYTES] != _MARK or count < 3:
        return ids
    inner = int.from_bytes(ids[2 * TOKEN_BYTES : 3 * TOKEN_BYTES], "little")
    packed = ids[3 * TOKEN_BYTES : (3 + inner) * TOKEN_BYTES]
    if len(packed) != inner * TOKEN_BYTES:
        raise PeerProtocol(f"the file of a slot tells {inner} tokens, and has {len(packed)} bytes")
    return packed


def _name(seed: bytes, packed: bytes) -> bytes:
    return hashlib.sha256(seed + packed).digest()
