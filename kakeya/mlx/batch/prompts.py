"""Pieces of prompts in one forward, of one sequence or of several, a few layers at a time.

A piece long enough for throughput takes much longer than others can wait. Its graph is made at once
and computed layer by layer, with steps of others between; that changes no bit.

    before    the sequences hold the KV that they had: a forward that is given up leaves no trace
    meanwhile the forward works on twins of their caches. A layer that grows with the text hands its
              arrays over just before it is computed: with two owners, an append would copy them
    after     the sequences hold the twins

Several pieces are computed as [B, L], the shorter ones filled up: the products with the weights,
which read every weight for a few rows as for many, are done once. Each row attends by itself, over
its own tokens, as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from itertools import starmap
from typing import Any

import mlx.core as mx
import numpy as np

from kakeya.engine.model import SequenceState
from kakeya.mlx.batch.batch import lazily
from kakeya.mlx.batch.cache import AloneKV, Attend, RowCaches
from kakeya.mlx.batch.slabs import leave
from kakeya.mlx.device import ends_with_device
from kakeya.mlx.kv import layers as kv_layers
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.lora import row_slots
from kakeya.mlx.numerics.bits import bits
from kakeya.mlx.numerics.grid import sums_alike
from kakeya.mlx.verifier import MlxVerifier

_TRIED = ((16, 24, 32), (48, 64))
"""Tokens of the pieces that are tried together."""


@ends_with_device
class LayeredForward:
    """Implements `engine.model.PromptForward`."""

    def __init__(
        self,
        model: LoadedModel,
        states: Sequence[MlxVerifier],
        pieces: Sequence[Sequence[int]],
        parts: int = 1,
    ) -> None:
        """Append pieces to sequences, in so many parts, or in as many as there are layers."""
        self._members: dict[int, tuple[MlxVerifier, int]] = {}
        self._layers: list[tuple[list[Any], list[Any]]] = []
        """Of each sequence: its caches, and their twins."""
        for at, (state, piece) in enumerate(zip(states, pieces, strict=True)):
            leave(state)
            self._members[at] = state, len(piece)
            self._layers.append((list(state.cache), [_twin(layer) for layer in state.cache]))
        count = len(self._layers[0][0])
        parts = max(1, min(parts, count))
        self._ends = [count * (part + 1) // parts for part in range(parts)]
        self._done = 0
        with lazily() if parts > 1 else nullcontext():
            self._build(model, states, pieces)
        for (_, twins), piece in zip(self._layers, pieces, strict=True):
            if len(piece) == 1:
                for layer in kv_layers.layers_of(twins):
                    kv_layers.straighten(layer)

    @property
    def parts(self) -> int:
        """Parts that are left."""
        return len(self._ends)

    def advance(self) -> bool:
        """Compute the next part; whether that was the last one."""
        end = self._ends[0]
        held = []
        for at in self._members:
            layers, twins = self._layers[at]
            for layer, twin in zip(layers[self._done : end], twins[self._done : end], strict=True):
                _hand_over(layer, twin)
                held.append(twin.state)
        mx.eval(held)
        self._done = end
        del self._ends[0]
        if self._ends:
            return False
        for at, (state, tokens) in self._members.items():
            state.appended_piece(self._layers[at][1], tokens)
        return True

    def leave(self, state: SequenceState) -> None:
        """Append nothing to this sequence, and leave its KV to whatever comes next."""
        gone = [at for at, (member, _) in self._members.items() if member is state]
        for at in gone:
            del self._members[at]

    def _build(
        self,
        model: LoadedModel,
        states: Sequence[MlxVerifier],
        pieces: Sequence[Sequence[int]],
    ) -> None:
        """Make the graph; logits are never asked for, so they are never computed."""
        longest = max(map(len, pieces))
        rows = [[*piece, *([0] * (longest - len(piece)))] for piece in pieces]
        tokens = mx.array(rows, dtype=mx.int32)
        slots = row_slots([state.slot for state in states])
        twins = [own for _, own in self._layers]
        if len(states) == 1:
            model.forward(tokens, twins[0], slots)
            return
        offsets: dict[tuple[int, ...], mx.array] = {}
        layers = []
        for caches in zip(*twins, strict=True):
            lengths = tuple(int(cache.offset) for cache in caches)
            if lengths not in offsets:
                offsets[lengths] = mx.array(lengths, dtype=mx.int32)
            parts = list(starmap(_PieceKV, zip(caches, map(len, pieces), strict=True)))
            layers.append(RowCaches(parts, range(1, len(parts)), offsets[lengths]))
        model.forward(tokens, layers, slots)


class WholePiece:
    """Implements `engine.model.PromptForward` where a cache is of an unknown class: one part."""

    def __init__(self, state: MlxVerifier, piece: Sequence[int]) -> None:
        self.parts = 1
        self._state: MlxVerifier | None = state
        self._piece = piece

    def advance(self) -> bool:
        """Compute all of it."""
        if self._state is not None:
            self._state.prefill(self._piece)
        return True

    def leave(self, state: SequenceState) -> None:
        """Append nothing to this sequence."""
        if state is self._state:
            self._state = None


def pieces_check(model: LoadedModel) -> Generator[None, None, int]:
    """Find the least tokens of a piece that has the same bits together with others as alone.

    A forward for each `next`; 0 = none is known to have. OpenBLAS takes another way for products of
    few rows, and no other for more. It fails, or differs, where a model does anything else with its
    caches than attend.
    """
    if sums_alike():
        return 1
    least = 0
    alone = [MlxVerifier(model) for lengths in _TRIED for _ in lengths]
    together = [MlxVerifier(model) for _ in alone]
    first = 0
    for lengths in (*_TRIED, _TRIED[-1]):
        # The last ones go on behind their own KV.
        first = min(first, len(alone) - len(lengths))
        ones, others = alone[first : first + len(lengths)], together[first : first + len(lengths)]
        texts = [[(7 * at + length) % 5 for at in range(length)] for length in lengths]
        for state, text in zip(ones, texts, strict=True):
            yield
            state.prefill(text)
        yield
        try:
            LayeredForward(model, others, texts).advance()
        except Exception:  # noqa: BLE001 - whatever a model does that pieces cannot share
            return 0
        for length, *pair in zip(lengths, ones, others, strict=True):
            if not _is_same(*pair):
                least = 0
            elif not least:
                least = length
        first += len(lengths)
    return least


def can_split(model: LoadedModel) -> bool:
    """Whether a forward can work on twins of the caches: none is of an unknown class."""
    return all(map(kv_layers.is_known, kv_layers.layers_of(model.make_cache())))


class _PieceKV(AloneKV):
    """One row of a shared forward, with its own tokens in front."""

    def __init__(self, cache: Any, tokens: int) -> None:  # noqa: ANN401 - mlx-lm's caches share no public type
        super().__init__(cache)
        self._tokens = tokens

    def make_mask(self, count: int, *, return_array: bool, window_size: int | None) -> Any:  # noqa: ANN401
        """The mask of the cache for the row's own tokens."""
        del count
        return super().make_mask(self._tokens, return_array=return_array, window_size=window_size)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append the row's own tokens."""
        super().append(keys[:, :, : self._tokens], values[:, :, : self._tokens])

    def attend(
        self,
        attend: Attend,
        queries: mx.array,
        scale: float,
        mask: Any,  # noqa: ANN401
        sinks: mx.array | None,
    ) -> list[mx.array]:
        """Attention of the row's own tokens; zeros behind them. Shapes: [1, H, L, D]."""
        (found,) = super().attend(attend, queries[:, :, : self._tokens], scale, mask, sinks)
        rest = queries.shape[2] - self._tokens
        return [mx.pad(found, [(0, 0), (0, 0), (0, rest), (0, 0)]) if rest else found]


def _twin(layer: Any) -> Any:  # noqa: ANN401
    """A cache with names of its own for the same arrays: each changes without the other."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(twin, name, _renamed(value))
    return twin


def _renamed(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, list | tuple):
        return type(value)(map(_renamed, value))
    return _twin(value) if kv_layers.is_known(value) else value


def _hand_over(layer: Any, twin: Any) -> None:  # noqa: ANN401
    """Let a twin alone own the arrays of a cache that grows; the cache keeps its own length."""
    for one, other in zip(*map(kv_layers.layers_of, ([layer], [twin])), strict=True):
        if kv_layers.grows(one):
            one.keys, one.values = other.keys, other.values


def _is_same(one: MlxVerifier, other: MlxVerifier) -> bool:
    """Whether two sequences hold KV of the same bits, token by token."""
    layers = [kv_layers.layers_of(state.cache) for state in (one, other)]
    held = [
        [part[:, :, : one.length] for layer in own for part in kv_layers.arrays(layer)]
        for own in layers
    ]
    return one.length == other.length and all(
        starmap(np.array_equal, zip(*map(bits, held), strict=True))
    )
