"""One forward for a step of many sequences, each with a KV cache of its own.

What costs most, the products with the model's weights, is done once for all rows, [B, 1, D];
attention is done row by row, each over its own cache and its own length. So nothing is padded,
nothing is copied when a row joins or leaves, a row may verify a block alone in between, and on
the CPU (without OpenBLAS) a row has the very bits that it has alone.

Models of mlx-lm call their cache and then `scaled_dot_product_attention` with what it returned.
Here the cache is a `RowCaches`, and the function of the model's own module hands it over to that.
A model whose attention does anything else with its cache is found out by `why_by_turns`, which
compares two rows with each alone when the engine starts; its sequences then take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from kakeya.core.errors import InvariantBroken
from kakeya.decoding.sampling import SamplingParams
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.lora import row_slots
from kakeya.mlx.verifier import Flight, Landing, Verifier, select

BATCH_ROWS = 64
"""The most rows of one forward; the scheduler's own bound is usually lower."""
_KINDS = (KVCache, QuantizedKVCache, RotatingKVCache)
_ATTENTION = "scaled_dot_product_attention"
_TOLERANCE = 0.02
"""Of the largest logit: rounding in 16 bits stays below, a row that sees another's KV does not."""
_Attend = Callable[..., mx.array]


class RowMasks:
    """The rows' own attention masks; what a model passes on from its cache to its attention."""

    def __init__(self, masks: Sequence[Any]) -> None:
        self.masks = masks


class RowCaches:
    """One layer's caches of all rows, in the place of one cache. For a single forward."""

    def __init__(self, caches: Sequence[Any], offset: mx.array) -> None:
        self._caches = caches
        self.offset = offset
        self._given: tuple[mx.array, mx.array] | None = None
        self._fetched: list[Any] = []

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> RowMasks | None:
        """The rows' masks for `count` new tokens; None where no row needs one."""
        masks = [
            cache.make_mask(count, return_array=return_array, window_size=window_size)
            for cache in self._caches
        ]
        return None if all(mask is None for mask in masks) else RowMasks(masks)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append to each row's cache. Shapes: [B, H, 1, D]; they come back as they are.

        What the rows' caches hold differs in length; `attend` has it.
        """
        rows = zip(self._caches, _split(keys), _split(values), strict=True)
        self._fetched = [cache.update_and_fetch(key, value) for cache, key, value in rows]
        self._given = keys, values
        return keys, values

    def attend(
        self,
        attend: _Attend,
        queries: mx.array,
        given: tuple[mx.array, mx.array],
        scale: float,
        mask: RowMasks | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of each row over what its cache holds. Shapes: [B, H, 1, D] -> the same."""
        if self._given is None or given[0] is not self._given[0] or given[1] is not self._given[1]:
            raise InvariantBroken("batch", "the model's attention changes what its cache returned")
        masks = [None] * len(self._caches) if mask is None else mask.masks
        rows = zip(_split(queries), self._fetched, self._caches, masks, strict=True)
        return mx.concatenate(
            [
                attend(query, *fetched, cache=cache, scale=scale, mask=row_mask, sinks=sinks)
                for query, fetched, cache, row_mask in rows
            ]
        )


def launch_together(
    model: LoadedModel, states: Sequence[Verifier], tokens: Sequence[int | None]
) -> None:
    """Launch a plain step of each sequence in one forward; as `Verifier.launch` for each.

    When it raises, the sequences are as before, except those whose caches cannot be trimmed.
    """
    lengths = [state.length for state in states]
    try:
        logits = _forward(model, states, _inputs(states, tokens))
        selected = _select(logits, [state.sampling for state in states], lengths)
        mx.async_eval(selected)  # type: ignore[no-untyped-call]
    except Exception:
        for state, length in zip(states, lengths, strict=True):
            _restore(state.cache, length)
        raise
    flight = Flight(selected)
    for index, state in enumerate(states):
        state.launched(Landing(flight, index))


def why_by_turns(model: LoadedModel) -> str:
    """Why no two sequences may share a forward of this model; "" = up to BATCH_ROWS may.

    Runs two short rows together and each alone. From then on the model can be batched.
    """
    kinds = {type(layer) for layer in model.make_cache()}
    if unknown := sorted(kind.__name__ for kind in kinds.difference(_KINDS)):
        known = ", ".join(kind.__name__ for kind in _KINDS)
        return f"it has layers with {', '.join(unknown)}; rows can be kept apart in {known}"
    _hand_over(model.network)
    try:
        return _differs(model)
    except Exception as problem:  # noqa: BLE001 - whatever a model does that cannot be batched
        return f"two rows in one forward fail: {problem or type(problem).__name__}"


def _differs(model: LoadedModel) -> str:
    """How two rows in one forward differ from each alone; "" = by no more than rounding."""
    texts = ([3, 1, 2], [2, 3, 1, 1, 2, 3, 2])
    alone = [Verifier(model) for _ in texts]
    together = [Verifier(model) for _ in texts]
    for state, text in zip([*alone, *together], [*texts, *texts], strict=True):
        state.prefill(text)
    row = mx.array([1, 3], dtype=mx.int32)
    for _ in range(3):
        expected = mx.concatenate([s.step(r) for s, r in zip(alone, _split(row), strict=True)])
        off = mx.abs(_forward(model, together, row) - expected).max()
        share = off / mx.abs(expected).max()
        if not mx.all(share <= _TOLERANCE).item():  # also where it is no number
            found = f"{share.item():.2g}"
            return f"two rows in one forward have logits that are off by {found} of the largest"
        row = mx.argmax(expected, axis=-1).astype(mx.int32)
    return ""


def _forward(model: LoadedModel, states: Sequence[Verifier], row: mx.array) -> mx.array:
    """Append a row to each sequence, lazily. Shapes: row [B] -> logits [B, V]."""
    offsets: dict[tuple[int, ...], mx.array] = {}
    layers = []
    for caches in zip(*(state.cache for state in states), strict=True):
        lengths = tuple(int(cache.offset) for cache in caches)
        if lengths not in offsets:
            offsets[lengths] = mx.array(lengths, dtype=mx.int32)
        layers.append(RowCaches(caches, offsets[lengths]))
    slots = row_slots([state.slot for state in states])
    return model.forward(row[:, None], layers, slots)[:, -1]


def _inputs(states: Sequence[Verifier], tokens: Sequence[int | None]) -> mx.array:
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


def _select(
    logits: mx.array, samplings: Sequence[SamplingParams], lengths: Sequence[int]
) -> mx.array:
    """Select each row's token in its own way. Shapes: [B, V] -> [B] int32."""
    if all(sampling.is_greedy for sampling in samplings):
        return select(logits, samplings[0], first_position=0)
    rows = zip(_split(logits), samplings, lengths, strict=True)
    return mx.concatenate(
        [select(row, sampling, first_position=length + 1) for row, sampling, length in rows]
    )


def _split(rows: mx.array) -> Sequence[mx.array]:
    """One array a row; mlx's stub says that it is a single one."""
    return cast("Sequence[mx.array]", mx.split(rows, rows.shape[0]))


def _restore(caches: Sequence[Any], length: int) -> None:
    """Take back what a forward that failed appended."""
    for cache in caches:
        surplus = int(cache.offset) - length
        if surplus > 0 and cache.is_trimmable():
            cache.trim(surplus)


def _hand_over(network: nn.Module) -> None:
    """Make the attention of the network's own modules ask a RowCaches, where it is given one."""
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
    """mlx-lm's attention, by rows for a RowCaches."""
    attend: _Attend = base.scaled_dot_product_attention
    if isinstance(cache, RowCaches):
        return cache.attend(attend, queries, (keys, values), scale, mask, sinks)
    return attend(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
