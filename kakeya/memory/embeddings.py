"""Projected tokens of images, kept in RAM for a few minutes.

Projecting an image costs more than most answers about it. The key is a digest of the model family
and of the normalised pixels: two files of one picture have one key, two families never do, nor do
two pictures in which the model sees a difference. A hit makes an entry young for eviction; it does
not make it live longer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kakeya.core import errors
from kakeya.memory.arbiter.policy import Rung, Tenant

MAX_ENTRIES = 32
TTL_S = 300.0
_FRACTION_BITS = 24
_PADDING = 0xFFFFFFFF  # the brightest pixel is 255 << 24
TENANT = "vision-embeddings"
ChannelOrder = Literal["RGB", "BGR", "RGBA", "BGRA", "ARGB", "L"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEmbedding:
    """Projected tokens, row by row: `token_count` x `hidden_size` numbers of any one format."""

    tokens: memoryview
    token_count: int
    hidden_size: int

    def __post_init__(self) -> None:
        numbers = self.tokens.nbytes // self.tokens.itemsize
        if numbers != self.token_count * self.hidden_size:
            raise errors.InvalidArgument(
                f"an embedding of {self.token_count} tokens x {self.hidden_size} has "
                f"{numbers} numbers; {self.token_count * self.hidden_size} are needed",
                param="tokens",
            )


class VisionEmbeddingCache:
    """The projected tokens by key: a tenant of the ledger. Evicts expired entries, then the
    least recently used."""

    def __init__(
        self, *, mono: Callable[[], float], max_entries: int = MAX_ENTRIES, ttl_s: float = TTL_S
    ) -> None:
        if max_entries < 1 or not ttl_s > 0:
            raise errors.ConfigError(
                f"a cache of {max_entries} entries for {ttl_s} s keeps nothing; at least 1 entry "
                "and more than 0 s are needed"
            )
        self._mono = mono
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        self._entries: OrderedDict[str, tuple[VisionEmbedding, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> VisionEmbedding | None:
        """The live entry of a key."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry[1] <= self._mono():
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(
        self, key: str, embedding: VisionEmbedding, may_grow: Callable[[int], bool] = lambda _: True
    ) -> None:
        """Keep an embedding; its tokens must not change any more.

        Where `may_grow` refuses room, it takes the room of the least recently used ones; an
        embedding that is larger than the cache is not kept.
        """
        room = self.usage().held_bytes
        self._entries.pop(key, None)
        if len(self._entries) >= self._max_entries:
            self.purge_expired()
        while len(self._entries) >= self._max_entries:
            self._entries.popitem(last=False)
        if may_grow(embedding.tokens.nbytes) or self._has_place(embedding.tokens.nbytes, room):
            self._entries[key] = (embedding, self._mono() + self._ttl_s)

    def purge_expired(self) -> int:
        """Drop expired entries; returns their number."""
        now = self._mono()
        expired = [key for key, (_, until) in self._entries.items() if until <= now]
        for key in expired:
            del self._entries[key]
        return len(expired)

    def clear(self) -> None:
        """Drop all entries: the model that understood them is gone."""
        self._entries.clear()

    def usage(self) -> Tenant:
        """The bytes of the cache, for the ledger."""
        now = self._mono()
        live = expired = 0
        for embedding, until in self._entries.values():
            if until <= now:
                expired += embedding.tokens.nbytes
            else:
                live += embedding.tokens.nbytes
        return Tenant(
            name=TENANT,
            rung=Rung.CACHE,
            held_bytes=live + expired,
            expired_bytes=expired,
            spare_bytes=live,
        )

    async def shrink(self, size: int) -> None:
        """Give up so many bytes: expired entries, then the least recently used."""
        self._drop_to(self.usage().held_bytes - size)

    def _has_place(self, size: int, room: int) -> bool:
        """Make place within the cache's own bytes, where these are enough."""
        if size > room:
            return False
        self._drop_to(room - size)
        return True

    def _drop_to(self, size: int) -> None:
        self.purge_expired()
        while self._entries and self.usage().held_bytes > size:
            self._entries.popitem(last=False)


def embedding_key(model_family: str, pixels: bytes) -> str:
    """The key of an image for a family of models. `pixels` are `normalised`.

    Raises InvalidArgument without a family: tokens of one mean nothing to another.
    """
    if not model_family:
        raise errors.InvalidArgument("a model family is needed", param="model_family")
    family = model_family.encode()
    digest = hashlib.sha256(len(family).to_bytes(4, "big") + family)
    digest.update(pixels)
    return digest.hexdigest()


def normalised(
    pixels: bytes, width: int, height: int, *, side: int, order: ChannelOrder = "RGB"
) -> bytes:
    """Pixels as they are hashed: RGB, fitted into a square of `side`, padded with a value that no
    pixel has.

    `side` is the size to which the model itself reduces an image, so that the key differs where the
    model sees a difference. A reduced pixel is the exact mean of all pixels that it stands for, so
    that each of them counts; a smaller image stays as it is. Transparency is dropped. Raises
    InvalidArgument when the length does not fit.
    """
    step = len(order)
    if min(width, height, side) < 1 or len(pixels) != width * height * step:
        raise errors.InvalidArgument(
            f"{len(pixels)} bytes are no {order} image of {width} x {height} for a side of {side}; "
            f"{width * height * step} are needed, and a side of 1 or more",
            param="pixels",
        )
    scale = max(width, height, side)
    columns, rows = max(1, width * side // scale), max(1, height * side // scale)
    channels = [0, 0, 0] if order == "L" else [order.index(one) for one in "RGB"]
    image = np.frombuffer(pixels, np.uint8).reshape(height, width, step)[:, :, channels]
    sums = _summed(_summed(image, rows).swapaxes(0, 1), columns).swapaxes(0, 1)
    square = np.full((side, side, 3), _PADDING, "<u4")
    square[:rows, :columns] = (sums << _FRACTION_BITS) // (width * height)
    return square.tobytes()


def _summed(values: NDArray[np.uint8] | NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """The sums of so many equal parts of the first axis, times `parts`. A row on a border counts
    in both parts by its share, without rounding."""
    length = len(values)
    sums = np.empty((parts, *values.shape[1:]), np.int64)
    for part in range(parts):
        begin, end = part * length, (part + 1) * length
        first, last = begin // parts, -(-end // parts)
        starts = np.arange(first, last) * parts
        shares = np.minimum(starts + parts, end) - np.maximum(starts, begin)
        sums[part] = np.tensordot(shares, values[first:last], 1)
    return sums
