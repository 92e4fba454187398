"""A small set of block ids for a card: an id that it denies is not held, one that it allows may be.

A Bloom filter without hashing of its own: ids are digests, so their words are as good as random.
Its bytes are a version, the number of bits that an id sets, and the bits. Peers use it as a hint
only: a wrong one costs a lookup.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.prefix.names.blocks import ID_BYTES, BlockId

MAX_BYTES = 2048
"""Of a filter on a card; a card travels in every round of gossip."""
_VERSION = 1
_HEAD = struct.Struct("<BB")  # version, bits that an id sets
MAX_BITS = 8 * (MAX_BYTES - _HEAD.size)
_WORDS = struct.Struct(f"<{ID_BYTES // 4}I")
_MAX_HASHES = ID_BYTES // 4


@dataclass(frozen=True, slots=True)
class Filter:
    """Some ids; `hashes` of the bits are set for each. Made by `of` or `from_bytes`."""

    hashes: int
    field: bytes

    @staticmethod
    def of(ids: Iterable[BlockId], bits: int = MAX_BITS) -> Filter:
        """Put ids into a filter of so many bits, a multiple of 8. Raises InvalidArgument.

        As many bits are set for each as makes the fewest mistakes: bits / ids * ln 2, 1 to 8.
        """
        if not 8 <= bits <= MAX_BITS or bits % 8:
            raise InvalidArgument(
                f"a filter of {bits} bits; it must be a multiple of 8, from 8 to {MAX_BITS}"
            )
        held = set(ids)
        best = round(bits / max(1, len(held)) * math.log(2))
        hashes = min(max(1, best), _MAX_HASHES)
        field = bytearray(bits // 8)
        for block_id in held:
            for word in _WORDS.unpack(block_id)[:hashes]:
                place = word % bits
                field[place >> 3] |= 1 << (place & 7)
        return Filter(hashes, bytes(field))

    @property
    def error_rate(self) -> float:
        """The share of ids that are not held and yet allowed, 0..1."""
        ones = int.from_bytes(self.field, "little").bit_count()
        return float((ones / (8 * len(self.field))) ** self.hashes)

    def may_hold(self, block_id: BlockId) -> bool:
        """Tell whether an id may be held; False is sure."""
        bits = 8 * len(self.field)
        for word in _WORDS.unpack(block_id)[: self.hashes]:
            place = word % bits
            if not self.field[place >> 3] >> (place & 7) & 1:
                return False
        return True

    def to_bytes(self) -> bytes:
        """Say it on a card; at most MAX_BYTES."""
        return _HEAD.pack(_VERSION, self.hashes) + self.field

    @staticmethod
    def from_bytes(said: bytes) -> Filter:
        """Read the filter of a card. Raises PeerProtocol."""
        if not _HEAD.size < len(said) <= MAX_BYTES:
            raise PeerProtocol(
                f"a filter of {len(said)} bytes; it must have {_HEAD.size + 1} to {MAX_BYTES}"
            )
        version, hashes = _HEAD.unpack_from(said)
        if version != _VERSION or not 1 <= hashes <= _MAX_HASHES:
            raise PeerProtocol(
                f"a filter of version {version} with {hashes} bits an id; "
                f"version {_VERSION} with 1 to {_MAX_HASHES} is known"
            )
        return Filter(hashes, said[_HEAD.size :])
