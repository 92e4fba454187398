"""The usual prompt look-up, as the baseline: scan backwards for the last occurrence of the suffix.

The longest n-gram counts first; the draft is what followed, up to the end of the text, or round
again from its beginning (`overlapped`).
"""

from __future__ import annotations

LONGEST = 4


def scan(text: list[int], size: int, *, overlapped: bool) -> list[int]:
    """Draft at most `size` tokens by looking everywhere."""
    end = len(text)
    for length in range(min(LONGEST, end - 1), 0, -1):
        suffix = text[end - length :]
        for at in range(end - length - 1, -1, -1):
            if text[at] == suffix[0] and text[at : at + length] == suffix:
                return _continuation(text, at + length, size, overlapped=overlapped)
    return []


class RecentLookup:
    """The same drafts without the scan, so that quality can be compared on long texts."""

    def __init__(self, *, overlapped: bool) -> None:
        self.text: list[int] = []
        self._overlapped = overlapped
        self._last: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        """Append to the text."""
        for token in tokens:
            end = len(self.text)
            for length in range(1, min(LONGEST, end) + 1):
                self._last[tuple(self.text[end - length :])] = end
            self.text.append(token)

    def draft(self, size: int) -> tuple[list[int], int]:
        """At most `size` tokens, and how long the match was."""
        end = len(self.text)
        for length in range(min(LONGEST, end), 0, -1):
            at = self._last.get(tuple(self.text[end - length :]))
            if at is not None:
                tokens = _continuation(self.text, at, size, overlapped=self._overlapped)
                return tokens, length
        return [], 0


def _continuation(text: list[int], at: int, size: int, *, overlapped: bool) -> list[int]:
    tokens = text[at : at + size]
    if overlapped and len(tokens) < size:
        tokens = (tokens * (size // len(tokens) + 1))[:size]
    return tokens
