"""How long an answer will be: its bound is known, and the lengths of past answers. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

_KEPT = 128
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


class AnswerLengths:
    """Lengths of the last answers of one model, in tokens.

    Of an answer that was cut off by its bound it is only known that it would have been longer: it
    counts among those that may end as far as it came, as Kaplan and Meier estimate it.
    """

    def __init__(self) -> None:
        self._past: deque[tuple[int, bool]] = deque(maxlen=_KEPT)
        self._ends: list[int] = []
        self._shares = [1.0]

    def add(self, tokens: int, *, is_whole: bool) -> None:
        """Note an answer; it is whole if it was not cut off."""
        self._past.append((tokens, not is_whole))
        self._ends, self._shares = [], [1.0]
        for number, (length, is_cut) in enumerate(sorted(self._past)):
            if not is_cut:
                self._ends.append(length)
                self._shares.append(self._shares[-1] * (1 - 1 / (len(self._past) - number)))

    def share_longer(self, tokens: float) -> float:
        """The share of answers that have more tokens, 0..1."""
        return self._shares[bisect_right(self._ends, tokens)]

    def goes_on(self, made: int, most: int, tokens: float) -> float:
        """The probability that an answer that has `made` tokens and may have `most` gets more than
        so many more."""
        if made + tokens >= most:
            return 0.0
        so_far = self.share_longer(made)
        return self.share_longer(made + tokens) / so_far if so_far else 1.0
