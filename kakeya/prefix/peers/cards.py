"""Prefix blocks on cards: the caches of the own card, and the holders of a block by the cards of
peers.

Each cache on a card has a filter of block names, all filters together as large as one alone may be.
A card is made anew for them at most each REFRESH_S, and in a large fleet more seldom, as each of
its nodes gets each card: so a block that comes or goes costs the fleet nothing, and a filter is
somewhat behind. It is a hint, and a wrong one costs a lookup.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from google.protobuf.message import DecodeError

from kakeya.core.errors import PeerProtocol
from kakeya.fleet.cards.cards import CacheOffer, Card
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.peers.choice import BlockHolder
from kakeya.prefix.peers.filter import MAX_BITS, Filter
from kakeya.prefix.peers.seams import BlockSources
from kakeya.v1.distributed_pb2 import CacheCompatibility

REFRESH_S = 30.0
LOOK_S = 10.0
"""Seconds between two looks at the blocks here, once the card names some: thousands of names are
read."""
_FLEET = 32
"""Nodes for which REFRESH_S is meant; 3 kB of card from each of them are 3 kB/s."""
MAX_OWN_CACHES = 4
"""With a half kilobyte of fingerprint each, they and the filters fill half of a card."""
_LEAST_BITS = 512
_BITS_PER_ID = 10
"""One name in a hundred that is not held is then taken for held."""
_MOST_WRONG = 0.25
"""A filter with a higher error rate is ignored: its node would be asked first for everything."""


class OwnCaches:
    """The caches on the own card. `epoch` counts how often they were made."""

    def __init__(self, sources: BlockSources) -> None:
        self._sources = sources
        self._made_mono = self._looked_mono = float("-inf")
        self.epoch = 0
        self.offered: tuple[CacheOffer, ...] = ()

    def refresh(self, now: float, *, nodes: int) -> bool:
        """Make them anew if it is time and a filter changed; returns whether that was so.

        `nodes` is how many the fleet has, `now` is in monotonic seconds.
        """
        if now - self._made_mono < REFRESH_S * max(1.0, nodes / _FLEET):
            return False
        if self.offered and now - self._looked_mono < LOOK_S:
            return False
        self._looked_mono = now
        made = self._make()
        if [_told(cache) for cache in made] == [_told(cache) for cache in self.offered]:
            return False
        self._made_mono = now
        self.epoch += 1
        self.offered = tuple(cache._replace(epoch=self.epoch) for cache in made)
        return True

    def _make(self) -> list[CacheOffer]:
        fingerprints = self._sources.fingerprints()[:MAX_OWN_CACHES]
        bits = MAX_BITS // max(1, len(fingerprints)) // 8 * 8
        made = []
        for fingerprint in fingerprints:
            source = self._sources.source(fingerprint.exact())
            if source is None:
                continue
            ids = list(islice(source.resident(), bits // _BITS_PER_ID))
            if not ids:
                continue
            usage = source.usage()
            made.append(
                CacheOffer(
                    compatibility=fingerprint.to_wire().SerializeToString(deterministic=True),
                    filter=Filter.of(ids, _bits_for(len(ids), bits)).to_bytes(),
                    blocks=usage.blocks,
                    used_bytes=usage.used_bytes,
                    free_bytes=usage.free_bytes,
                )
            )
        return made


def holders(
    cards: Iterable[Card],
    fingerprint: KvFingerprint,
    ids: Sequence[BlockId],
    have: int,
    *,
    address_of: Callable[[Card], str],
) -> list[BlockHolder]:
    """The nodes with cards that name blocks of a history behind the first `have`, or may mean them.

    Of a run of blocks the first one that is not named ends it. `address_of` "" = not to be called.
    """
    exact, found = fingerprint.exact(), []
    for card in cards:
        for cache in card.caches:
            if _exact_of(cache.compatibility) != exact:
                continue
            blocks = _named(cache.filter, ids, have)
            if blocks == have:
                break
            address = address_of(card)
            if address:
                found.append(
                    BlockHolder(node_id=card.node_id, address=address, blocks=max(0, blocks))
                )
            break
    return found


def _named(packed: bytes, ids: Sequence[BlockId], have: int) -> int:
    """How many leading blocks a filter names; -1 = there is none to ask."""
    names = _filter_of(packed)
    if names is None:
        return -1
    blocks = have
    while blocks < len(ids) and names.may_hold(ids[blocks]):
        blocks += 1
    return blocks


def _bits_for(count: int, most: int) -> int:
    """A filter no larger than it needs to be; doubled, so that one more name seldom changes it."""
    bits = _LEAST_BITS
    while bits < count * _BITS_PER_ID:
        bits *= 2
    return min(bits, most)


def _told(cache: CacheOffer) -> tuple[bytes, bytes]:
    return cache.compatibility, cache.filter


@functools.lru_cache(maxsize=4096)
def _exact_of(compatibility: bytes) -> bytes | None:
    """The digest of a fingerprint on a card; None = of a kind that no node of ours has."""
    try:
        fingerprint = KvFingerprint.from_wire(CacheCompatibility.FromString(compatibility))
    except DecodeError:
        return None
    return None if fingerprint is None else fingerprint.exact()


@functools.lru_cache(maxsize=1024)
def _filter_of(packed: bytes) -> Filter | None:
    if not packed:
        return None
    try:
        names = Filter.from_bytes(packed)
    except PeerProtocol:
        return None
    return names if names.error_rate <= _MOST_WRONG else None
