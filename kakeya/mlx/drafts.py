"""A model as a proposer: short continuations of a prefix, with the KV of recent prefixes kept.

All tokens of a draft are chained lazily and evaluated once, so a draft costs one wait however
long it is. Prefixes of one stream grow, so the KV that shares the longest head with the new
prefix is reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from kakeya.decoding.draft.proposer import Draft
from kakeya.generation.request import Sampling
from kakeya.mlx.device import PeakMeter
from kakeya.mlx.kept_prefix import KeptPrefix, shared_head
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.selection import select

_KEPT_PREFIXES = 8
"""Streams that a drafter follows at once; each costs its prefix's KV."""


class Drafter:
    """Drafts with one model; belongs to the model thread."""

    def __init__(self, model: LoadedModel, prefill_chunk_tokens: int) -> None:
        self._model = model
        self._chunk = prefill_chunk_tokens
        self._streams: list[KeptPrefix] = []
        self.meter = PeakMeter()

    @property
    def held_bytes(self) -> int:
        """KV of all prefixes."""
        return sum(stream.state.nbytes for stream in self._streams)

    def shed(self, size: int) -> None:
        """Forget prefixes, oldest first, until `size` bytes of KV are gone or none is left."""
        while self._streams and size > 0:
            size -= self._streams.pop().state.nbytes

    def draft(
        self, prefix: Sequence[int], size: int, seed: int | None, temperature: float
    ) -> Draft:
        """Draft `size` tokens after a non-empty `prefix`.

        With a seed and a temperature above 0, tokens are drawn with the noise that a verifier of
        the same seed uses at these positions, which makes agreement likelier.
        """
        with self.meter.measure() as activations:
            tokens, confidence = self._continued(prefix, size, seed, temperature)
        return Draft(
            source=self._model.model_id,
            tokens=tuple(tokens),
            confidence=tuple(confidence),
            forward_passes=size,
            peak_activation_bytes=activations.peak_bytes,
        )

    def _continued(
        self, prefix: Sequence[int], size: int, seed: int | None, temperature: float
    ) -> tuple[list[int], list[float]]:
        stream = self._nearest(list(prefix))
        stream.follow(prefix)
        state = stream.state
        sampling = Sampling(temperature=temperature if seed is not None else 0.0, seed=seed or 0)
        position = len(prefix)
        row = mx.array([prefix[-1]], dtype=mx.int32)
        rows: list[mx.array] = []
        sure: list[mx.array] = []
        for step in range(size):
            logits = state.step(row)
            row = select(logits, sampling, first_position=position + step)
            rows.append(row)
            probability = mx.softmax(logits.astype(mx.float32), axis=-1)
            sure.append(mx.take_along_axis(probability, row[:, None], axis=-1)[:, 0])
        joined, confidence = mx.concatenate(rows), mx.concatenate(sure)
        mx.eval(joined, confidence)
        tokens = cast("list[int]", joined.tolist())
        # The last drafted token was never fed, so its KV does not exist.
        stream.tokens = [*prefix, *tokens[:-1]]
        return tokens, cast("list[float]", confidence.tolist())

    def _nearest(self, wanted: list[int]) -> KeptPrefix:
        """Pick the stream to continue, newest first in the list; forget the oldest at the cap."""
        scored = [(shared_head(stream.tokens, wanted), stream) for stream in self._streams]
        best, stream = max(scored, key=lambda pair: pair[0], default=(0, None))
        if stream is None or best < min(16, len(wanted) - 1):
            stream = KeptPrefix(self._model, self._chunk)
        else:
            self._streams.remove(stream)
        self._streams = [stream, *self._streams[: _KEPT_PREFIXES - 1]]
        return stream
