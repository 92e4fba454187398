"""Scores drafts that were not verified against the tokens that came instead.

A draft made after `history[:base]` is held until the history contradicts it or has grown past its
end; then the controller learns from it, for the price of a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kakeya.decoding.draft.proposer import Draft

HELD = 4
"""Drafts held at a time; beyond so many, further ones teach little."""


class Judge(Protocol):
    """Learns from drafts that were scored; DraftController is one."""

    def observe_shadow(self, draft: Draft, actual: Sequence[int]) -> None:
        """Learn that the tokens `actual` came where the draft begins."""
        ...


class ShadowScorer:
    """Unverified drafts of one generation, until the history has judged them."""

    __slots__ = ("_held", "_judge")

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._held: list[tuple[int, Draft]] = []

    def hold(self, draft: Draft, base: int) -> None:
        """Keep a draft of the tokens behind the first `base` of the history."""
        if draft.tokens and len(self._held) < HELD:
            self._held.append((base, draft))

    def settle(self, history: Sequence[int]) -> None:
        """Judge every held draft that the history decides by now."""
        if self._held:
            self._held = [entry for entry in self._held if not self._judged(history, *entry)]

    def close(self, history: Sequence[int]) -> None:
        """Judge the rest by the history as it is: the generation is over."""
        self.settle(history)
        for base, draft in self._held:
            if len(history) > base:
                self._judge.observe_shadow(draft, history[base:])
        self._held.clear()

    def _judged(self, history: Sequence[int], base: int, draft: Draft) -> bool:
        came = history[base : base + len(draft.tokens)]
        known = len(came)
        if known == 0 or (known < len(draft.tokens) and draft.tokens[:known] == tuple(came)):
            return False
        self._judge.observe_shadow(draft, came)
        return True
