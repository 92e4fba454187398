"""Sampling with noise that belongs to the position: the same seed selects the same tokens.

    token at position t  =  argmax over kept v of  logits[t, v] / T + gumbel(seed, t)[v]

Adding Gumbel noise and taking the maximum draws exactly from softmax(logits / T). The noise of a
position depends on (seed, position) alone, so it does not matter whether a row was computed by
itself, in a block with drafts, in a batch, or by another engine after a failover. A drafter that
knows the seed can use the same noise and will agree more often.

This is the reference, in numpy: an engine does the same in its framework, from `noise_key`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kakeya.generation.request import Sampling

Floats = npt.NDArray[np.float32]
_WORD = (1 << 64) - 1


def noise_key(seed: int, position: int) -> int:
    """A 64-bit key for the noise of one position; equal inputs, equal key, on every machine.

    Both words go through a full avalanche, so neighbouring seeds and positions share nothing.
    """
    return _avalanche(_avalanche(seed & _WORD) ^ (position & _WORD) * 0x9E3779B97F4A7C15)


def gumbel(seed: int, position: int, size: int) -> Floats:
    """The reference noise of one position. Shape: [size] f32."""
    draws = np.random.Generator(np.random.Philox(key=noise_key(seed, position)))
    return draws.gumbel(size=size).astype(np.float32)


def select(logits: Floats, sampling: Sampling, noise: Floats) -> int:
    """Select one token. Shapes: logits [V], noise [V]; the noise is not looked at when greedy.

    Top-k counts first, then top-p of the rest; tokens as likely as the last kept one stay.
    Min-p looks at the most likely token only. Equal scores select the lowest id.
    """
    if sampling.is_greedy:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float32) / np.float32(sampling.temperature)
    return int(np.argmax(_kept(scaled, sampling) + noise))


def probabilities(logits: Floats, sampling: Sampling) -> Floats:
    """The distribution that `select` draws from, for a temperature above 0. Shape: [V]."""
    scaled = logits.astype(np.float32) / np.float32(sampling.temperature)
    return _softmax(_kept(scaled, sampling))


def _kept(scaled: Floats, sampling: Sampling) -> Floats:
    """Replace the scores that top-k, top-p and min-p drop by minus infinity."""
    if 0 < sampling.top_k < len(scaled):
        scaled = np.where(scaled < np.sort(scaled)[-sampling.top_k], -np.inf, scaled)
    if sampling.top_p < 1.0:
        descending = np.sort(scaled)[::-1]
        before = np.concatenate(([0.0], np.cumsum(_softmax(descending))[:-1]))
        # The most likely token always stays; another one while the mass before it is below top_p.
        last = descending[max(1, int((before < sampling.top_p).sum())) - 1]
        scaled = np.where(scaled < last, -np.inf, scaled)
    if sampling.min_p > 0.0:
        scaled = np.where(scaled < np.max(scaled) + math.log(sampling.min_p), -np.inf, scaled)
    return scaled.astype(np.float32)


def _softmax(values: Floats) -> Floats:
    raised = np.exp(values - np.max(values))
    shares: Floats = (raised / raised.sum()).astype(np.float32)
    return shares


def _avalanche(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
