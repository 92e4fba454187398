"""The names of blocks of KV: digests of everything that a block depends on.

    id_0 = H(seed | 32 zero bytes | tokens of block 0)
    id_i = H(seed | id_(i-1)      | tokens of block i)        tokens: uint32, little-endian

H is SHA-256, or HMAC-SHA256 with a tenant's key. The seed is a fingerprint's digest, so equal ids
mean equal tokens from the beginning, computed by equal arithmetic; an id also names its whole
prefix, and with a key an id reveals nothing to a reader without it. The rest of a history behind
its whole blocks, its *tail*, is hashed like a block, shorter as it is. Tokens are marked where the
history was cut for prefill: see `cuts`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kakeya.core.errors import InvalidArgument
from kakeya.core.units import pack_ids

BlockId: TypeAlias = bytes
"""32 bytes."""

ID_BYTES = 32
ROOT: BlockId = bytes(ID_BYTES)
"""Stands for the block before the first."""
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The names of the blocks of histories, by one seed. Raises InvalidArgument.

    `seed` has 32 bytes, `block_tokens` is a power of two, `key` is a tenant's or empty.
    """

    seed: bytes
    block_tokens: int
    key: bytes = b""

    def __post_init__(self) -> None:
        if len(self.seed) != ID_BYTES:
            raise InvalidArgument(
                f"the seed of block ids has {len(self.seed)} bytes; it must have {ID_BYTES}"
            )
        check_block_tokens(self.block_tokens)

    def ids(self, token_ids: Sequence[int]) -> tuple[BlockId, ...]:
        """Name the whole blocks of a history. Raises InvalidArgument for ids that are no uint32."""
        packed = packed_ids(token_ids)
        step = self.block_tokens * TOKEN_BYTES
        found: list[BlockId] = []
        parent = ROOT
        for start in range(0, len(packed) - step + 1, step):
            parent = self.name(parent, packed[start : start + step])
            found.append(parent)
        return tuple(found)

    def name(self, parent: BlockId | None, packed: bytes) -> BlockId:
        """Name a packed text, of one block or less, behind a block; None = at the beginning."""
        said = self.seed + (parent or ROOT) + packed
        if self.key:
            return hmac.digest(self.key, said, "sha256")
        return hashlib.sha256(said).digest()

    def tail_id(self, parent: BlockId | None, rest: Sequence[int]) -> BlockId:
        """Name the tokens that follow a block, None = the beginning, and fill no block.

        Raises InvalidArgument for more tokens than a block, or none.
        """
        if not 0 < len(rest) <= self.block_tokens:
            raise InvalidArgument(
                f"{len(rest)} tokens are no block; there must be 1 to {self.block_tokens}"
            )
        return self.name(parent, packed_ids(rest))

    def tail_ids(self, parent: BlockId | None, tokens: Sequence[int]) -> tuple[BlockId, ...]:
        """Name each beginning of the tokens that follow a block: of 1 token, of 2, and so on.

        Of at most as many as do not fill a block. Raises InvalidArgument as `ids` does.
        """
        packed = packed_ids(tokens[: self.block_tokens - 1])
        said = self.seed + (parent or ROOT)
        digest = hmac.new(self.key, said, "sha256") if self.key else hashlib.sha256(said)
        found: list[BlockId] = []
        for start in range(0, len(packed), TOKEN_BYTES):
            digest.update(packed[start : start + TOKEN_BYTES])
            found.append(digest.digest())
        return tuple(found)

    def names(self, block_id: BlockId, parent: BlockId | None, token_ids: Sequence[int]) -> bool:
        """Whether these tokens behind this parent have this id, as a peer claims."""
        if not 0 < len(token_ids) <= self.block_tokens:
            return False
        return hmac.compare_digest(self.tail_id(parent, token_ids), block_id)


def check_block_tokens(block_tokens: int) -> None:
    """Raise InvalidArgument unless so many tokens can be a block: a power of two."""
    if block_tokens < 1 or block_tokens & (block_tokens - 1):
        raise InvalidArgument(f"a block of {block_tokens} tokens; it must be a power of two")


def shared_tokens(one: bytes, other: bytes) -> int:
    """Count the tokens that two packed lists begin with alike."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    if one[:TOKEN_BYTES] != other[:TOKEN_BYTES]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """Pack a text. Raises InvalidArgument for ids that are no uint32."""
    try:
        return pack_ids(token_ids)
    except (OverflowError, TypeError):
        wrong = next(
            token
            for token in token_ids
            if not isinstance(token, int) or not 0 <= token < 1 << 8 * TOKEN_BYTES
        )
        raise InvalidArgument(
            f"token id {wrong!r} is outside 0..2^32-1", param="token_ids"
        ) from None
