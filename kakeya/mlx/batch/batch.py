"""One forward for a step of many sequences, each with KV of its own.

The products with the model's weights, which cost most, are done once for all rows, [B, 1, D].
Attention is done in one of two ways (see `cache`):

    row by row       each over its own cache and its own length: nothing is padded or copied, and on
                     the CPU without a fast BLAS a row has the very bits that it has alone
    slab by slab     sequences of about one length lie side by side (see `places`), and one call is
                     for all of them: a few kernels a layer in place of a dozen a row and layer

The first is for where bits do not depend on the number of rows, and for caches of other kinds than
KVCache; the second for everything else. A row may verify a block alone in between.

`hand_over` replaces the attention function of the model's module by one that knows `RowCaches`, and
that begins each layer while Python makes the graph of the layers behind it. `why_by_turns` compares
rows in one forward with each alone when the engine starts: it finds a model that does anything else
with its cache. Its sequences then take turns.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import groupby
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from kakeya.mlx.batch.cache import AloneKV, Attend, RowCaches, RowGroup, SlabKV, SlabRows, split
from kakeya.mlx.batch.places import PlaceAssignment
from kakeya.mlx.batch.shared_prefix import runs
from kakeya.mlx.batch.slabs import KvSlab
from kakeya.mlx.device import tells_lost_device
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.lora import row_slots
from kakeya.mlx.numerics.attention import attend_far, is_far
from kakeya.mlx.numerics.bits import ROUNDING, share_off
from kakeya.mlx.numerics.grid import is_cpu, sums_alike
from kakeya.mlx.selection import logprobs_of, select
from kakeya.mlx.verifier import Landing, LaunchedStep, MlxVerifier

_Found = TypeVar("_Found")
BATCH_ROWS = 256
"""The most rows of one forward; the scheduler's own bound is usually lower."""
_KINDS = (KVCache, QuantizedKVCache, RotatingKVCache)
_ATTENTION = "scaled_dot_product_attention"
_STEP_ROWS = 32
"""The most rows of one sequence that are a step, or a block of drafts."""
_LONG_TOKENS = 200
"""Tokens of one of the rows that are tried; the others are short."""
_PIECE_TOKENS = 50
_IS_LAZY = ContextVar("_IS_LAZY", default=False)


def launch_together(
    model: LoadedModel,
    states: Sequence[MlxVerifier],
    tokens: Sequence[int | None],
    assignment: PlaceAssignment | None = None,
) -> None:
    """Launch a plain step of each sequence in one forward; as `MlxVerifier.launch` for each.

    When it raises, the sequences are as before, except those with caches that cannot be trimmed.
    """
    if assignment is not None:
        order = assignment.arrange(states)
        states, tokens = [states[at] for at in order], [tokens[at] for at in order]
    lengths = [state.length for state in states]
    try:
        logits = forward_together(model, states, _inputs(states, tokens))
        selected = model.agreed(_select(logits, states, lengths))
        tops = [state.top_logprobs for state in states]
        flight = LaunchedStep(selected, logprobs_of(logits, selected, tops))
        flight.begin()
    except Exception:
        for state, length in zip(states, lengths, strict=True):
            _restore(state.cache, length)
        raise
    for index, state in enumerate(states):
        state.launched(Landing(flight, index))


def at_once(work: Generator[None, None, _Found]) -> _Found:
    """Do work that comes in slices to its end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast("_Found", end.value)


def uses_slabs() -> bool:
    """Whether sequences that share forwards are to lie in slabs.

    Not where each row then has the very bits that it has alone: these are worth more than time.
    """
    return not sums_alike()


def why_by_turns(model: LoadedModel, assignment: PlaceAssignment | None = None) -> str:
    """As `turns_check`, at once."""
    return at_once(turns_check(model, assignment))


def turns_check(
    model: LoadedModel, assignment: PlaceAssignment | None = None
) -> Generator[None, None, str]:
    """Find out why no two sequences may share a forward of this model; "" = up to BATCH_ROWS may.

    Runs short rows together, as `launch_together` would, and each alone; a forward or a few for
    each `next`.
    """
    kinds = {type(layer) for layer in model.make_cache()}
    if unknown := sorted(kind.__name__ for kind in kinds.difference(_KINDS)):
        known = ", ".join(kind.__name__ for kind in _KINDS)
        return f"it has layers with {', '.join(unknown)}; rows can be kept apart in {known}"
    hand_over(model.network)
    try:
        return (yield from _differs(model, assignment))
    except Exception as problem:  # noqa: BLE001 - whatever a model does that cannot be batched
        return f"rows in one forward fail: {problem or type(problem).__name__}"


@tells_lost_device
def _differs(model: LoadedModel, assignment: PlaceAssignment | None) -> Generator[None, None, str]:
    """The way in which rows in one forward differ from each alone; "" = by rounding at most.

    One row is much longer than the others, and in some of the forwards one is missing.
    """
    lengths = (3, min(_LONG_TOKENS, model.context_tokens // 2), 7)
    texts = [[(position + length) % 4 for position in range(length)] for length in lengths]
    alone = [MlxVerifier(model) for _ in texts]
    together = [MlxVerifier(model) for _ in texts]
    for state, text in zip([*alone, *together], [*texts, *texts], strict=True):
        for first in range(0, len(text), _PIECE_TOKENS):
            yield
            state.prefill(text[first : first + _PIECE_TOKENS])
    rows = [mx.array([token], dtype=mx.int32) for token in (1, 3, 2)]
    reason = ""
    for sharing in ((0, 1, 2), (0, 2), (1, 2), (0, 1, 2), (0, 1, 2)):
        yield
        members = list(sharing)
        if assignment is not None:
            members = [members[at] for at in assignment.arrange([together[at] for at in members])]
        each = []
        for at in members:
            each.append(alone[at].step(rows[at]))
            mx.eval(each[-1])  # ranks of a pipeline would order several forwards differently
        expected = mx.concatenate(each)
        row = mx.concatenate([rows[at] for at in members])
        found = forward_together(model, [together[at] for at in members], row)
        for at in members:
            together[at].appended()
        off = share_off(found, expected)
        if not off <= ROUNDING:  # also where it is no number
            reason = f"rows in one forward have logits that are off by {off:.2g} of the largest"
            if model.ring is None:  # else another rank may find less, and all go on together
                return reason
        chosen = model.agreed(mx.argmax(expected, axis=-1).astype(mx.int32))
        mx.eval(chosen)  # the last rank of a pipeline needs no tokens, and would not agree on them
        for at, token in zip(members, split(chosen, len(members)), strict=True):
            rows[at] = token
    return reason


def forward_together(model: LoadedModel, states: Sequence[MlxVerifier], row: mx.array) -> mx.array:
    """Append a row to each sequence, lazily. Shapes: row [B] -> logits [B, V].

    Sequences of one slab stand next to each other, by their places.
    """
    offsets: dict[tuple[int, ...], mx.array] = {}
    slabs = _slab_rows(states)
    layers = []
    for index, caches in enumerate(zip(*(state.cache for state in states), strict=True)):
        lengths = tuple(int(cache.offset) for cache in caches)
        if lengths not in offsets:
            offsets[lengths] = mx.array(lengths, dtype=mx.int32)
        layers.append(_row_caches(index, caches, slabs, offsets[lengths]))
    slots = row_slots([state.slot for state in states])
    return model.forward(row[:, None], layers, slots)[:, -1]


def _slab_rows(states: Sequence[MlxVerifier]) -> dict[int, tuple[KvSlab, SlabRows]]:
    """The rows of each slab, by the first of them."""
    found = {}
    start = 0
    for slab, group in groupby(states, lambda state: state.seat and state.seat.slab):
        rows = list(group)
        if slab is not None:
            seats = [state.seat for state in rows if state.seat is not None]
            places, lengths = [seat.place for seat in seats], [state.length for state in rows]
            stretches = runs(seats, shares_from=slab.shares_from)
            found[start] = slab, SlabRows(places, lengths, stretches, total=slab.places)
        start += len(rows)
    return found


def _row_caches(
    index: int,
    caches: Sequence[Any],
    slabs: Mapping[int, tuple[KvSlab, SlabRows]],
    offset: mx.array,
) -> RowCaches:
    """A layer's caches, in as few parts as can be."""
    parts: list[RowGroup] = []
    starts = []
    at = 0
    while at < len(caches):
        starts.append(at)
        slab, rows = slabs.get(at, (None, None))
        if slab is None or rows is None or index not in slab.layers:
            parts.append(AloneKV(caches[at]))
            at += 1
        else:
            parts.append(SlabKV(rows, slab.layers[index], caches[at : at + rows.count]))
            at += rows.count
    return RowCaches(parts, starts[1:], offset)


def _inputs(states: Sequence[MlxVerifier], tokens: Sequence[int | None]) -> mx.array:
    """The rows' tokens, as far as they are known. Shape: [B] int32."""
    if all(token is None for token in tokens):
        flight = states[0].newest().flight
        if flight.selected.size == len(states) and all(
            state.newest() == (flight, index) for index, state in enumerate(states)
        ):
            return flight.selected
    pairs = zip(states, tokens, strict=True)
    return mx.concatenate(
        [s.next_row() if t is None else mx.array([t], dtype=mx.int32) for s, t in pairs]
    )


def _select(logits: mx.array, states: Sequence[MlxVerifier], lengths: Sequence[int]) -> mx.array:
    """Select each row's token in its own way. Shapes: [B, V] -> [B] int32.

    Rows next to each other that all select the most likely token do so together.
    """
    if all(state.is_plain for state in states):
        return select(logits, states[0].sampling, first_position=0)
    found = []
    first = 0
    for is_plain, group in groupby(states, lambda state: state.is_plain):
        members = list(group)
        rows = logits[first : first + len(members)]
        if is_plain:
            found.append(select(rows, members[0].sampling, first_position=0))
        else:
            parts = zip(split(rows, len(members)), members, lengths[first:], strict=False)
            found += [
                select(state.edited_together(row), state.sampling, first_position=length + 1)
                for row, state, length in parts
            ]
        first += len(members)
    return mx.concatenate(found)


def _restore(caches: Sequence[Any], length: int) -> None:
    """Take back rows that a failed forward appended."""
    for cache in caches:
        surplus = int(cache.offset) - length
        if surplus > 0 and cache.is_trimmable():
            cache.trim(surplus)


def hand_over(network: nn.Module) -> None:
    """Replace the attention function of the network's modules by `_attention`.

    To be called before anything is computed, since it changes bits.
    """
    for name in {type(module).__module__ for module in network.modules()}:
        module = sys.modules[name]
        if vars(module).get(_ATTENTION) is base.scaled_dot_product_attention:
            setattr(module, _ATTENTION, _attention)


def _attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,  # noqa: ANN401 - mlx-lm's caches share no public type
    scale: float,
    mask: Any,  # noqa: ANN401
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention, by rows for a RowCaches, and in two parts behind a long context."""
    is_step = queries.shape[2] <= _STEP_ROWS and not _IS_LAZY.get()
    # A longer piece is part of a prompt: of its last layer nothing but keys and values is needed.
    _begin(queries if is_step else None, keys, values)
    if isinstance(cache, RowCaches):
        found = cache.attend(_attend_alone, queries, (keys, values), scale, mask, sinks)
    else:
        found = _attend_alone(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
    if is_step:
        _begin(found)
    return found


def _attend_alone(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,  # noqa: ANN401
    scale: float,
    mask: Any,  # noqa: ANN401
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of rows that have one mask."""
    if is_far(queries, keys, mask, sinks):
        return attend_far(queries, keys, values, scale)
    attend: Attend = base.scaled_dot_product_attention
    return attend(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


@contextlib.contextmanager
def lazily() -> Iterator[None]:
    """Build forwards that are computed a few layers at a time: nothing begins by itself."""
    token = _IS_LAZY.set(True)
    try:
        yield
    finally:
        _IS_LAZY.reset(token)


def _begin(*arrays: Any) -> None:  # noqa: ANN401 - of quantized keys there are several
    """Begin to compute these while Python goes on to the operations behind them, on the CPU.

    A step of few rows is hundreds of small operations there, and making and walking its graph takes
    as long as several layers do; without this no layer begins before the graph is done.
    """
    if is_cpu() and not _IS_LAZY.get():
        with contextlib.suppress(ValueError):  # nothing can be computed while a function is traced
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
