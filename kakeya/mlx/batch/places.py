"""Places of sequences in slabs: those that share forwards are moved together, others apart.

A sequence
    joins      a slab of its capacity when it first shares a forward: a free place, else a new slab
               with the other sequences that join (see `_gather`)
    unites     with all others of its capacity, once they have stood apart for long (see `_unite`)
    grows      out of its slab, and then joins as above, with those that are about to grow out
    leaves     when it did not share the slab's last forwards, when it is alone in a slab that is
               mostly free, or when it needs a cache of its own (for a prompt, a longer block)
    is gone    when nothing refers to it any more; its place is then closed (see `_settle`)

So a sequence is copied a few times for each block of tokens that it grows by, and slabs hold at
most WASTE times the bytes of caches of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kakeya.core.errors import InvariantBroken
from kakeya.core.units import KIB
from kakeya.mlx.batch.slabs import (
    CAPACITIES,
    KvSlab,
    PlacedKV,
    Seat,
    SlabUser,
    build,
    capacity_of,
    leave,
)

WASTE = 5 / 3
"""A quarter of free places (4/3) times the steps of capacities (5/4); sequences that moved along
may add to it."""
_PLACEABLE = (KVCache, PlacedKV)
_MARGIN = 16
"""One part in so many of the bound stays free: a dissolved slab is not made again at once."""
_AWAY_FORWARDS = 16
"""Forwards of its slab that a sequence may miss: blocks of drafts come and go."""
_GAP_FORWARDS = 4
"""Forwards for which a place may stay free between others: it splits their attention in two, which
costs less than a copy, and an agent's next turn comes soon."""
_APART_BYTES = 512 * KIB
"""One more part of a forward costs a layer as much time as copying so many bytes of its KV: a dozen
small operations, 0.2 ms on the CPU."""
_APART_FORWARDS = 4
"""Least forwards apart: a copy takes a few small operations itself."""
_ALONG_TOKENS = 32
"""Sequences with no more room than this move along with those that have none."""


class PlaceAssignment:
    """The slabs of one model; belongs to the model thread."""

    def __init__(self, capacities: Sequence[int] = CAPACITIES) -> None:
        self.limit_bytes: int | None = None
        """Bytes that mlx may take in all; None = without a bound."""
        self.shares_from: int | None = None
        """Tokens that reading a shared prefix once must save; None = it is never read once."""
        self._capacities = capacities
        self._slabs: weakref.WeakSet[KvSlab] = weakref.WeakSet()
        self._layers: tuple[int, ...] | None = None

    def arrange(self, sequences: Sequence[SlabUser]) -> list[int]:
        """Give places to sequences that share a forward; returns their order in it.

        Sequences of a slab stand next to each other, by their places; those without come last.
        """
        movers = _movers(sequences)
        if movers and self._has_slabs(movers[0]):
            self._join(movers, list(_by_slab(sequences)))
        self._unite(sequences)
        for slab, sharing in _by_slab(sequences).items():
            slab.forwards += 1
            for index in sharing:
                _seat(sequences[index]).used = slab.forwards
            if len(sharing) < slab.places:
                self._settle(slab)
        for slab in _by_slab(sequences):
            slab.compare()
        order = [
            index
            for slab, sharing in _by_slab(sequences).items()
            for index in sorted(sharing, key=lambda index: _seat(sequences[index]).place)
        ]
        return order + [index for index, sequence in enumerate(sequences) if sequence.seat is None]

    def settle(self) -> None:
        """Give back the unused parts of slabs."""
        for slab in list(self._slabs):
            self._settle(slab)

    def spare_bytes(self) -> int:
        """Bytes of slabs beyond caches of their own; `dissolve` gives them back."""
        return sum(max(0, slab.nbytes - _own_bytes(slab)) for slab in self._slabs)

    def dissolve(self) -> None:
        """Give every sequence caches of its own."""
        for slab in list(self._slabs):
            for sequence in slab.sequences():
                leave(sequence)

    def _has_slabs(self, sequence: SlabUser) -> bool:
        """Whether the model has layers that fit slabs."""
        if self._layers is None:
            kinds = enumerate(sequence.cache)
            self._layers = tuple(index for index, cache in kinds if type(cache) in _PLACEABLE)
        return bool(self._layers)

    def _join(self, movers: Sequence[SlabUser], slabs: Sequence[KvSlab]) -> None:
        """Find places for sequences with none or too short a one, in these slabs or a new one."""
        groups: dict[int, list[SlabUser]] = {}
        for sequence in movers:
            former = 0 if sequence.seat is None else sequence.seat.slab.capacity
            wanted = capacity_of(max(sequence.length, former) + 1, self._capacities)
            groups.setdefault(wanted, []).append(sequence)
        for capacity, group in groups.items():
            there = [slab for slab in slabs if slab.capacity == capacity]
            places = [(slab, place) for slab in there for place in slab.free_places()]
            for slab, place in places[: len(group)]:
                slab.enter(group.pop(0), place)
            self._gather(group, there, capacity)

    def _gather(self, group: list[SlabUser], there: Sequence[KvSlab], capacity: int) -> None:
        """Make a slab of these sequences; one that stays alone gets caches of its own."""
        dissolved = []
        for slab in sorted(there, key=lambda slab: slab.places):
            # A slab joins them when at most two of its sequences are copied for each new one.
            if len(seated := slab.sequences()) <= 2 * len(group):
                group = [*seated, *group]
                dissolved.append(slab)
        if len(group) > 1 and self._has_room(group, capacity):
            self._build(group, capacity, dissolved)
            return
        for sequence in group:
            if sequence.seat is not None and sequence.length >= sequence.seat.slab.capacity:
                leave(sequence)

    def _unite(self, sequences: Sequence[SlabUser]) -> None:
        """Make one slab of all parts of a capacity that have stood apart for long enough.

        That is when their forwards lost as much time by it as copying them together takes.
        """
        parts: dict[int, list[KvSlab]] = {}
        for slab in _by_slab(sequences):
            parts.setdefault(slab.capacity, []).append(slab)
        alone: dict[int, list[SlabUser]] = {}
        for sequence in sequences if parts else ():
            if sequence.seat is None and sequence.length:
                capacity = capacity_of(sequence.length + 1, self._capacities)
                alone.setdefault(capacity, []).append(sequence)
        for capacity, slabs in parts.items():
            lone = alone.get(capacity, [])
            if len(slabs) + len(lone) < 2:
                continue
            largest = max(slabs, key=lambda slab: slab.places)
            largest.apart += 1
            group = [*(sequence for slab in slabs for sequence in slab.sequences()), *lone]
            each = max(map(_bytes_per_token, group)) // len(self._layers or (0,))
            due = max(_APART_FORWARDS, len(group) * capacity * each / _APART_BYTES)
            if largest.apart < due:
                continue
            largest.apart = 0
            if self._has_room(group, capacity):
                self._build(group, capacity, slabs)

    def _build(self, group: Sequence[SlabUser], capacity: int, dissolved: Sequence[KvSlab]) -> None:
        is_tight = not self._fits(self._more_bytes(group, capacity) + int(mx.get_cache_memory()))
        slab = build(group, self._layers or (), capacity, dissolved, is_tight=is_tight)
        slab.shares_from = self.shares_from
        self._slabs.add(slab)

    def _has_room(self, group: Sequence[SlabUser], capacity: int) -> bool:
        """Whether the bound leaves room to build a slab."""
        return self._fits(self._more_bytes(group, capacity))

    def _more_bytes(self, group: Sequence[SlabUser], capacity: int) -> int:
        """The most bytes that a slab takes while it is built layer by layer, less those that go."""
        layers = len(self._layers or ()) or 1
        held = sum(cache.nbytes for sequence in group for cache in _placeable(sequence))
        each = max(_bytes_per_token(sequence) for sequence in group)
        whole = len(group) * capacity * each
        return max(0, whole - held) + 2 * whole // layers

    def _fits(self, size: int) -> bool:
        """Whether the bound leaves so many bytes beside all arrays, and a margin."""
        bound = self.limit_bytes
        return bound is None or int(mx.get_active_memory()) + size + bound // _MARGIN <= bound

    def _settle(self, slab: KvSlab) -> None:
        """Take out sequences that missed many forwards, and close the gaps.

        A slab of which more than a quarter is free is made anew.
        """
        for sequence in slab.sequences():
            if slab.forwards - _seat(sequence).used > _AWAY_FORWARDS:
                leave(sequence)
        free, seated = slab.free_places(), slab.sequences()
        if not free:
            return
        if not slab.is_sparse():
            _close(slab, free, seated)
        elif len(seated) > 1:
            self._build(seated, slab.capacity, (slab,))
        else:
            for sequence in seated:
                leave(sequence)


def _close(slab: KvSlab, free: list[int], seated: list[SlabUser]) -> None:
    """Fill free places between others from the end, if they stayed free for a few forwards."""
    if slab.gap_since is None:
        slab.gap_since = slab.forwards
    if slab.forwards - slab.gap_since < _GAP_FORWARDS:
        return
    while free and seated and free[0] < _seat(seated[-1]).place:
        slab.enter(seated.pop(), free.pop(0))


def _movers(sequences: Sequence[SlabUser]) -> list[SlabUser]:
    """Sequences without a place for one more token, and those close to it in the same slabs."""
    seats = [(sequence.seat, sequence.length) for sequence in sequences]
    full = {seat.slab for seat, length in seats if seat and length >= seat.slab.capacity}
    return [
        sequence
        for sequence, (seat, length) in zip(sequences, seats, strict=True)
        if (length if seat is None else _is_close(seat, length) and seat.slab in full)
    ]


def _is_close(seat: Seat, length: int) -> bool:
    return length + _ALONG_TOKENS >= seat.slab.capacity


def _by_slab(sequences: Sequence[SlabUser]) -> dict[KvSlab, list[int]]:
    """Indices of the sequences of each slab; slabs in the order of their first."""
    found: dict[KvSlab, list[int]] = {}
    for index, sequence in enumerate(sequences):
        if sequence.seat is not None:
            found.setdefault(sequence.seat.slab, []).append(index)
    return found


def _seat(sequence: SlabUser) -> Seat:
    if sequence.seat is None:
        raise InvariantBroken("places", "a sequence of a slab has no place")
    return sequence.seat


def _placeable(sequence: SlabUser) -> list[Any]:
    return [cache for cache in sequence.cache if type(cache) in _PLACEABLE]


def _bytes_per_token(sequence: SlabUser) -> int:
    return sum(int(cache.nbytes) // _capacity(cache) for cache in _placeable(sequence))


def _capacity(cache: Any) -> int:  # noqa: ANN401 - KVCache and its likes
    return cache.capacity if type(cache) is PlacedKV else int(cache.keys.shape[2])


def _own_bytes(slab: KvSlab) -> int:
    """Bytes that the sequences of a slab would take in caches of their own."""
    blocks = sum(sequence.length // KVCache.step + 1 for sequence in slab.sequences())
    return slab.nbytes // (slab.places * slab.capacity) * blocks * int(KVCache.step)
