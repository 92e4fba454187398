"""The KV of several sequences side by side, so that one attention call is for all of them.

A slab has a layer's keys and values as one array each, [places, heads, capacity, width]. A
sequence holds one place of it in every such layer, from position 0 on; behind its own tokens lies
what may be anything. Where a sequence works alone, its `PlacedKV` does what mlx-lm's KVCache does,
on its place; many are appended to by one scatter and read by one slice (see `batch`).

    capacity    what KVCache would allocate, blocks of 256 tokens, up to 1280; beyond, the next is a
                quarter more, so that sequences of about one length find to each other
    places      taken by who is alive: a slab does not keep its sequences alive, they keep it

Nothing here keeps a second name of a live array beyond a call: an append would then copy the slab.
Whatever is copied is copied layer by layer, and each layer's former arrays go before the next.
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
from kakeya.mlx.batch.shared_prefix import Kin, Member, is_due, relate
from kakeya.mlx.numerics.bits import copied, put

_LONGEST_TOKENS = 1 << 24
_SPARE_PLACES = 4
"""One of so many may be free."""


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
    """Where all its KV lies that can lie in a slab; None = in caches of its own."""

    @property
    def length(self) -> int:
        """Tokens whose KV is held."""
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
        """Of all places."""
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
            # Of a sequence that a failure left between two slabs: one of its own.
            length = capacity_of(self.offset)
            held = (copied([part], length) for part in self.keys_and_values(first))
            self._slab, self.place = LayerSlab(*held), 0
        slab, place = self._slab, self.place
        slab.keys[place : place + 1, :, first : self.offset] = keys
        slab.values[place : place + 1, :, first : self.offset] = values
        return self.keys_and_values()

    def keys_and_values(self, tokens: int | None = None) -> tuple[mx.array, mx.array]:
        """The first tokens; all that is held. Shapes: [1, heads, tokens, width]."""
        slab, rows = self._slab, slice(self.place, self.place + 1)
        end = self.offset if tokens is None else tokens
        return slab.keys[rows, :, :end], slab.values[rows, :, :end]

    @property
    def state(self) -> tuple[mx.array, mx.array, int]:
        """Copies of what is held, and the offset."""
        keys, values = (copied([part], self.offset) for part in self.keys_and_values())
        return keys, values, self.offset

    @property
    def capacity(self) -> int:
        """Tokens that the place has room for."""
        return int(self._slab.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Of the place."""
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
        """Whether nothing is held."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Any tail, always."""
        return True

    def trim(self, count: int) -> int:
        """Drop the last tokens; how many went."""
        count = min(self.offset, count)
        self.offset -= count
        return count


class Seat:
    """A sequence's place in a slab; `used` is the slab's forward that it was last in.

    `kin` and `alike` say whose KV begins as its own (see `kin`).
    """

    __slots__ = ("alike", "is_compared", "kin", "place", "slab", "used")

    def __init__(self, slab: KvSlab, place: int, former: Seat | None = None) -> None:
        """`former` is where the very same KV lay before."""
        self.slab = slab
        self.place = place
        self.used = slab.forwards
        self.kin: Kin | None = former.kin if former else None
        self.alike: int = former.alike if former else 0
        self.is_compared = False

    def trimmed(self, length: int) -> None:
        """What is behind so many tokens will be written anew."""
        self.alike = min(self.alike, length)


class KvSlab:
    """The places of some sequences of about one length, in all layers that slabs are for."""

    def __init__(self, places: int, capacity: int) -> None:
        self.layers: dict[int, LayerSlab] = {}
        self.capacity = capacity
        self.forwards = 0
        self.shares_from: int | None = None
        """See `kin.runs`."""
        self.apart = 0
        """Forwards in which others of this capacity stood beside it."""
        self.gap_since: int | None = None
        """The forward from which on places were free and nobody came; None = not looked at."""
        self._tenants: list[weakref.ref[SlabUser] | None] = [None] * places

    @property
    def places(self) -> int:
        """All of them."""
        return len(self._tenants)

    @property
    def nbytes(self) -> int:
        """Of all places in all layers."""
        return sum(layer.nbytes for layer in self.layers.values())

    def tenants(self) -> list[SlabUser]:
        """Who sits here, by place."""
        found = [None if tenant is None else tenant() for tenant in self._tenants]
        return [one for one in found if one is not None and _sits(one, self)]

    def free_places(self) -> list[int]:
        """The places that nobody has, in order."""
        # One whose move failed halfway may still read its former place: it is not free.
        return [at for at, one in enumerate(self._tenants) if one is None or one() is None]

    def is_sparse(self) -> bool:
        """Whether more than a quarter of the places is free, or all but one are."""
        free = len(self.free_places())
        return free * _SPARE_PLACES > self.places or free + 1 >= self.places

    def relate(self) -> None:
        """Find the kin of who came since the last time."""
        # Before every forward: almost always everybody is compared, and a look has to do.
        if self.shares_from is None or not self._has_due():
            return
        seats = [(tenant, tenant.seat) for tenant in self.tenants()]
        members = [Member(seat, tenant.length) for tenant, seat in seats if seat is not None]
        if len(members) > 1:
            relate(members, self.layers)

    def free(self, place: int) -> None:
        """Nobody has it any more."""
        self._tenants[place] = None

    def adopt(self, tenant: SlabUser, place: int) -> None:
        """From now on all its KV lies in this place; its former one is free."""
        former, tenant.seat = tenant.seat, Seat(self, place, tenant.seat)
        self._tenants[place] = weakref.ref(tenant)
        self.gap_since = None
        if former is not None:
            former.slab.free(former.place)

    def enter(self, tenant: SlabUser, place: int) -> None:
        """Copy a sequence into a free place, from where it was; also from another place here."""
        mx.synchronize()  # what is in flight reads the slab, and writes into it
        for index, slab in self.layers.items():
            # All of the place is written: what was left there may be no numbers.
            keys, values = _held(tenant.cache[index])
            put(slab.keys, place, keys)
            put(slab.values, place, values)
        # Only now: where a copy failed, it is still where it was.
        for index, slab in self.layers.items():
            tenant.cache[index] = PlacedKV(slab, place, tenant.cache[index].offset)
        self.adopt(tenant, place)

    def _has_due(self) -> bool:
        """Whether anybody here is still to be compared with the others."""
        for reference in self._tenants:
            tenant = None if reference is None else reference()
            if tenant is None or (seat := tenant.seat) is None or seat.is_compared:
                continue
            if seat.slab is self and is_due(seat, tenant.length):
                return True
        return False


def build(
    tenants: Sequence[SlabUser],
    layers: Sequence[int],
    capacity: int,
    dissolved: Sequence[KvSlab] = (),
    *,
    is_tight: bool = False,
) -> KvSlab:
    """Put sequences into a slab of their own, in this order, for these layers.

    Of the dissolved slabs everybody moves. Where it is tight, spare buffers go first, and so does
    what each layer leaves. Where a copy fails, sequences lie partly here and partly where they
    were, and can go on by themselves.
    """
    slab = KvSlab(len(tenants), capacity)
    formers = [tenant.seat for tenant in tenants]
    for tenant in tenants:
        tenant.seat = None
    if is_tight:
        mx.clear_cache()
        trim_heap()
    for index in layers:
        held = [_held(tenant.cache[index]) for tenant in tenants]
        keys = copied([keys for keys, _ in held], capacity)
        values = copied([values for _, values in held], capacity)
        del held
        slab.layers[index] = layer = LayerSlab(keys, values)
        del keys, values
        for place, tenant in enumerate(tenants):
            tenant.cache[index] = PlacedKV(layer, place, tenant.cache[index].offset)
        for other in dissolved:
            del other.layers[index]
        if is_tight:
            mx.clear_cache()
    for place, (tenant, former) in enumerate(zip(tenants, formers, strict=True)):
        tenant.seat = former
        slab.adopt(tenant, place)
    return slab


def leave(tenant: SlabUser) -> None:
    """Copy a sequence out of its slab, into caches of its own; nothing where it has these."""
    seat, tenant.seat = tenant.seat, None
    is_last = seat is not None and len(seat.slab.free_places()) + 1 == seat.slab.places
    for index, cache in enumerate(tenant.cache):
        if type(cache) is not PlacedKV:
            continue
        own = KVCache()
        capacity = (cache.offset // own.step + 1) * own.step
        own.keys, own.values = (copied([part], capacity) for part in _held(cache))
        own.offset = cache.offset
        tenant.cache[index] = own
        if seat is not None and is_last:
            del seat.slab.layers[index]
    if seat is not None:  # only now: after a copy that failed, the place is still read
        seat.slab.free(seat.place)


def _sits(tenant: SlabUser, slab: KvSlab) -> bool:
    return tenant.seat is not None and tenant.seat.slab is slab


def _held(cache: Any) -> tuple[mx.array, mx.array]:  # noqa: ANN401 - KVCache and its likes
    keys, values = cache.keys_and_values()
    return keys, values
