"""Drafts by passes over a block of masks, with the context of recent texts kept.

A pass predicts all masks of the block at once and fills those of which it is surest; the next one
sees them. The work of a draft is the same however long its text is: of a long one the end is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np

from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.generation.request import Sampling
from kakeya.mlx.device import PeakMeter
from kakeya.mlx.diffusion.network import BlockDiffusion, LayerKv
from kakeya.mlx.diffusion.schedule import fills, surest
from kakeya.mlx.kept_prefix import shared_head
from kakeya.mlx.selection import select

LEAN = 0.5
"""Nats: see `surest`."""
_KEPT_TEXTS = 8
"""Texts that a drafter follows at once."""


class BlockDiffusionDrafter:
    """Drafts with one network; belongs to the model thread."""

    def __init__(self, network: BlockDiffusion, model_id: str, fingerprint: str = "") -> None:
        """`fingerprint` names the weights: states have to be projected by the same."""
        self._network = network
        self._fingerprint = fingerprint
        self._config = network.config
        self._model_id = model_id
        self._texts: list[ContextKv] = []
        self._never = mx.where(
            mx.arange(self._config.vocab_size) == self._config.mask_token_id, -mx.inf, 0.0
        )
        self.meter = PeakMeter()

    @property
    def held_bytes(self) -> int:
        """Keys and values of all texts."""
        return sum(text.nbytes for text in self._texts)

    def shed(self, size: int) -> None:
        """Forget texts, oldest first, until `size` bytes are gone or none is left."""
        while self._texts and size > 0:
            size -= self._texts.pop().nbytes

    def draft(
        self,
        prefix: Sequence[int],
        size: int,
        steps: int,
        seed: int | None,
        temperature: float,
        states: HiddenStates | None = None,
    ) -> Draft:
        """Draft `size` tokens, or as many as a block has, after a non-empty `prefix` in at most
        `steps` passes.

        With a seed and a temperature above 0, tokens are drawn with the noise that a verifier of
        the same seed uses at these positions. States of another drafter are of no use, and left
        out; those of the last token too.
        """
        size = min(size, self._config.block_tokens)
        sampling = Sampling(temperature=temperature if seed is not None else 0.0, seed=seed or 0)
        counts = fills(size, steps)
        with self.meter.measure() as activations:
            past, first = self._follow(list(prefix), states)
            positions = mx.arange(first, first + size)
            tokens = [self._config.mask_token_id] * size
            sure, masked = [0.0] * size, list(range(size))
            for count in counts:
                ids = mx.array([[prefix[-1], *tokens[:-1]]], dtype=mx.int32)
                logits = self._network.block(ids, positions, past)[0] + self._never
                found, logs = self._selected(logits, sampling, len(prefix))
                for place in surest(logs, masked, count, LEAN):
                    tokens[place], sure[place] = found[place], logs[place]
                    masked.remove(place)
        return Draft(
            source=self._model_id,
            tokens=tuple(tokens),
            confidence=tuple(min(1.0, math.exp(log)) for log in sure),
            forward_passes=len(counts),
            diffusion_steps=len(counts),
            peak_activation_bytes=activations.peak_bytes,
        )

    def _selected(
        self, logits: mx.array, sampling: Sampling, position: int
    ) -> tuple[list[int], list[float]]:
        """A token for each row, and its log probability. Shape: logits [L, V]."""
        found = select(logits, sampling, position)
        logs = mx.take_along_axis(logits, found[:, None], axis=-1)[:, 0]
        logs = logs - mx.logsumexp(logits, axis=-1)
        mx.eval(found, logs)
        return cast("list[int]", found.tolist()), cast("list[float]", logs.tolist())

    def _follow(
        self, prefix: list[int], states: HiddenStates | None
    ) -> tuple[list[LayerKv] | None, int]:
        """Keys and values of all but the last token of a prefix, and the place of that one."""
        start = window_start(len(prefix) - 1, self._config.window_tokens)
        wanted = prefix[start:-1]
        text = self._nearest(start, wanted)
        text.follow(self._network, wanted, self._given(states, start, len(prefix) - 1))
        return text.kv, len(wanted)

    def _given(self, states: HiddenStates | None, start: int, end: int) -> GivenStates:
        """The states of a window, by their places in it."""
        width = self._config.hidden_size
        if states is None or (states.drafter, states.width) != (self._fingerprint, width):
            return GivenStates(0, None)
        within = states.between(start, end)
        if not within.data:
            return GivenStates(0, None)
        rows = mx.array(np.frombuffer(within.data, "<f2").reshape(-1, width))
        return GivenStates(within.first - start, rows.astype(self._never.dtype))

    def _nearest(self, start: int, wanted: list[int]) -> ContextKv:
        """Pick the text to continue, newest first in the list; forget the oldest at the cap."""
        scored = [
            (shared_head(text.tokens, wanted), text) for text in self._texts if text.start == start
        ]
        best, text = max(scored, key=lambda pair: pair[0], default=(0, None))
        if text is None or best < min(16, len(wanted)):
            text = ContextKv(start)
        else:
            self._texts.remove(text)
        self._texts = [text, *self._texts[: _KEPT_TEXTS - 1]]
        return text


class GivenStates(NamedTuple):
    """Projected states of the tokens from place `first` on; None = there are none.

    Shape: rows [tokens, hidden].
    """

    first: int
    rows: mx.array | None

    @property
    def end(self) -> int:
        """The place behind them."""
        return self.first if self.rows is None else self.first + int(self.rows.shape[0])

    def of(self, first: int, end: int) -> mx.array | None:
        """Those of these places, zero where there is none. Shape: [1, end - first, hidden]."""
        if self.rows is None or self.end <= first or self.first >= end:
            return None
        own = self.rows[max(0, first - self.first) : end - self.first]
        before = max(0, self.first - first)
        return mx.pad(own, [(before, end - first - before - own.shape[0]), (0, 0)])[None]


class ContextKv:
    """Keys and values of the context of one text, from its token `start` on.

    Tokens whose states came after them are computed again, with all that stands behind them.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.tokens: list[int] = []
        self.kv: list[LayerKv] | None = None
        self._stated = 0, 0
        """The places that were computed with states."""

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(part.nbytes for layer in self.kv or () for part in layer)

    def follow(self, network: BlockDiffusion, wanted: list[int], given: GivenStates) -> None:
        """Hold those of exactly the tokens `wanted`; what is held of them already is kept."""
        shared = min(shared_head(self.tokens, wanted), self._unstated(given))
        first, end = self._stated[0], min(self._stated[1], shared)
        if given.end > shared:
            is_one = first < end == shared >= given.first
            first, end = first if is_one else max(given.first, shared), given.end
        self._stated = first, max(first, end)
        past = None
        if self.kv is not None and shared:
            past = [(keys[:, :, :shared], values[:, :, :shared]) for keys, values in self.kv]
        self.tokens, self.kv = wanted[:shared], past
        rest = wanted[shared:]
        if not rest:
            return
        added = network.context(
            mx.array([rest], dtype=mx.int32), shared, past, given.of(shared, len(wanted))
        )
        kv = added
        if past is not None:
            kv = [
                (mx.concatenate([old[0], new[0]], axis=2), mx.concatenate([old[1], new[1]], axis=2))
                for old, new in zip(past, added, strict=True)
            ]
        mx.eval(kv)
        self.tokens, self.kv = wanted, kv

    def _unstated(self, given: GivenStates) -> int:
        """The first place that has a state only now."""
        if given.rows is None:
            return len(self.tokens)
        first, end = self._stated
        missing = end if first <= given.first < end else given.first
        return missing if missing < given.end else len(self.tokens)


def window_start(length: int, window: int) -> int:
    """Where the context of a text of `length` tokens begins: it is whole up to two windows, and
    then begins anew every window, with between one and two of them."""
    return 0 if length <= 2 * window else (length // window - 1) * window
