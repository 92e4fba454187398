"""The edit of the logits of one position, and its reference in numpy.

An engine does the same in its framework, in float32, with the operations in this order: the same
edit of the same logits then gives the same bits wherever the row was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]
WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEdits:
    """Edits of the logits of n tokens, each named once.

    Shapes: all [n]. `factors` divide a positive logit and multiply another, after `biases` were
    added and before `penalties` are subtracted.
    """

    ids: Ids
    biases: Floats
    factors: Floats
    penalties: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdit:
    """The edit of one position. `allowed` has a bit for each token, the lowest first; None = all
    tokens are allowed. Shape: allowed [ceil(V / 32)]."""

    tokens: TokenEdits | None = None
    allowed: Words | None = None


def edited(logits: Floats, edit: LogitEdit) -> Floats:
    """The logits behind an edit. Shape: [V] -> [V]."""
    logits = logits.astype(np.float32)
    if edit.tokens is not None:
        values = logits[edit.tokens.ids] + edit.tokens.biases
        factors = edit.tokens.factors
        values = np.where(values > 0, values / factors, values * factors)
        logits[edit.tokens.ids] = values - edit.tokens.penalties
    if edit.allowed is not None:
        logits[~allowed_tokens(edit.allowed, len(logits))] = -np.inf
    return logits


def allowed_tokens(allowed: Words, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Whether each token is allowed. Shape: [V]."""
    bits = np.unpackbits(allowed.astype("<u4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(np.bool_)
