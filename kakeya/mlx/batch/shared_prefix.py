"""Shared prefixes: attention reads KV that sequences of a slab begin with once, for all of them.

Agents of one system prompt hold its KV each, at the beginning of their place in a slab, and have
the same bits there: taken from the same blocks, or computed in the same pieces. The queries of all
rows of such a group form one matrix, and one product of matrices takes the place of a pass over the
same numbers for each row, which is most of the time of a step behind a long prompt.

Content decides. When a sequence takes a place, its bits are compared with those of the others, in
all layers; nothing depends on where KV comes from. A sequence with other numbers for the same text,
or with another adapter, is in another group. Source: "Hydragen", Juravsky et al., 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np

from kakeya.mlx.numerics.attention import score_scale, weigh
from kakeya.mlx.numerics.bits import bits, kind_of

STEP_TOKENS = 64
"""Shared tokens are counted in steps of so many."""
LEAST_TOKENS = 256
"""Least tokens of a shared prefix: the first words of a template are the same everywhere."""


class PrefixGroup:
    """Sequences with a shared prefix. Only its identity counts."""

    __slots__ = ()


class SlabPlace(Protocol):
    """One sequence of a slab, as it is compared with the others."""

    group: PrefixGroup | None
    """The group that it belongs to; None = not compared yet."""
    is_compared: bool
    """Whether it was compared with the others of this slab."""
    shared_tokens: int
    """First tokens that have the same KV in all sequences of the group with no smaller count."""

    @property
    def place(self) -> int:
        """Its row of the layers' arrays."""
        ...


class Held(Protocol):
    """One layer of a slab. Shapes: [places, heads, capacity, width]."""

    keys: mx.array
    values: mx.array


class RowRun(NamedTuple):
    """Rows `start` up to `end` attend in one call; they share the first `shared` tokens."""

    start: int
    end: int
    shared: int


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence to be compared: its place, and its tokens with KV."""

    seat: SlabPlace
    tokens: int


def is_due(seat: SlabPlace, tokens: int) -> bool:
    """Whether a sequence with so many tokens is still to be compared with the others."""
    return not seat.is_compared and tokens >= LEAST_TOKENS


def compare(members: Sequence[Member], layers: Mapping[int, Held]) -> None:
    """Find the groups of sequences that were not compared yet. Waits for steps in flight."""
    for member in members:
        seat = member.seat
        if not is_due(seat, member.tokens):
            continue
        others = [
            one.seat for one in members if one.seat is not seat and one.seat.group is not None
        ]
        own_group = [one for one in others if one.group is seat.group]
        if not any(one.is_compared for one in own_group):
            candidates = [one for one in others if one.group is not seat.group]
            _assign(member, own_group, candidates, layers)
        seat.is_compared = True


def runs(seats: Sequence[SlabPlace], *, shares_from: int | None) -> list[RowRun]:
    """Plan the attention of rows in the order of their places: adjacent ones in one call.

    A shared prefix is read once where that saves reading `shares_from` tokens; None = never.
    """
    found: list[RowRun] = []
    start = 0
    for end in range(1, len(seats) + 1):
        if end < len(seats) and _follows(seats[end - 1], seats[end]):
            continue
        shared = min(seat.shared_tokens for seat in seats[start:end])
        pays = shares_from is not None and (end - start - 1) * shared >= shares_from
        before = found[-1] if found else None
        # Where sharing gains nothing, one call is for all adjacent rows, of any group.
        if not pays and before and not before.shared and _touch(seats[start - 1], seats[start]):
            found[-1] = RowRun(before.start, end, 0)
        else:
            found.append(RowRun(start, end, shared if pays else 0))
        start = end
    return found


def attend(
    queries: mx.array,
    held: Held,
    places: slice,
    *,
    shared: int,
    longest: int,
    scale: float,
    mask: mx.array | None,
) -> mx.array:
    """Attention of a group over the first `longest` tokens of their places.

    Shapes: queries [B, H, 1, D], mask [B, 1, 1, longest - shared] of bool behind the prefix,
    None = all is seen -> [B, H, 1, width of the values]. The softmax sums in float32.
    """
    rows, heads, _, width = queries.shape
    keys, values = held.keys, held.values
    groups = keys.shape[1]
    first = places.start
    asked = queries * score_scale(scale)
    asked = asked.reshape(rows, groups, heads // groups, width).transpose(1, 0, 2, 3)
    common = asked.reshape(groups, -1, width) @ keys[first, :, :shared].swapaxes(-1, -2)
    own = asked @ keys[places, :, shared:longest].transpose(1, 0, 3, 2)
    if mask is not None:
        own = mx.where(mask.swapaxes(0, 1), own, -mx.inf)
    common, own, total = weigh(common, own)
    rest = own.astype(values.dtype) @ values[places, :, shared:longest].swapaxes(0, 1)
    found = (common.astype(values.dtype) @ values[first, :, :shared]).reshape(rest.shape) + rest
    if total is not None:
        found = (found / total).astype(values.dtype)
    return found.swapaxes(0, 1).reshape(rows, heads, 1, -1)


def _assign(
    member: Member,
    own_group: Sequence[SlabPlace],
    candidates: Sequence[SlabPlace],
    layers: Mapping[int, Held],
) -> None:
    """Move a sequence and its group to the group that shares most tokens with it, if enough."""
    seat, most = member.seat, member.tokens // STEP_TOKENS * STEP_TOKENS
    if seat.group is None:
        seat.group, seat.shared_tokens = PrefixGroup(), most
    if not candidates:
        return
    # Keys of the last layer depend on all tokens in front: a few of them find the candidates.
    last = layers[max(layers)].keys[:, :, STEP_TOKENS - 1 : seat.shared_tokens : STEP_TOKENS]
    same = mx.all(_bits(last) == _bits(last[seat.place : seat.place + 1]), axis=(1, 3))
    leads = cast("list[int]", mx.cumprod(same.astype(mx.int32), axis=1).sum(axis=1).tolist())
    shared = {id(one): min(one.shared_tokens, leads[one.place] * STEP_TOKENS) for one in candidates}
    best = max(candidates, key=lambda one: shared[id(one)])
    tokens = shared[id(best)]
    if tokens >= LEAST_TOKENS and _has_same_kv(seat.place, best.place, tokens, layers):
        for one in (seat, *own_group):
            one.group, one.shared_tokens = best.group, min(one.shared_tokens, tokens)


def _has_same_kv(one: int, other: int, tokens: int, layers: Mapping[int, Held]) -> bool:
    held = bits([part for layer in layers.values() for part in (layer.keys, layer.values)])
    return all(np.array_equal(part[one, :, :tokens], part[other, :, :tokens]) for part in held)


def _bits(part: mx.array) -> mx.array:
    """As whole numbers: of floats, NaN differs from itself, and 0 equals -0."""
    return part.view(kind_of(part.dtype))


def _follows(one: SlabPlace, other: SlabPlace) -> bool:
    return _touch(one, other) and one.group is other.group


def _touch(one: SlabPlace, other: SlabPlace) -> bool:
    return one.place + 1 == other.place
