"""Stop strings: an answer ends where one completes in its text, wherever frames were cut.

A stop string may be a special token, or contain one, though the text of these is never shown: such
a token stands in the matched text as one character that no text holds. A model that spells the
token in plain text is stopped too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

_SURROGATES = 0xD800
_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


class StopMatcher:
    """Ends a text at the first stop string that completes in it, and shows nothing of that string.

    Theory: one Knuth-Morris-Pratt automaton per stop string, fed character by character. Its state
    is the length of the longest suffix of the text that begins the string; the greatest state is
    how much must be held back. If two complete at the same character, the longer one cuts. So the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], special: Mapping[str, int] = _NO_TOKENS) -> None:
        """`special` has the id of each special token by its text."""
        self._signs: dict[int, str] = {}
        signed = [self._signed(stop, special) for stop in stops]
        self._spelled = dict(zip(signed, stops, strict=True))
        self._stops = tuple(dict.fromkeys((*stops, *signed)))
        self.token_ids = frozenset(
            token_id for token_id, sign in self._signs.items() if sign in self._stops
        )
        """The special tokens that are a stop string, alone."""
        self._hidden = dict.fromkeys(map(ord, self._signs.values()))
        self._fallbacks = [_prefix_lengths(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self._first = re.compile("[" + re.escape("".join({stop[0] for stop in self._stops})) + "]")
        self.matched = ""
        """The stop string that completed."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string completed."""
        return bool(self.matched)

    def sign(self, token_id: int) -> str:
        """The text to feed for a token whose own is not shown, "" for a token that stops nothing.

        It follows the text of the tokens before.
        """
        return self._signs.get(token_id, "")

    def feed(self, piece: str) -> str:
        """Add text; returns the text that may be shown; after a stop, nothing more."""
        return "" if self.is_stopped else self._feed(piece).translate(self._hidden)

    def _feed(self, piece: str) -> str:
        if not self._held and self._first.search(piece) is None:
            return piece
        text = self._held + piece
        for end in range(len(self._held), len(text)):
            matched = self._step(text[end])
            if matched:
                found = text[end + 1 - matched : end + 1]
                self.matched = self._spelled.get(found, found)
                self._held = ""
                return text[: end + 1 - matched]
        keep = max(self._states)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """End the text; returns the part that was held back."""
        rest, self._held = self._held, ""
        return rest.translate(self._hidden)

    def _signed(self, stop: str, special: Mapping[str, int]) -> str:
        """A stop string with a lone surrogate, which no text holds, for each special token."""
        found = sorted((text for text in special if text in stop), key=len, reverse=True)
        if not found:
            return stop

        def sign(hit: re.Match[str]) -> str:
            return self._signs.setdefault(special[hit[0]], chr(_SURROGATES + len(self._signs)))

        return re.sub("|".join(map(re.escape, found)), sign, stop)

    def _step(self, character: str) -> int:
        """Advance every automaton; returns the length of the longest string that completed."""
        matched = 0
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = self._fallbacks[index][state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                matched = max(matched, state)
                state = 0
            self._states[index] = state
        return matched


def _prefix_lengths(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that also ends it."""
    lengths = [0]
    state = 0
    for character in stop[1:]:
        while state and stop[state] != character:
            state = lengths[state - 1]
        state += stop[state] == character
        lengths.append(state)
    return lengths
