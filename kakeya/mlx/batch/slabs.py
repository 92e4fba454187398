"""The KV of several sequences side by side, so that one attention call is for all of them.

A slab has a layer's keys and values as one array each, [places, heads, capacity, width]. A
sequence holds one place of it in every such layer, from position 0 on; the numbers behind its own
tokens have no meaning. Where a sequence works alone, its `PlacedKV` does on its place the work of
mlx-lm's KVCache; one scatter appends to many, and one slice reads them (see `batch`).

    capacity    blocks of 256 tokens up to 1280, as KVCache allocates them; beyond, the next one is
                a quarter more, so that sequences of about one length come together
    places      taken by living sequences: a slab does not keep these alive, they keep the slab

Nothing here keeps a second name of a live array beyond a call: an append would then copy the slab.
Copies are made layer by layer, and each layer's former arrays go before the next.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from kakeya.core.process import trim_heap
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.mlx.batch.shared_prefix import Member, PrefixGroup, compare, is_due
from kakeya.mlx.numerics.bits import copied, put

_LONGEST_TOKENS = 1 << 24
_SPARE_PLACES = 4
"""One place of so many may be free."""


def _capacities() -> tuple[int, ...]:
    found = [KV_BLOCK_TOKENS]
    while found[-1] < _LONGEST_TOKENS:
        found.append(-(-found[-1] * 5 // (4 * KV_BLOCK_TOKENS)) * KV_BLOCK_TOKENS)
    return tuple(found)


CAPACITIES = _capacities()


def capacity_of(tokens: int, capacities: Sequence[int] = CAPACITIES) -> int:
    """The capacity of the slabs for sequences that are to hold so many tokens."""
    return capacities[bisect_left(capacities, tokens)]


class SlabUser(Protocol):
    """A sequence, as a slab knows it."""

    seat: Seat | None
    """Its place; None = all its KV lies in caches of its own."""

    @property
    def length(self) -> int:
        """Tokens with KV."""
        ...

    @property
    def cache(self) -> list[Any]:
        """Its layers' caches, to be replaced here."""
        ...


class LayerSlab:
    """One layer's keys and values of all places. Shapes: [places, heads, capacity, width]."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.keys = keys
        self.values = values

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return int(self.keys.nbytes + self.values.nbytes)


class PlacedKV:
    """A place of a LayerSlab with the interface of mlx-lm's KVCache."""

    __slots__ = ("_slab", "offset", "place")

    def __init__(self, slab: LayerSlab, place: int, offset: int) -> None:
        self._slab = slab
        self.place = place
        self.offset = offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append. Shapes: [1, heads, tokens, width] -> all that is held."""
        first = self.offset
        self.offset += keys.shape[2]
        if self.offset > self.capacity:
            # A failure left the sequence between two slabs: it gets a layer of its own.
            length = capacity_of(self.offset)
            held = (copied([part], length) for part in self.keys_and_values(first))
            self._slab, self.place = LayerSlab(*held), 0
        slab, place = self._slab, self.place
        slab.keys[place : place + 1, :, first : self.offset] = keys
        slab.values[place : place + 1, :, first : self.offset] = values
        return self.keys_and_values()

    def keys_and_values(self, tokens: int | None = None) -> tuple[mx.array, mx.array]:
        """KV of the first tokens, None = of all. Shapes: [1, heads, tokens, width]."""
        slab, rows = self._slab, slice(self.place, self.place + 1)
        end = self.offset if tokens is None else tokens
        return slab.keys[rows, :, :end], slab.values[rows, :, :end]

    @property
    def state(self) -> tuple[mx.array, mx.array, int]:
        """Copies of keys and values, and the offset."""
        keys, values = (copied([part], self.offset) for part in self.keys_and_values())
        return keys, values, self.offset

    @property
    def capacity(self) -> int:
        """Tokens that the place has room for."""
        return int(self._slab.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of the place."""
        return self._slab.nbytes // int(self._slab.keys.shape[0])

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:  # noqa: ANN401 - an array, a word, or nothing
        """The mask for `count` new tokens."""
        if window_size is None and (count == 1 or not return_array):
            return None if count == 1 else "causal"
        return create_causal_mask(count, self.offset, window_size=window_size)

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def empty(self) -> bool:
        """Whether it holds no tokens."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """True: any tail can be dropped at any length."""
        return True

    def trim(self, count: int) -> int:
        """Drop the last tokens; returns how many went."""
        count = min(self.offset, count)
        self.offset -= count
        return count


class Seat:
    """A sequence's place in a slab; `used` is the slab's forward that it was last in.

    `group` are the sequences that share the first `shared_tokens` of its KV (see
    `shared_prefix`).
    """

    __slots__ = ("group", "is_compared", "place", "shared_tokens", "slab", "used")

    def __init__(self, slab: KvSlab, place: int, former: Seat | None = None) -> None:
        """`former` is the place where the very same KV lay before."""
        self.slab = slab
        self.place = place
        self.used = slab.forwards
        self.group: PrefixGroup | None = former.group if former else None
        self.shared_tokens: int = former.shared_tokens if former else 0
        self.is_compared = False

    def trimmed(self, length: int) -> None:
        """Share no tokens behind `length` any more: they will be written anew."""
        self.shared_tokens = min(self.shared_tokens, length)


class KvSlab:
    """The places of some sequences of about one length, in all layers that fit slabs."""

    def __init__(self, places: int, capacity: int) -> None:
        self.layers: dict[int, LayerSlab] = {}
        self.capacity = capacity
        self.forwards = 0
        self.shares_from: int | None = None
        """See `shared_prefix.runs`."""
        self.apart = 0
        """Forwards in which other slabs or sequences of this capacity stood beside it."""
        self.gap_since: int | None = None
        """The forward since which places are free between others; None = not looked at."""
        self._sequences: list[weakref.ref[SlabUser] | None] = [None] * places

    @property
    def places(self) -> int:
        """The count of all places."""
        return len(self._sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of all places in all layers."""
        return sum(layer.nbytes for layer in self.layers.values())

    def sequences(self) -> list[SlabUser]:
        """The sequences that lie here, by place."""
        found = [None if sequence is None else sequence() for sequence in self._sequences]
        return [one for one in found if one is not None and _sits(one, self)]

    def free_places(self) -> list[int]:
        """Places without a living sequence, in order."""
        # A sequence that failed to move may still read its former place: that is not free.
        return [at for at, one in enumerate(self._sequences) if one is None or one() is None]

    def is_sparse(self) -> bool:
        """Whether more than a quarter of the places is free, or all but one are."""
        free = len(self.free_places())
        return free * _SPARE_PLACES > self.places or free + 1 >= self.places

    def compare(self) -> None:
        """Compare sequences that came since the last time with the others."""
        # Called before every forward: almost always all are compared, and a look has to do.
        if self.shares_from is None or not self._has_due():
            return
        seats = [(sequence, sequence.seat) for sequence in self.sequences()]
        members = [Member(seat, sequence.length) for sequence, seat in seats if seat is not None]
        if len(members) > 1:
            compare(members, self.layers)

    def free(self, place: int) -> None:
        """Free a place."""
        self._sequences[place] = None

    def adopt(self, sequence: SlabUser, place: int) -> None:
        """Note that all KV of a sequence lies in this place; its former one is free."""
        former, sequence.seat = sequence.seat, Seat(self, place, sequence.seat)
        self._sequences[place] = weakref.ref(sequence)
        self.gap_since = None
        if former is not None:
            former.slab.free(former.place)

    def enter(self, sequence: SlabUser, place: int) -> None:
        """Copy a sequence into a free place, from its own caches or another place, here too."""
        mx.synchronize()  # steps in flight read the slab, and write into it
        for index, slab in self.layers.items():
            # The whole place is written: values left behind the tokens may be no numbers.
            keys, values = _held(sequence.cache[index])
            put(slab.keys, place, keys)
            put(slab.values, place, values)
        # Only after all copies: where one failed, the sequence still uses its former place.
        for index, slab in self.layers.items():
            sequence.cache[index] = PlacedKV(slab, place, sequence.cache[index].offset)
        self.adopt(sequence, place)

    def _has_due(self) -> bool:
        """Whether a sequence here is still to be compared with the others."""
        for reference in self._sequences:
            sequence = None if reference is None else reference()
            if sequence is None or (seat := sequence.seat) is None or seat.is_compared:
                continue
            if seat.slab is self and is_due(seat, sequence.length):
                return True
        return False


def build(
    sequences: Sequence[SlabUser],
    layers: Sequence[int],
    capacity: int,
    dissolved: Sequence[KvSlab] = (),
    *,
    is_tight: bool = False,
) -> KvSlab:
    """Put sequences into a slab of their own, in this order, for these layers.

    All sequences of the dissolved slabs move. Where memory is tight, spare buffers go first, and
    the former arrays of each layer as soon as it is copied. Where a copy fails, sequences lie
    partly here and partly where they were, and can go on by themselves.
    """
    slab = KvSlab(len(sequences), capacity)
    formers = [sequence.seat for sequence in sequences]
    for sequence in sequences:
        sequence.seat = None
    if is_tight:
        mx.clear_cache()
        trim_heap()
    for index in layers:
        held = [_held(sequence.cache[index]) for sequence in sequences]
        keys = copied([keys for keys, _ in held], capacity)
        values = copied([values for _, values in held], capacity)
        del held
        slab.layers[index] = layer = LayerSlab(keys, values)
        del keys, values
        for place, sequence in enumerate(sequences):
            sequence.cache[index] = PlacedKV(layer, place, sequence.cache[index].offset)
        for other in dissolved:
            del other.layers[index]
        if is_tight:
            mx.clear_cache()
    for place, (sequence, former) in enumerate(zip(sequences, formers, strict=True)):
        sequence.seat = former
        slab.adopt(sequence, place)
    return slab


def leave(sequence: SlabUser) -> None:
    """Copy a sequence out of its slab, into caches of its own, unless it has these."""
    seat, sequence.seat = sequence.seat, None
    is_last = seat is not None and len(seat.slab.free_places()) + 1 == seat.slab.places
    for index, cache in enumerate(sequence.cache):
        if type(cache) is not PlacedKV:
            continue
        own = KVCache()
        capacity = (cache.offset // own.step + 1) * own.step
        own.keys, own.values = (copied([part], capacity) for part in _held(cache))
        own.offset = cache.offset
        sequence.cache[index] = own
        if seat is not None and is_last:
            del seat.slab.layers[index]
    if seat is not None:  # only now: after a copy that failed, the place is still read
        seat.slab.free(seat.place)


def _sits(sequence: SlabUser, slab: KvSlab) -> bool:
    return sequence.seat is not None and sequence.seat.slab is slab


def _held(cache: Any) -> tuple[mx.array, mx.array]:  # noqa: ANN401 - KVCache and its likes
    keys, values = cache.keys_and_values()
    return keys, values
