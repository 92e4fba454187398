"""Selection of tokens from logits, as `decoding.processors` and `decoding.draft.sampling` say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from kakeya.decoding.draft.sampling import noise_key
from kakeya.decoding.processors.edits import WORD_BITS, LogitEdit, TokenEdits, Words
from kakeya.generation.frames import TokenLogprob
from kakeya.generation.request import Sampling


class RowLogprobs:
    """The log probability of a selected token, and the most likely ones, unread.

    Of the logits as the model gave them. A row at a time: a sum over one row has the same bits
    whatever is beside it. Shapes: logits [1, V], selected [1].
    """

    __slots__ = ("_likely", "_own", "_top")

    def __init__(self, logits: mx.array, selected: mx.array, top: int) -> None:
        logits = logits.astype(mx.float32)
        logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._own = mx.take_along_axis(logs, selected[:, None], axis=-1)
        self._top: mx.array | None = None
        self._likely: mx.array | None = None
        if top > 0:
            top = min(top, logs.shape[-1])
            self._top = mx.argpartition(-logs, kth=top - 1, axis=-1)[:, :top]
            self._likely = mx.take_along_axis(logs, self._top, axis=-1)

    def arrays(self) -> list[mx.array]:
        """What has to be computed for it."""
        return [each for each in (self._own, self._top, self._likely) if each is not None]

    def read(self) -> TokenLogprob:
        """Wait for it."""
        own = cast("list[list[float]]", self._own.tolist())[0][0]
        if self._top is None or self._likely is None:
            return TokenLogprob(logprob=own)
        ids = cast("list[list[int]]", self._top.tolist())[0]
        values = cast("list[list[float]]", self._likely.tolist())[0]
        pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprob(logprob=own, top=tuple(pairs))


def logprobs_of(
    logits: mx.array, selected: mx.array, tops: Sequence[int | None]
) -> dict[int, RowLogprobs]:
    """Those of the rows that want some, by their places.

    `tops` say how many of the most likely tokens each row wants, None = no log probability at all.
    Shapes: logits [B, V], selected [B].
    """
    return {
        at: RowLogprobs(logits[at : at + 1], selected[at : at + 1], top)
        for at, top in enumerate(tops)
        if top is not None
    }


def edited(logits: mx.array, edits: Sequence[LogitEdit]) -> mx.array:
    """The logits behind an edit of each row. Shapes: [L, V] any float -> [L, V] float32."""
    logits = logits.astype(mx.float32)
    rows = [_edited(logits[at : at + 1], edit) for at, edit in enumerate(edits)]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)


def _edited(row: mx.array, edit: LogitEdit) -> mx.array:
    """Shape: [1, V]."""
    if edit.tokens is not None:
        row = _with_tokens(row, edit.tokens)
    if edit.allowed is not None:
        row = mx.where(_bits(edit.allowed, row.shape[-1]), row, -mx.inf)
    return row


def _with_tokens(row: mx.array, tokens: TokenEdits) -> mx.array:
    ids = mx.array(tokens.ids)[None]
    factors = mx.array(tokens.factors)
    values = mx.take_along_axis(row, ids, axis=-1) + mx.array(tokens.biases)
    values = mx.where(values > 0, values / factors, values * factors)
    return mx.put_along_axis(row, ids, values - mx.array(tokens.penalties), axis=-1)


def _bits(words: Words, size: int) -> mx.array:
    """The bits of words, the lowest first. Shape: [size] bool."""
    shifts = mx.arange(WORD_BITS, dtype=mx.uint32)
    bits: mx.array = (mx.array(words)[:, None] >> shifts) & 1
    return bits.reshape(-1)[:size].astype(mx.bool_)


def select(logits: mx.array, sampling: Sampling, first_position: int) -> mx.array:
    """Greedy or position-keyed selection. Shapes: logits [L, V] any float -> tokens [L] int32.

    Sampling is argmax(logits / T + Gumbel noise keyed by (seed, absolute position)) over the tokens
    that top-k, top-p and min-p keep, in float32: the same seed selects the same token at a position
    however the rows before it were computed.
    """
    if sampling.is_greedy:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    scaled = logits.astype(mx.float32) / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = mx.sort(scaled, axis=-1)[:, -sampling.top_k][:, None]
        scaled = mx.where(scaled < kth, -mx.inf, scaled)
    if sampling.top_p < 1.0:
        descending = -mx.sort(-scaled, axis=-1)
        mass = mx.cumsum(mx.softmax(descending, axis=-1), axis=-1)
        # A token stays while the mass before it is below top_p; the first one always does, also
        # where top_p is 0 in float32.
        before = mx.concatenate([mx.zeros_like(mass[:, :1]), mass[:, :-1]], axis=-1)
        kept = mx.where(before < sampling.top_p, descending, mx.inf)
        last = mx.minimum(kept.min(axis=-1, keepdims=True), descending[:, :1])
        scaled = mx.where(scaled < last, -mx.inf, scaled)
    if sampling.min_p > 0.0:
        least = scaled.max(axis=-1, keepdims=True) + math.log(sampling.min_p)
        scaled = mx.where(scaled < least, -mx.inf, scaled)
    noise = mx.stack(
        [
            mx.random.gumbel(
                (logits.shape[-1],),
                key=mx.random.key(noise_key(sampling.seed, first_position + row)),
            )
            for row in range(logits.shape[0])
        ]
    )
    return mx.argmax(scaled + noise, axis=-1).astype(mx.int32)
