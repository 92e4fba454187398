"""A model's KV as bytes that outlive it: blocks of positions, for pages, disks and other engines.

The bytes of T positions, one array after the other, without gaps:

    layer 0 keys [heads, T, width] | layer 0 values | layer 1 keys | ...  | recurrent state

Little-endian, in the caches' own dtypes. Rows of every position are there also for layers that
attend to a window only, so that a text can be taken up behind any block; recurrent state, which
rows do not contain, lies behind the block at the end of which it was.

The content of a model's caches is found once, on a short text. A model with unknown caches, or with
other logits behind imported KV than behind its own, has no blocks.

Nothing here keeps a second name of a live buffer: an append would then copy all of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np

from kakeya.core.errors import InvalidArgument
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.engine.model import LEAST_CHUNK_TOKENS, KvView
from kakeya.mlx.device import tells_lost_device
from kakeya.mlx.kv import layers as kv_layers
from kakeya.mlx.kv.layers import Fixed, Range, Ring, Rows
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.numerics.bits import ROUNDING, Bits, bits, kind_of, share_off

Rings = Sequence[Ring | None]
"""The order of each layer's rows, where not by their positions."""
_FORMAT = 1
_CONTEXT_BLOCKS = 8
"""A context has at least so many blocks: most texts that share a beginning share a whole one."""
_TRIED = (16, 8)
"""Tokens in front of and behind the place at which taking KV over is tried."""


class KvBlocks:
    """Writes one model's caches into blocks, and reads them from blocks."""

    def __init__(self, block_tokens: int, caches: Sequence[Any]) -> None:
        """`caches` hold some text, and are of known classes. Raises InvalidArgument where they hold
        something else than arrays of a row for each position, or of a shape that stays."""
        self.block_tokens = block_tokens
        layers = kv_layers.layers_of(caches)
        self._rows: list[tuple[Rows, ...]] = []
        self._state: list[tuple[Fixed, ...]] = []
        for index, layer in enumerate(layers):
            parts = kv_layers.arrays(layer)
            if not parts:
                raise InvalidArgument(f"layer {index} holds nothing")
            is_state = kv_layers.is_state(layer)
            self._rows.append(() if is_state else tuple(_rows(part, index) for part in parts))
            self._state.append(tuple(map(_fixed, parts)) if is_state else ())
        self.row_bytes = sum(part.nbytes for parts in self._rows for part in parts)
        self.state_bytes = sum(part.nbytes for parts in self._state for part in parts)
        growing = [kv_layers.grows(layer) for layer in layers]
        self.is_full_attention = all(growing)
        """Whether every layer attends to the whole text."""
        self.full_widths = sum(
            part.width
            for full, rows in zip(growing, self._rows, strict=True)
            if full
            for part in rows
        )
        """The widths of a key and a value of one head, over all layers that do."""
        self._described = []
        for layer, rows, state in zip(layers, self._rows, self._state, strict=True):
            held = [part.describe() for part in rows] + [part.describe() for part in state]
            self._described.append({**kv_layers.describe(layer), "arrays": held})

    @property
    def layout(self) -> str:
        """The meaning of the bytes, as canonical JSON."""
        described = {"format": _FORMAT, "layers": self._described}
        return json.dumps(described, sort_keys=True, separators=(",", ":"))

    def write(
        self, caches: Sequence[Any], first: int, tokens: int, into: KvView, *, with_state: bool
    ) -> bool:
        """Copy the rows of positions [first, first + tokens) to their places in a block.

        `into` is the block that `first` lies in; with state, which is that of now, behind its
        rows. False where a window has lost a row. Raises InvalidArgument when it is too short.
        """
        at = first % self.block_tokens
        self._check(into, at + tokens, with_state=with_state)
        places = []
        for layer in kv_layers.layers_of(caches):
            if (place := kv_layers.place(layer, first, first + tokens)) is None:
                return False
            places.append(place)
        self._copy(caches, places, at, into, with_state=with_state)
        return True

    def _copy(
        self,
        caches: Sequence[Any],
        places: Sequence[Range],
        at: int,
        into: KvView,
        *,
        with_state: bool,
    ) -> None:
        """Copy rows at places of the layers' arrays to the rows of a block from `at` on."""
        layers = kv_layers.layers_of(caches)
        held = bits([part for layer in layers for part in kv_layers.arrays(layer)])
        offset, state_at = 0, into.tokens * self.row_bytes
        for (start, end), rows, state in zip(places, self._rows, self._state, strict=True):
            for part in rows:
                target = _view(into, offset, (part.heads, into.tokens, part.width), part.dtype)
                target[:, at : at + end - start] = next(held)[0, :, start:end]
                offset += into.tokens * part.nbytes
            for fixed in state:
                whole = next(held)
                if with_state:
                    _view(into, state_at, fixed.shape, fixed.dtype)[...] = whole
                    state_at += fixed.nbytes

    def stow(self, caches: Sequence[Any], blocks: Sequence[KvView], tokens: int) -> Rings:
        """Copy the caches of so many tokens into blocks, for `read` with the returned rings.

        A window's rows lie in the blocks as they lay in its ring.

        Raises InvalidArgument when the blocks are too short.
        """
        size = self.block_tokens
        rings = [kv_layers.ring(layer) for layer in kv_layers.layers_of(caches)]
        # Recurrent state has no rows: any places are right.
        held = [tokens if ring is None else ring.rows for ring in rings]
        for index, block in enumerate(blocks):
            first, last = index * size, min((index + 1) * size, tokens)
            with_state = self.state_bytes > 0 and index == len(blocks) - 1
            self._check(block, last - first, with_state=with_state)
            places = [(min(first, rows), min(last, rows)) for rows in held]
            self._copy(caches, places, 0, block, with_state=with_state)
        return rings

    def read(
        self,
        caches: Sequence[Any],
        blocks: Sequence[KvView],
        tokens: int,
        rings: Rings | None = None,
    ) -> None:
        """Make empty caches hold the first `tokens` positions of a text that these blocks cover.

        The last block may be used in part; recurrent state is that behind the last token. With
        rings: KV as `stow` left it. Raises InvalidArgument, and leaves the caches empty, when the
        blocks do not hold these tokens.
        """
        if not 0 <= len(blocks) * self.block_tokens - tokens < self.block_tokens and self.row_bytes:
            raise InvalidArgument(f"{tokens} tokens are not in {len(blocks)} blocks")
        for index, block in enumerate(blocks):
            needed = min(self.block_tokens, tokens - index * self.block_tokens)
            self._check(block, needed, with_state=False)
        layers = kv_layers.layers_of(caches)
        lie = rings if rings is not None else [None] * len(layers)
        made = []
        for layer, rows, ring, queue in zip(layers, self._rows, lie, cycle(_queues())):
            places = kv_layers.places(layer, tokens) if ring is None else ring.places
            kinds = [(part.shape(places), kind_of(part.dtype)) for part in rows]
            made.append([mx.zeros(*kind, stream=queue) for kind in kinds])
            # The system's first touch of its pages takes longer than the copy: both go on at once.
            mx.async_eval(made[-1])  # type: ignore[no-untyped-call]
        offset = 0  # bytes of each position that lie in front
        for layer, rows, raws, ring in zip(layers, self._rows, made, lie, strict=True):
            wanted = kv_layers.wanted(layer, tokens) if ring is None else ((0, ring.rows),)
            for index, part in enumerate(rows):
                target = np.array(raws[index], copy=False)[0]
                self._gather(target, blocks, part, offset, wanted)
                raws[index] = raws[index].view(part.dtype)
                offset += part.nbytes
        if self.state_bytes:
            self._read_state(made, blocks[-1])
        # What is still to be done, views of what lies there, is done with the first forward.
        for layer, parts, ring in zip(layers, made, lie, strict=True):
            kv_layers.restore(layer, parts, tokens, ring)

    def _gather(
        self,
        target: Bits,
        blocks: Sequence[KvView],
        part: Rows,
        offset: int,
        wanted: Sequence[Range],
    ) -> None:
        """Copy the rows of these positions behind each other. Shape: target [heads, >=n, width]."""
        at, size = 0, self.block_tokens
        for first, last in wanted:
            for index in range(first // size, -(-last // size)):
                block = blocks[index]
                start, end = max(first - index * size, 0), min(last - index * size, size)
                shape = (part.heads, block.tokens, part.width)
                source = _view(block, block.tokens * offset, shape, part.dtype)
                target[:, at : at + end - start] = source[:, start:end]
                at += end - start

    def _read_state(self, made: Sequence[list[mx.array]], block: KvView) -> None:
        self._check(block, 0, with_state=True)
        offset = block.tokens * self.row_bytes
        for parts, held in zip(self._state, made, strict=True):
            for part in parts:
                bits = _view(block, offset, part.shape, part.dtype)
                held.append(mx.array(bits).view(part.dtype))
                offset += part.nbytes

    def _check(self, block: KvView, tokens: int, *, with_state: bool) -> None:
        if with_state and not block.has_state:
            raise InvalidArgument("the block has no place for state")
        if self.row_bytes and block.tokens < tokens:
            raise InvalidArgument(f"the block is of {block.tokens} tokens, {tokens} are meant")
        least = block.tokens * self.row_bytes + (self.state_bytes if block.has_state else 0)
        if block.data.nbytes < least:
            raise InvalidArgument(f"the block has {block.data.nbytes} bytes, it must have {least}")


def block_tokens_of(context_tokens: int) -> int:
    """Tokens of a block: as many as mlx-lm's caches allocate at once, fewer in short contexts.

    A power of two; 0 = the context is too short for blocks.
    """
    size = KV_BLOCK_TOKENS
    while size * _CONTEXT_BLOCKS > context_tokens:
        size //= 2
    return size if size >= LEAST_CHUNK_TOKENS else 0


@tells_lost_device
def plan_blocks(model: LoadedModel, *, is_tried: bool = False) -> KvBlocks:
    """Inspect the content of a model's caches, and try on a short text that importing it works.

    `is_tried`: an earlier load of the same weights by the same versions has tried it.

    Raises InvalidArgument with the reason why this model has no blocks.
    """
    size = block_tokens_of(model.context_tokens)
    if not size:
        raise InvalidArgument(f"a context of {model.context_tokens} tokens is too short for blocks")
    before, behind = _TRIED
    own, taken = model.make_cache(), model.make_cache()
    for index, layer in enumerate(kv_layers.layers_of(own)):
        if not kv_layers.is_known(layer):
            raise InvalidArgument(f"layer {index} has a {type(layer).__name__}")
    _forward(model, own, 0, 1 if is_tried else before)
    blocks = KvBlocks(size, own)
    if is_tried:
        return blocks
    length = before * blocks.row_bytes + blocks.state_bytes
    block = KvView(memoryview(bytearray(length)), before, has_state=blocks.state_bytes > 0)
    is_whole = blocks.write(own, 0, before, block, with_state=block.has_state)
    expected = _forward(model, own, before, behind)
    if not is_whole or blocks.layout != KvBlocks(size, own).layout:
        raise InvalidArgument("the layout of its caches changes with the length of the text")
    blocks.read(taken, [block], before)
    found = _forward(model, taken, before, behind)
    if not share_off(found, expected) <= ROUNDING:
        raise InvalidArgument("its logits behind imported KV differ from those behind its own")
    return blocks


def _forward(model: LoadedModel, caches: list[Any], first: int, tokens: int) -> mx.array:
    """Append made-up tokens. Shape of the logits: [1, tokens, V]."""
    text = mx.arange(first, first + tokens, dtype=mx.int32)[None] % 7
    logits = model.forward(text, caches)
    mx.eval(logits, [layer.state for layer in caches])
    return logits


@cache
def _queues() -> tuple[mx.ThreadLocalStream | None, ...]:
    """Queues that make memory for KV, None = the usual one: the CPU has two, a core each."""
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    return (None, mx.new_thread_local_stream(mx.cpu)) if is_cpu else (None,)


def _view(block: KvView, offset: int, shape: tuple[int, ...], dtype: mx.Dtype) -> Bits:
    """View a part of a block as unsigned integers, without a copy."""
    kind = np.dtype(f"<u{dtype.size}")
    return np.frombuffer(block.data, kind, math.prod(shape), offset).reshape(shape)


def _rows(held: mx.array, index: int) -> Rows:
    if held.ndim != 4 or held.shape[0] != 1:
        raise InvalidArgument(f"layer {index} holds an array of shape {held.shape}")
    return Rows(heads=held.shape[1], width=held.shape[3], dtype=held.dtype)


def _fixed(held: mx.array) -> Fixed:
    return Fixed(shape=tuple(held.shape), dtype=held.dtype)
