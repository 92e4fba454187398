"""A block on the wire: cut into chunks, and put together again from the chunks of a peer.

    chunk     block hash, index, token count | chunk i of n | bytes | SHA-256 of the whole block

Every chunk repeats the facts of its block, and must repeat them exactly; chunks come in order, each
once, none empty, and together no more than was announced. Only bytes that have the SHA-256 that
their sender named leave an `Assembly`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from kakeya.core.units import KIB, MIB
from kakeya.v1.distributed_pb2 import FetchBlocksResponse as Chunk

CHUNK_BYTES = MIB
"""The wire is meant for 2 MiB; half of that holds an event loop up half as long."""
LEAST_CHUNK_BYTES = 16 * KIB
"""A block in smaller chunks than these, the last one aside, costs more to take than to compute."""
SHA256_BYTES = 32


class ChunkFault(StrEnum):
    """The fault of a chunk."""

    OVERSIZE = "oversize"
    INCONSISTENT = "inconsistent"
    DAMAGED = "damaged"


class BrokenBlock(ValueError):
    """Chunks that make no block. `fault` says why."""

    def __init__(self, fault: ChunkFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message


class _Whole(NamedTuple):
    """The facts that all chunks of a block repeat."""

    block_hash: bytes
    block_index: int
    token_count: int
    total_chunks: int
    block_sha256: bytes


def cut(payload: memoryview, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int, bytes]]:
    """Cut a block: the number of each chunk, how many there are, its bytes."""
    total = max(1, -(-len(payload) // chunk_bytes))
    for index in range(total):
        yield index, total, bytes(payload[index * chunk_bytes : (index + 1) * chunk_bytes])


class Assembly:
    """Puts one block together. `most_bytes` bounds it; `first` is its first chunk, not yet added.

    Raises BrokenBlock, as `add` and `payload` do; it is of no use afterwards.
    """

    def __init__(self, first: Chunk, most_bytes: int) -> None:
        self._whole = whole = _whole_of(first)
        self._most_bytes = most_bytes
        self._data = bytearray()
        self._sha256 = hashlib.sha256()
        self._next = 0
        most_chunks = -(-most_bytes // LEAST_CHUNK_BYTES) + 1
        if len(whole.block_sha256) != SHA256_BYTES:
            raise BrokenBlock(
                ChunkFault.INCONSISTENT,
                f"block_sha256 has {len(whole.block_sha256)} bytes; it must have {SHA256_BYTES}",
            )
        if not 1 <= whole.total_chunks <= most_chunks:
            raise BrokenBlock(
                ChunkFault.OVERSIZE,
                f"block {whole.block_index} would come in {whole.total_chunks} chunks; "
                f"1 to {most_chunks} are taken for {most_bytes} bytes",
            )

    @property
    def index(self) -> int:
        """The block's place in its history."""
        return self._whole.block_index

    @property
    def is_complete(self) -> bool:
        """Whether the last chunk was added."""
        return self._next == self._whole.total_chunks

    def __len__(self) -> int:
        return len(self._data)

    def belongs(self, chunk: Chunk) -> bool:
        """Whether a chunk says that it is of the same block."""
        return chunk.block_index == self._whole.block_index

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
        whole, data = self._whole, chunk.data
        if _whole_of(chunk) != whole:
            raise BrokenBlock(
                ChunkFault.INCONSISTENT,
                f"chunk {chunk.chunk_index} of block {whole.block_index} says something else of "
                "its block than the first one; hash, totals and SHA-256 must be equal in all",
            )
        if chunk.chunk_index != self._next or self.is_complete:
            raise BrokenBlock(
                ChunkFault.INCONSISTENT,
                f"chunk {chunk.chunk_index} of block {whole.block_index} came where "
                f"{self._next} of {whole.total_chunks} was due",
            )
        if not data or len(self._data) + len(data) > self._most_bytes:
            raise BrokenBlock(
                ChunkFault.OVERSIZE,
                f"block {whole.block_index} has {len(self._data)} bytes and gets {len(data)} more; "
                f"at least 1, and together at most {self._most_bytes}, were due",
            )
        self._data += data
        self._sha256.update(data)
        self._next += 1

    def payload(self) -> bytearray:
        """The whole block, checked."""
        if not self.is_complete:
            raise BrokenBlock(
                ChunkFault.DAMAGED,
                f"block {self.index} ended after {self._next} of {self._whole.total_chunks} chunks",
            )
        if self._sha256.digest() != self._whole.block_sha256:
            raise BrokenBlock(
                ChunkFault.DAMAGED,
                f"the {len(self._data)} bytes of block {self.index} do not have the SHA-256 that "
                "came with them",
            )
        return self._data


def _whole_of(chunk: Chunk) -> _Whole:
    return _Whole(
        chunk.block_hash,
        chunk.block_index,
        chunk.token_count,
        chunk.total_chunks,
        chunk.block_sha256,
    )
