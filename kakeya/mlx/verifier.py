"""One sequence's KV and the rows that run on it: plain steps in a pipeline, blocks to verify.

A plain step is launched on the still-unread output of the step before it, so Python builds the
next graph while the device works on this one. A block is one forward over several rows
with a tail that can be trimmed, which only some cache classes allow and only at some lengths:

    KVCache, PlacedKV, QuantizedKVCache, ConcatenateKVCache
                                                     any tail, always
    RotatingKVCache                                  while offset + rows < max_size
    CacheList                                        as far as all its members allow
    anything else (recurrent state, ...)             never: no speculation on it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kakeya.core.errors import InvariantBroken, KakeyaError
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.processors.processors import LogitProcessors
from kakeya.engine.model import KvView
from kakeya.generation.frames import TokenLogprob
from kakeya.generation.request import Sampling
from kakeya.mlx.batch.slabs import PlacedKV, Seat, leave
from kakeya.mlx.device import ends_with_device
from kakeya.mlx.diffusion.tap import StateRows
from kakeya.mlx.kv import layers as kv_layers
from kakeya.mlx.kv.blocks import KvBlocks, Rings
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.lora import row_slots
from kakeya.mlx.selection import RowLogprobs, edited, logprobs_of, select

_GROWING = (KVCache, QuantizedKVCache, ConcatenateKVCache)
_FREELY_TRIMMABLE = (*_GROWING, PlacedKV)
UNBOUNDED_ROWS = 1 << 30


class LaunchedStep:
    """A launched step of one or many rows; `logprobs` of those that want them, by their places.
    Shape: selected [B] int32."""

    __slots__ = ("_tokens", "logprobs", "selected")

    def __init__(self, selected: mx.array, logprobs: Mapping[int, RowLogprobs]) -> None:
        self.selected = selected
        self.logprobs = logprobs
        self._tokens: list[int] | None = None

    def begin(self) -> None:
        """Begin to compute it."""
        others = [array for row in self.logprobs.values() for array in row.arrays()]
        mx.async_eval(self.selected, *others)  # type: ignore[no-untyped-call]

    def tokens(self) -> list[int]:
        """Wait for it; all rows are read at once."""
        if self._tokens is None:
            self._tokens = cast("list[int]", self.selected.tolist())
        return self._tokens


class Landing(NamedTuple):
    """One row of a flight."""

    flight: LaunchedStep
    place: int

    def token(self) -> int:
        """Wait for the flight; return the token that this row selected."""
        return self.flight.tokens()[self.place]

    def row(self) -> mx.array:
        """The token that this row selects, unread. Shape: [1] int32."""
        selected = self.flight.selected
        return selected if selected.size == 1 else selected[self.place : self.place + 1]


@ends_with_device
class MlxVerifier:
    """Implements `engine.model.SequenceState` on mlx-lm's caches."""

    def __init__(self, model: LoadedModel, blocks: KvBlocks | None = None) -> None:
        self._model = model
        self._blocks = blocks
        self._cache = model.make_cache()
        self._rings: Rings | None = None
        self.grid_tokens = 0
        self.seat: Seat | None = None
        """The place of its KV in a slab; None = caches of its own."""
        self._length = 0
        self._flight: deque[Landing] = deque()
        self._logits: mx.array | None = None
        self._sampling = Sampling()
        self._processors: LogitProcessors | None = None
        self._top_logprobs: int | None = None
        self._told: list[TokenLogprob] = []
        self._refusal: KakeyaError | None = None
        self._slot = 0
        self._slots: mx.array | None = None
        self._states = StateRows(model.tap) if model.tap else None

    @property
    def length(self) -> int:
        """Tokens with KV."""
        return self._length

    @property
    def cache(self) -> list[Any]:
        """The layers' caches."""
        return self._cache

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return self._sampling

    @property
    def is_plain(self) -> bool:
        """Whether it selects the most likely token of the logits as they are."""
        return self._processors is None and self._sampling.is_greedy

    @property
    def slot(self) -> int:
        """The slot of its adapter; 0 = none."""
        return self._slot

    @property
    def nbytes(self) -> int:
        """Bytes of KV."""
        return sum(layer.nbytes for layer in self._cache)

    def nbytes_per_token(self) -> int:
        """Bytes that one more token takes, by the layers' arrays; 0 before the first token."""
        return sum(_nbytes_per_token(layer) for layer in self._cache)

    def select_with(
        self,
        sampling: Sampling,
        processors: LogitProcessors | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        """Choose tokens this way from now on."""
        self._sampling, self._processors = sampling, processors
        self._top_logprobs, self._refusal = top_logprobs, None
        self._told.clear()

    @property
    def top_logprobs(self) -> int | None:
        """How many of the most likely tokens are told with a token; None = no log probabilities."""
        return self._top_logprobs

    def take_logprobs(self, count: int) -> list[TokenLogprob]:
        """Those of the first `count` tokens since the last call; the others are forgotten."""
        told = self._told[:count]
        self._told.clear()
        return told

    def edited(self, logits: mx.array, ahead: Sequence[int] = ()) -> mx.array:
        """The logits that its processors leave. Shape: [1 + len(ahead), V]."""
        if self._processors is None:
            return logits
        mx.async_eval(logits)  # type: ignore[no-untyped-call] # goes on while edits are made
        return edited(logits, self._processors.edits(ahead))

    def adapt(self, slot: int) -> None:
        """Compute with the adapter in this slot from now on; 0 = with none."""
        self._slot, self._slots = slot, row_slots((slot,))

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens and wait until their KV is computed; their logits are not."""
        leave(self)
        self._forward(_rows(tokens))
        if len(tokens) == 1:
            for layer in kv_layers.layers_of(self._cache):
                kv_layers.straighten(layer)
        mx.eval([layer.state for layer in self._cache])
        self._length += len(tokens)

    def launch(self, token: int | None, *, keeps_logits: bool = False) -> None:
        """Start a plain step on `token`, or on the one that the newest launched step selects."""
        self._stay_or_leave(1)
        row = self.next_row() if token is None else mx.array([token], dtype=mx.int32)
        logits = self.step(row)
        selected = self._agreed(logits, first_position=self._length)
        flight = LaunchedStep(selected, logprobs_of(logits, selected, [self._top_logprobs]))
        flight.begin()
        self._flight.append(Landing(flight, 0))
        if keeps_logits:
            self._logits = logits

    def take_logits(self) -> bytes:
        """The logits of the step that was launched to keep them, once; b"" = none."""
        logits, self._logits = self._logits, None
        if logits is None:
            return b""
        return np.array(logits.astype(mx.float32)).astype("<f4", copy=False).tobytes()

    def selected_from(self, logits: bytes) -> int:
        """The token that a step with these logits selects."""
        row = mx.array(np.frombuffer(logits, "<f4"))[None]
        selected = self._select(row, first_position=self._length + 1)
        self._told += [
            each.read() for each in logprobs_of(row, selected, [self._top_logprobs]).values()
        ]
        return cast("int", selected.item())

    def next_row(self) -> mx.array:
        """The token that the newest launched step selects, unread. Shape: [1] int32."""
        return self._flight[-1].row()

    def newest(self) -> Landing:
        """The newest launched step."""
        return self._flight[-1]

    def edited_together(self, logits: mx.array) -> mx.array:
        """As `edited`, for a step that others share: an error of the processors is this sequence's
        alone, and raised where its step is collected. Shape: [1, V]."""
        try:
            return self.edited(logits)
        except KakeyaError as refusal:
            self._refusal = refusal
            return logits

    def launched(self, landing: Landing) -> None:
        """A step was launched together with those of other sequences."""
        self._flight.append(landing)
        self.appended()

    def appended(self) -> None:
        """A row was appended together with those of other sequences."""
        self._length += 1

    def appended_piece(self, cache: list[Any], tokens: int) -> None:
        """So many tokens were appended to its KV, which these caches hold now."""
        self._cache = cache
        self._length += tokens

    def step(self, row: mx.array) -> mx.array:
        """Append one row lazily; nothing is evaluated. Shapes: row [1] -> logits [1, V]."""
        logits: mx.array = self._forward(row[None])[0]
        self._length += 1
        return logits

    def collect(self) -> int:
        """Wait for the oldest launched step; return the token that it selected.

        Raises what its processors raised when it was launched together with others.
        """
        landing = self._flight.popleft()
        if self._refusal is not None:
            raise self._refusal
        token = landing.token()
        if (logprobs := landing.flight.logprobs.get(landing.place)) is not None:
            self._told.append(logprobs.read())
        return token

    def in_flight(self) -> int:
        """Steps launched and not collected."""
        return len(self._flight)

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Append `tokens` in one forward; return the token selected after each of them."""
        self._stay_or_leave(len(tokens))
        logits = self._forward(_rows(tokens))[0]
        selected = self._agreed(logits, self._length + 1, tokens[1:])
        self._length += len(tokens)
        rows = logprobs_of(logits, selected, [self._top_logprobs] * len(tokens))
        self._told += [row.read() for row in rows.values()]
        return cast("list[int]", selected.tolist())

    def verifiable_rows(self) -> int:
        """Rows that may be appended such that any tail of them can be trimmed again."""
        return min((_verifiable_rows(layer) for layer in self._cache), default=0)

    def trim(self, count: int) -> bool:
        """Drop the KV of the last `count` tokens; False, and nothing changed, where it can't.

        Raises InvariantBroken when a layer that promised it trims another number of tokens.
        """
        if count == 0:
            return True
        if not all(_is_trimmable(layer) for layer in self._cache):
            return False
        for layer in self._cache:
            trimmed = layer.trim(count)
            if trimmed not in (count, None):
                raise InvariantBroken("trim", f"asked a layer for {count}, it trimmed {trimmed}")
        self._length -= count
        if self._states is not None:
            self._states.cut(self._length)
        if self.seat is not None:
            self.seat.trimmed(self._length)
        return True

    def export_block(self, first: int, tokens: int, into: KvView, *, with_state: bool) -> bool:
        """Copy the KV of tokens into the block that they lie in; see `KvBlocks.write`."""
        if self._blocks is None:
            return False
        leave(self)
        return self._blocks.write(self._cache, first, tokens, into, with_state=with_state)

    def import_blocks(self, blocks: Sequence[KvView], tokens: int) -> None:
        """Hold the KV of so many tokens, of which blocks are given; see `KvBlocks.read`."""
        if self._blocks is None or self._length:
            raise InvariantBroken("import_blocks", f"the state holds {self._length} tokens")
        self._blocks.read(self._cache, blocks, tokens)
        self._length = tokens

    def stow(self, blocks: Sequence[KvView]) -> bool:
        """Copy all KV into these blocks and hold none of it; see the protocol."""
        leave(self)
        if self._blocks is None:
            return False
        for landing in self._flight:
            landing.token()  # computed before the KV that it reads is dropped
        self._rings = self._blocks.stow(self._cache, blocks, self._length)
        self._cache = self._model.make_cache()
        return True

    def restore(self, blocks: Sequence[KvView]) -> None:
        """Hold the KV again that was stowed in these blocks."""
        if self._blocks is None:
            raise InvariantBroken("restore", "a model without blocks stowed something")
        self._blocks.read(self._cache, blocks, self._length, self._rings)
        self._rings = None

    def pretend(self, length: int) -> bool:
        """Make the layers that grow with the text hold `length` made-up tokens, not only one.

        For timing only. False, and nothing changed, where no layer is of a kind that this can do.
        """
        grown = [layer for layer in self._cache if type(layer) is KVCache]
        for layer in grown:
            shapes = [(*part.shape[:2], length, part.shape[-1]) for part in layer.state[:2]]
            kinds = [part.dtype for part in layer.state[:2]]
            keys, values = (mx.zeros(*made) for made in zip(shapes, kinds, strict=True))
            layer.keys, layer.values, layer.offset = keys, values, length
        if grown:
            self._length = length
        return bool(grown)

    def hidden_states(self, first: int, end: int) -> HiddenStates | None:
        """Those of the tokens `first` to `end`, the newest that there are; None = none."""
        return None if self._states is None else self._states.read(first, end)

    def layer_length(self) -> int:
        """The offset of the first layer that has one; else the bookkeeping."""
        for layer in self._cache:
            members = layer.caches if isinstance(layer, CacheList) else (layer,)
            for member in members:
                if isinstance(member, (*_FREELY_TRIMMABLE, RotatingKVCache)):
                    return int(member.offset)
        return self._length

    def _forward(self, rows: mx.array) -> mx.array:
        """Append rows alone; the hidden states are kept where a drafter reads them."""
        model = self._model
        if self._states is None or model.tap is None:
            return model.forward(rows, self._cache, self._slots)
        with model.tap.open() as outputs:
            logits = model.forward(rows, self._cache, self._slots)
        self._states.add(self._length, model.tap.project(outputs)[0])
        return logits

    def _stay_or_leave(self, tokens: int) -> None:
        """Prepare to append rows alone: leave a slab without room for them, or with few others."""
        seat = self.seat
        if seat is None:
            return
        if self._length + tokens >= seat.slab.capacity or seat.slab.is_sparse():
            leave(self)

    def _select(self, logits: mx.array, first_position: int, ahead: Sequence[int] = ()) -> mx.array:
        """Select a token per row, behind each token of `ahead` too. Shapes: logits [L, V] -> [L]
        int32.

        Row i selects the token at absolute position `first_position + i`.
        """
        return select(self.edited(logits, ahead), self._sampling, first_position)

    def _agreed(self, logits: mx.array, first_position: int, ahead: Sequence[int] = ()) -> mx.array:
        """As `_select`, and the same at all ranks that compute this forward.

        A rank that raises takes part first: the others, which know no processors, wait for it.
        """
        try:
            selected = self._select(logits, first_position, ahead)
        except KakeyaError:
            mx.eval(self._model.agreed(mx.argmax(logits, axis=-1).astype(mx.int32)))
            raise
        return self._model.agreed(selected)


def _rows(tokens: Sequence[int]) -> mx.array:
    """Ids as one batch row. Shapes: L ids -> [1, L] int32."""
    return mx.array(list(tokens), dtype=mx.int32)[None]


def _is_trimmable(layer: Any) -> bool:  # noqa: ANN401 - mlx-lm's caches share no public type
    if isinstance(layer, CacheList):
        return all(_is_trimmable(member) for member in layer.caches)
    if isinstance(layer, RotatingKVCache):
        return bool(layer.is_trimmable())
    return isinstance(layer, _FREELY_TRIMMABLE)


def _verifiable_rows(layer: Any) -> int:  # noqa: ANN401
    if isinstance(layer, CacheList):
        return min((_verifiable_rows(member) for member in layer.caches), default=0)
    if isinstance(layer, RotatingKVCache):
        return max(0, int(layer.max_size) - int(layer.offset) - 1)
    return UNBOUNDED_ROWS if isinstance(layer, _FREELY_TRIMMABLE) else 0


def _nbytes_per_token(layer: Any) -> int:  # noqa: ANN401
    """Only layers that grow with the text count; they allocate ahead, so capacity divides."""
    if isinstance(layer, CacheList):
        return sum(_nbytes_per_token(member) for member in layer.caches)
    if isinstance(layer, PlacedKV):
        return layer.nbytes // layer.capacity
    if not isinstance(layer, _GROWING) or layer.keys is None:
        return 0
    keys = layer.keys[0] if isinstance(layer.keys, tuple | list) else layer.keys
    return int(layer.nbytes) // int(keys.shape[-2])
