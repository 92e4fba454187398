"""Drafts for one text out of the text itself, as long as they may be of use.

Text that does not repeat still has its short matches, by chance: nearly each token occurred before,
once a text is long. To copy, price and judge a draft for each costs more than a draft can save. So
once a draft was not worth a row, matches of its length or shorter are passed over, until the first
token that one of them would have drafted comes true. A draft with a wrong first token yields
nothing, so a draft that is passed over is missed only where its first token would be right; the
match after such a token is offered again.

    match      longer than the one in vain    as long or shorter
    last came true       offered                   offered
    last did not         offered                   passed over

A token of a text that is passed over costs its place in the index and one comparison. Where
nothing has been offered for long, several tokens are indexed at once: with a batch of rows, the
work of Python for each single token is a hundredth of the step. The next span of such a text is
then drafted that much later.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.ids import NGRAM
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.ngram.ngram import NGramIndex

_QUIET_TOKENS = 16
"""After so many tokens without an offer, and without a passed-over match that came true, it looks
at fewer."""
LOOK_TOKENS = 8
"""It then looks at one token in so many."""


class NGramSource:
    """Drafts for one growing text; `has_offer` tells whether there is one. Not thread-safe."""

    __slots__ = ("_expected", "_index", "_match", "_quiet", "_vain", "_waiting", "has_offer")

    def __init__(self) -> None:
        self.has_offer = False
        self._index = NGramIndex()
        self._expected: int | None = None  # the first token that the current match would draft
        self._match = 0  # length of that match, 0 = there is none
        self._vain = 0  # matches up to this length are passed over
        self._waiting: list[int] = []  # the end of the text, not yet in the index
        self._quiet = 0  # tokens since it last offered something, or would have rightly

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text."""
        waiting = self._waiting
        waiting += tokens
        if self._quiet >= _QUIET_TOKENS and len(waiting) < LOOK_TOKENS:
            return
        if waiting and waiting[0] == self._expected:
            self._vain = self._quiet = 0
        index = self._index
        index.extend(waiting)
        self._quiet += len(waiting)
        waiting.clear()
        self._expected, self._match = index.next_token()
        self.has_offer = self._match > self._vain
        if self.has_offer:
            self._quiet = 0

    def draft(self, size: int) -> Draft | None:
        """At most `size` tokens that may follow; None where it has nothing to offer."""
        if size < 1 or not self.has_offer:
            return None
        tokens, match_length = self._index.draft(size)
        return Draft(source=NGRAM, tokens=tuple(tokens), match_length=match_length)

    def pass_over(self) -> None:
        """Note that its offer was not worth a row: pass over such matches until one comes true."""
        self._vain = max(self._vain, self._match)
        self.has_offer = False
