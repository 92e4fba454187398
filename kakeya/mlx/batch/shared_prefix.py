"""Whose KV begins alike: attention then reads what they share once, for all of them.

Agents of one system prompt hold its KV each, at the beginning of their place in a slab, and have
the same bits there: taken over from the same blocks, or computed in the same pieces. Of such kin
the queries of all rows form one matrix, and a product of matrices takes the place of one pass over
the same numbers a row: what costs most of a step behind a long prompt.

Content decides. When a sequence takes a place, its bits are compared with those of who is there,
in all layers; nothing depends on where its KV comes from, and who holds other numbers for the same
text, or has another adapter, is no kin. Source: "Hydragen", Juravsky et al., 2024.
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
"""What is alike is counted in these."""
LEAST_TOKENS = 256
"""Whose beginnings agree in less are no kin: what a template writes is soon the same."""


class Kin:
    """Sequences whose KV begins alike. Only its identity counts."""

    __slots__ = ()


class SlabPlace(Protocol):
    """One sequence of a slab."""

    kin: Kin | None
    """Who it belongs to; None = nobody, yet."""
    is_compared: bool
    """Whether that is known among those who are in this slab."""
    alike: int
    """How many of its first tokens have the same KV in all kin of whom this is not less."""

    @property
    def place(self) -> int:
        """Its row of the layers' arrays."""
        ...


class Held(Protocol):
    """One layer of a slab. Shapes: [places, heads, capacity, width]."""

    keys: mx.array
    values: mx.array


class RowRun(NamedTuple):
    """Rows `start` up to `end` attend in one call; the first `shared` tokens of all are alike."""

    start: int
    end: int
    shared: int


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence to be compared: its place, and how many tokens it holds."""

    seat: SlabPlace
    tokens: int


def is_due(seat: SlabPlace, tokens: int) -> bool:
    """Whether a sequence that holds so many tokens is still to be compared with who is there."""
    return not seat.is_compared and tokens >= LEAST_TOKENS


def relate(members: Sequence[Member], layers: Mapping[int, Held]) -> None:
    """Find the kin of those that nobody has compared yet. Waits for what is in flight."""
    for member in members:
        seat = member.seat
        if not is_due(seat, member.tokens):
            continue
        others = [one.seat for one in members if one.seat is not seat and one.seat.kin is not None]
        family = [one for one in others if one.kin is seat.kin]
        if not any(one.is_compared for one in family):
            strangers = [one for one in others if one.kin is not seat.kin]
            _relate(member, family, strangers, layers)
        seat.is_compared = True


def runs(seats: Sequence[SlabPlace], *, shares_from: int | None) -> list[RowRun]:
    """How rows are to attend that stand by their places, those next to each other in one call.

    What kin share is read once where that saves reading `shares_from` tokens; None = never.
    """
    found: list[RowRun] = []
    start = 0
    for end in range(1, len(seats) + 1):
        if end < len(seats) and _follows(seats[end - 1], seats[end]):
            continue
        shared = min(seat.alike for seat in seats[start:end])
        pays = shares_from is not None and (end - start - 1) * shared >= shares_from
        before = found[-1] if found else None
        # Where nothing is gained, kin or not, one call is for as many as stand together.
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
    """Attention of kin over the first `longest` tokens of their places.

    Shapes: queries [B, H, 1, D], mask [B, 1, 1, longest - shared] of bool for what is not shared,
    None = all of it is seen -> [B, H, 1, width of the values]. The softmax sums in float32.
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


def _relate(
    member: Member,
    family: Sequence[SlabPlace],
    strangers: Sequence[SlabPlace],
    layers: Mapping[int, Held],
) -> None:
    """Find which stranger holds most of what it holds; it and its family belong to them then."""
    seat, most = member.seat, member.tokens // STEP_TOKENS * STEP_TOKENS
    if seat.kin is None:
        seat.kin, seat.alike = Kin(), most
    if not strangers:
        return
    # Keys of the last layer depend on all tokens in front: a few say who is worth comparing.
    last = layers[max(layers)].keys[:, :, STEP_TOKENS - 1 : seat.alike : STEP_TOKENS]
    same = mx.all(_bits(last) == _bits(last[seat.place : seat.place + 1]), axis=(1, 3))
    leads = cast("list[int]", mx.cumprod(same.astype(mx.int32), axis=1).sum(axis=1).tolist())
    alike = {id(one): min(one.alike, leads[one.place] * STEP_TOKENS) for one in strangers}
    best = max(strangers, key=lambda one: alike[id(one)])
    tokens = alike[id(best)]
    if tokens >= LEAST_TOKENS and _is_alike(seat.place, best.place, tokens, layers):
        for one in (seat, *family):
            one.kin, one.alike = best.kin, min(one.alike, tokens)


def _is_alike(one: int, other: int, tokens: int, layers: Mapping[int, Held]) -> bool:
    held = bits([part for layer in layers.values() for part in (layer.keys, layer.values)])
    return all(np.array_equal(part[one, :, :tokens], part[other, :, :tokens]) for part in held)


def _bits(part: mx.array) -> mx.array:
    """As whole numbers: of floats, no number equals itself, and 0 equals -0."""
    return part.view(kind_of(part.dtype))


def _follows(one: SlabPlace, other: SlabPlace) -> bool:
    return _touch(one, other) and one.kin is other.kin


def _touch(one: SlabPlace, other: SlabPlace) -> bool:
    return one.place + 1 == other.place
