"""The pieces in which a history is prefilled, and how much KV of other pieces it may go on from.

A piece ends on the model's prefill grid, at each cut of the request, and with the prompt. KV has
the bits that would be computed here only up to a place at which a piece ended where it was computed
and ends here, with the same cuts before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable

from kakeya.engine.model import LoadedFacts


class Pieces:
    """Pieces of one prompt, of which `total` tokens are prefilled."""

    def __init__(self, facts: LoadedFacts, total: int, cuts: Iterable[int] = ()) -> None:
        self._facts = facts
        self.total = total
        self.cuts = tuple(sorted({cut for cut in cuts if 0 < cut < total}))

    def end(self, first: int) -> int:
        """The end of the piece that begins at a token."""
        chunk = self._facts.prefill_chunk_at(first)
        end = min(self.total, (first // chunk + 1) * chunk)
        following = bisect_right(self.cuts, first)
        return min(end, self.cuts[following]) if following < len(self.cuts) else end

    def is_end(self, place: int) -> bool:
        """Whether a piece ends there, on the grid or not."""
        return place == self.total or self.floor(place) == place

    def floor(self, place: int) -> int:
        """The last end of a piece at or in front of a place, not counting the prompt's own."""
        before = bisect_right(self.cuts, place)
        return max(grid_floor(self._facts, place), self.cuts[before - 1] if before else 0)

    def usable(self, tokens: int, *, ended: bool) -> int:
        """The count of the first `tokens` that a prompt may go on from, if they have its own cuts.

        `ended`: a piece ended behind them where they were computed.
        """
        if (ended and self.is_end(tokens)) or grid_floor(self._facts, tokens) == tokens:
            return tokens
        return self.floor(tokens - 1)

    def agreed(self, cuts: Collection[int], tokens: int) -> int:
        """As `usable`, for tokens computed with these cuts: up to the first that is not shared."""
        parting = min(set(self.cuts).symmetric_difference(cuts), default=tokens)
        place = min(tokens, parting)
        return self.usable(place, ended=place in cuts)


def grid_floor(facts: LoadedFacts, tokens: int) -> int:
    """The last boundary of the prefill grid at or in front of a position.

    Every position is one where bits do not depend on the pieces.
    """
    if not facts.prefill_grid:
        return tokens
    block = tokens - tokens % facts.kv_block_tokens
    # Pieces get only shorter behind a longer context, each a divisor of those before.
    return tokens - tokens % facts.prefill_chunk_at(block)
