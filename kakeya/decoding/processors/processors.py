"""The processors of one sequence together: one edit for each position."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.processors.edits import LogitEdit, TokenEdits, Words
from kakeya.decoding.processors.grammar import GrammarMatcher
from kakeya.decoding.processors.penalties import Penalties, has_penalties
from kakeya.generation.request import DecodeRequest


class LogitProcessors:
    """Edits the positions behind a sequence, which the caller extends as tokens are committed.

    `is_constant` says that every position has the same edit: its step may then be launched before
    the token in front of it is known.
    """

    __slots__ = ("_grammar", "_penalties", "is_constant")

    def __init__(self, penalties: Penalties | None, grammar: GrammarMatcher | None) -> None:
        self._penalties = penalties
        self._grammar = grammar
        self.is_constant = grammar is None and (penalties is None or penalties.is_constant)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that joined the answer. Raises InvalidArgument for one that the grammar does
        not have there."""
        if self._penalties is not None:
            self._penalties.extend(tokens)
        if self._grammar is not None:
            self._grammar.extend(tokens)

    def edits(self, ahead: Sequence[int] = ()) -> list[LogitEdit]:
        """The edit of the next position, and of that behind each token of `ahead`."""
        none = [None] * (1 + len(ahead))
        tokens: Sequence[TokenEdits | None] = none
        masks: Sequence[Words | None] = none
        if self._penalties is not None:
            tokens = self._penalties.edits(ahead)
        if self._grammar is not None:
            masks = self._grammar.masks(ahead)
        return [
            LogitEdit(tokens=each, allowed=mask) for each, mask in zip(tokens, masks, strict=True)
        ]


def processors_of(
    request: DecodeRequest, grammar: GrammarMatcher | None = None
) -> LogitProcessors | None:
    """The processors that a request asks for; None = logits stay as they are.

    The answer so far is counted, and followed by the matcher, which is a new one. Raises
    InvalidArgument where it does not follow the grammar, or has ended.
    """
    sampling, history = request.sampling, request.token_ids
    prompt_tokens = request.prompt_tokens or len(history)
    penalties = None
    if sampling.logit_bias or has_penalties(sampling):
        penalties = Penalties(sampling, history[:prompt_tokens])
    if penalties is None and grammar is None:
        return None
    processors = LogitProcessors(penalties, grammar)
    processors.extend(history[prompt_tokens:])
    if grammar is not None and grammar.is_over:
        raise InvalidArgument("the answer so far has ended, as its grammar says")
    return processors
