"""How long an answer will be: its bound is known, and the lengths of past answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

UNENDED = 1 << 62
"""The length of an answer that was cut off by its bound: longer than any."""


def answer_tokens_left(made: int, most: int, past: Sequence[int], quantile: float) -> int:
    """Estimate the tokens that an answer still gets, of which it has `made` and may have `most`.

    `past` are lengths of answers; of those that were longer, the one at `quantile` (0 <= q < 1)
    counts.
    """
    longer = sorted(min(length, most) for length in past if length > made)
    expected = longer[int(quantile * len(longer))] if longer else most
    return max(0, expected - made)
