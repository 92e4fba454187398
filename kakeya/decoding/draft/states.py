"""Hidden states of a verifier, as they travel to a drafter: projected, a row for each token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kakeya.core.errors import InvalidArgument

VALUE_BYTES = 2
"""Of a float16."""
MOST_WIDTH = 16_384
MOST_BYTES = 4 << 20
"""Kept of one text: drafters read the end of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Those of the tokens `first` to `end` of a text, without a gap.

    `drafter` names the weights of the drafter that they were projected for; `data` has `width`
    float16 values for each token, little-endian.
    """

    drafter: str
    first: int
    width: int
    data: bytes

    @property
    def end(self) -> int:
        """The first token behind them."""
        return self.first + len(self.data) // (self.width * VALUE_BYTES)

    def check(self, tokens: int) -> None:
        """Raise InvalidArgument where they are no rows of a text with so many tokens."""
        if not 1 <= self.width <= MOST_WIDTH:
            raise InvalidArgument(
                f"hidden states have {self.width} values, they have 1 to {MOST_WIDTH}",
                param="width",
            )
        if len(self.data) % (self.width * VALUE_BYTES):
            raise InvalidArgument(
                f"hidden states of {self.width} values have {len(self.data)} bytes, that is no "
                f"multiple of {self.width * VALUE_BYTES}",
                param="data_f16",
            )
        if self.first < 0 or self.end > tokens:
            raise InvalidArgument(
                f"hidden states are of the tokens {self.first} to {self.end}, "
                f"and the text has {tokens}",
                param="first",
            )

    def between(self, first: int, end: int) -> HiddenStates:
        """Those of them that belong to the tokens `first` to `end`."""
        first = min(max(first, self.first), self.end)
        end = max(min(end, self.end), first)
        row = self.width * VALUE_BYTES
        data = self.data[(first - self.first) * row : (end - self.first) * row]
        return replace(self, first=first, data=data)

    def followed_by(self, more: HiddenStates) -> HiddenStates:
        """These, and `more` from its first token on; behind a gap, or of another kind, only `more`.

        Of more than MOST_BYTES, the last ones.
        """
        is_of_kind = (self.drafter, self.width) == (more.drafter, more.width)
        if is_of_kind and self.first <= more.first <= self.end:
            more = replace(self, data=self.between(0, more.first).data + more.data)
        most = MOST_BYTES // (more.width * VALUE_BYTES)
        return more.between(more.end - most, more.end)
