"""Who sits in which slab: sequences that share forwards are moved together, others apart.

    joins      when it first shares a forward: into a free place of a slab of its capacity, else
               with others that join, and with slabs that are at most twice as many as they
    unites     with all others of its capacity, once their forwards have lost as much by standing
               apart as it takes to copy them together
    grows      out of its slab, and then joins as above; who is about to comes along
    leaves     when it did not share the slab's last forwards, when it works alone in a slab that
               is mostly free, or does what takes a cache of its own (a prompt, a longer block)
    is gone    when nobody keeps it; who sits last takes the place if nobody else has after a few
               forwards, and a slab of which more than a quarter is free is made anew

So a sequence is copied a few times for each block of tokens that it grows by, and slabs hold at
most WASTE times what caches of their own would.
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
"""What a quarter of free places (4/3) and capacities (5/4) come to, but for who moved along."""
_PLACEABLE = (KVCache, PlacedKV)
_MARGIN = 16
"""Of the bound so much stays free: slabs that had to go do not come again at once."""
_AWAY_FORWARDS = 16
"""Forwards of its slab that a sequence may miss: blocks of drafts come and go."""
_GAP_FORWARDS = 4
"""So many a free place may stand between others: that splits their attention in two, which costs
less than a copy, and an agent's next turn comes soon."""
_APART_BYTES = 512 * KIB
"""One part more of a forward costs each layer about as much time as copying so much of its KV: a
dozen small operations, 0.2 ms on the CPU."""
_APART_FORWARDS = 4
"""What the copies take of small operations themselves."""
_ALONG_TOKENS = 32
"""Who has no more room than this moves with who has none."""


class PlaceAssignment:
    """The slabs of one model; belongs to the model thread."""

    def __init__(self, capacities: Sequence[int] = CAPACITIES) -> None:
        self.limit_bytes: int | None = None
        """What mlx may take in all; None = without a bound."""
        self.shares_from: int | None = None
        """How many tokens must be saved for kin to read what they share once; None = never."""
        self._capacities = capacities
        self._slabs: weakref.WeakSet[KvSlab] = weakref.WeakSet()
        self._layers: tuple[int, ...] | None = None

    def arrange(self, tenants: Sequence[SlabUser]) -> list[int]:
        """Seat who is to share a forward; returns in which order they are to stand in it.

        Those of a slab stand next to each other, by their places; those without come last.
        """
        movers = _movers(tenants)
        if movers and self._has_slabs(movers[0]):
            self._join(movers, list(_by_slab(tenants)))
        self._unite(tenants)
        for slab, sharing in _by_slab(tenants).items():
            slab.forwards += 1
            for index in sharing:
                _seat(tenants[index]).used = slab.forwards
            if len(sharing) < slab.places:
                self._settle(slab)
        for slab in _by_slab(tenants):
            slab.relate()
        order = [
            index
            for slab, sharing in _by_slab(tenants).items()
            for index in sorted(sharing, key=lambda index: _seat(tenants[index]).place)
        ]
        return order + [index for index, tenant in enumerate(tenants) if tenant.seat is None]

    def settle(self) -> None:
        """Give back what of the slabs nobody uses."""
        for slab in list(self._slabs):
            self._settle(slab)

    def spare_bytes(self) -> int:
        """What slabs hold beyond what caches of their own would; `dissolve` gives it back."""
        return sum(max(0, slab.nbytes - _own_bytes(slab)) for slab in self._slabs)

    def dissolve(self) -> None:
        """Give every sequence caches of its own."""
        for slab in list(self._slabs):
            for tenant in slab.tenants():
                leave(tenant)

    def _has_slabs(self, tenant: SlabUser) -> bool:
        """Whether the model has layers that slabs are for."""
        if self._layers is None:
            kinds = enumerate(tenant.cache)
            self._layers = tuple(index for index, cache in kinds if type(cache) in _PLACEABLE)
        return bool(self._layers)

    def _join(self, movers: Sequence[SlabUser], slabs: Sequence[KvSlab]) -> None:
        """Find places for who has none or too short a one, in these slabs or with each other."""
        groups: dict[int, list[SlabUser]] = {}
        for tenant in movers:
            former = 0 if tenant.seat is None else tenant.seat.slab.capacity
            wanted = capacity_of(max(tenant.length, former) + 1, self._capacities)
            groups.setdefault(wanted, []).append(tenant)
        for capacity, group in groups.items():
            there = [slab for slab in slabs if slab.capacity == capacity]
            places = [(slab, place) for slab in there for place in slab.free_places()]
            for slab, place in places[: len(group)]:
                slab.enter(group.pop(0), place)
            self._gather(group, there, capacity)

    def _gather(self, group: list[SlabUser], there: Sequence[KvSlab], capacity: int) -> None:
        """Make a slab of these and of smaller ones; who stays alone gets caches of its own."""
        dissolved = []
        for slab in sorted(there, key=lambda slab: slab.places):
            if len(seated := slab.tenants()) <= 2 * len(group):
                group = [*seated, *group]
                dissolved.append(slab)
        if len(group) > 1 and self._has_room(group, capacity):
            self._build(group, capacity, dissolved)
            return
        for tenant in group:
            if tenant.seat is not None and tenant.length >= tenant.seat.slab.capacity:
                leave(tenant)

    def _unite(self, tenants: Sequence[SlabUser]) -> None:
        """Make one slab of all parts of a capacity that have stood apart for long enough."""
        parts: dict[int, list[KvSlab]] = {}
        for slab in _by_slab(tenants):
            parts.setdefault(slab.capacity, []).append(slab)
        alone: dict[int, list[SlabUser]] = {}
        for tenant in tenants if parts else ():
            if tenant.seat is None and tenant.length:
                capacity = capacity_of(tenant.length + 1, self._capacities)
                alone.setdefault(capacity, []).append(tenant)
        for capacity, slabs in parts.items():
            lone = alone.get(capacity, [])
            if len(slabs) + len(lone) < 2:
                continue
            largest = max(slabs, key=lambda slab: slab.places)
            largest.apart += 1
            group = [*(tenant for slab in slabs for tenant in slab.tenants()), *lone]
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
        """Whether the bound leaves what a slab takes beyond what goes."""
        return self._fits(self._more_bytes(group, capacity))

    def _more_bytes(self, group: Sequence[SlabUser], capacity: int) -> int:
        """What a slab takes at most while it is built a layer at a time, beyond what goes."""
        layers = len(self._layers or ()) or 1
        held = sum(cache.nbytes for tenant in group for cache in _placeable(tenant))
        each = max(_bytes_per_token(tenant) for tenant in group)
        whole = len(group) * capacity * each
        return max(0, whole - held) + 2 * whole // layers

    def _fits(self, size: int) -> bool:
        """Whether the bound leaves so much beyond the arrays that there are, and a margin."""
        bound = self.limit_bytes
        return bound is None or int(mx.get_active_memory()) + size + bound // _MARGIN <= bound

    def _settle(self, slab: KvSlab) -> None:
        """Let go who is not here any more, and close the gaps that are left."""
        for tenant in slab.tenants():
            if slab.forwards - _seat(tenant).used > _AWAY_FORWARDS:
                leave(tenant)
        free, seated = slab.free_places(), slab.tenants()
        if not free:
            return
        if not slab.is_sparse():
            _close(slab, free, seated)
        elif len(seated) > 1:
            self._build(seated, slab.capacity, (slab,))
        else:
            for tenant in seated:
                leave(tenant)


def _close(slab: KvSlab, free: list[int], seated: list[SlabUser]) -> None:
    """Fill free places between others from the end, if nobody has come for a few forwards."""
    if slab.gap_since is None:
        slab.gap_since = slab.forwards
    if slab.forwards - slab.gap_since < _GAP_FORWARDS:
        return
    while free and seated and free[0] < _seat(seated[-1]).place:
        slab.enter(seated.pop(), free.pop(0))


def _movers(tenants: Sequence[SlabUser]) -> list[SlabUser]:
    """Who has no place that one more token goes into, or hardly one while others have none."""
    seats = [(tenant.seat, tenant.length) for tenant in tenants]
    full = {seat.slab for seat, length in seats if seat and length >= seat.slab.capacity}
    return [
        tenant
        for tenant, (seat, length) in zip(tenants, seats, strict=True)
        if (length if seat is None else _is_close(seat, length) and seat.slab in full)
    ]


def _is_close(seat: Seat, length: int) -> bool:
    return length + _ALONG_TOKENS >= seat.slab.capacity


def _by_slab(tenants: Sequence[SlabUser]) -> dict[KvSlab, list[int]]:
    """The indices of those who sit in each slab; slabs in the order of their first."""
    found: dict[KvSlab, list[int]] = {}
    for index, tenant in enumerate(tenants):
        if tenant.seat is not None:
            found.setdefault(tenant.seat.slab, []).append(index)
    return found


def _seat(tenant: SlabUser) -> Seat:
    if tenant.seat is None:
        raise InvariantBroken("seating", "a sequence of a slab sits nowhere")
    return tenant.seat


def _placeable(tenant: SlabUser) -> list[Any]:
    return [cache for cache in tenant.cache if type(cache) in _PLACEABLE]


def _bytes_per_token(tenant: SlabUser) -> int:
    return sum(int(cache.nbytes) // _capacity(cache) for cache in _placeable(tenant))


def _capacity(cache: Any) -> int:  # noqa: ANN401 - KVCache and its likes
    return cache.capacity if type(cache) is PlacedKV else int(cache.keys.shape[2])


def _own_bytes(slab: KvSlab) -> int:
    """What caches of their own would take for who sits in it."""
    blocks = sum(tenant.length // KVCache.step + 1 for tenant in slab.tenants())
    return slab.nbytes // (slab.places * slab.capacity) * blocks * int(KVCache.step)
