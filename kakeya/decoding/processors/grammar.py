"""Grammars by llguidance: which tokens may follow, and which one must.

A matcher follows one answer. It is made on a thread of its own, since a large grammar takes as long
as many steps, and is used on the model thread from then on. All bounds of its work are counts, not
times: the same grammar is refused on every machine, and at the same token.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from kakeya.core.errors import InvalidArgument, InvariantBroken, Unsupported
from kakeya.decoding.processors.edits import Words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR = "grammar"
"""The draft source of tokens that a grammar forces."""
MOST_CHARS = 256 << 10
"""Of a grammar's text: an enum of 9,000 values."""
_MOST_KEYS = 1_000
"""Of one JSON object in it: compilation takes time by their square, 0.1 s of a slow core for so
many properties, and looks at its other bounds only afterwards."""
_MOST_PATTERNS = 80
"""Of one patternProperties: by their cube, 0.05 s of the same core."""
_MOST_SYMBOLS = 20_000
_MOST_ITEMS = 5_000
"""Of the parser in one mask: about 40 ms of the same core."""
_COMPILERS = 2


class GrammarMatcher:
    """Follows one answer, which the caller extends; not thread-safe.

    `end_ids` are the tokens that end an answer. Raises InvalidArgument from every method where the
    grammar asks for more work than its bounds allow.
    """

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int]) -> None:
        self.end_ids = end_ids
        self.is_over = False
        """Whether the answer has ended; any token may follow then, since none is of use."""
        self._matcher = matcher
        self._forced: tuple[int, ...] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens of the answer. Raises InvalidArgument for one that may not follow."""
        self._forced = None
        for token in tokens:
            if token in self.end_ids:
                self.is_over = True
            if not self.is_over and not self._takes(token):
                raise InvalidArgument(f"the grammar has no token {token} at this place")

    def masks(self, ahead: Sequence[int] = ()) -> list[Words | None]:
        """The tokens that may come next, and behind each token of `ahead`; None = any.

        Behind a token that ends the answer, or that may not follow, any token may: no such row is
        ever committed.
        """
        made: list[Words | None] = [None if self.is_over else self._mask()]
        taken = 0
        for token in () if self.is_over else ahead:
            if token in self.end_ids or not self._takes(token):
                break
            taken += 1
            made.append(self._mask())
        if taken and not self._matcher.rollback(taken):
            raise InvariantBroken("grammar", f"{taken} tokens could not be taken back")
        return made + [None] * (1 + len(ahead) - len(made))

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many leading tokens may follow; none behind the end of the answer."""
        if self.is_over or not tokens:
            return 0
        if tokens[0] in self.end_ids:
            return int(self._matcher.is_accepting())
        end = next((at for at, token in enumerate(tokens) if token in self.end_ids), len(tokens))
        return self._matcher.validate_tokens(list(tokens[: end + 1]))

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next, as far as there is no choice: each is then the only one
        of its mask."""
        if self._forced is None:
            self._forced = () if self.is_over else tuple(self._matcher.compute_ff_tokens())
        return self._forced

    def _takes(self, token: int) -> bool:
        taken = self._matcher.try_consume_tokens([token])
        self._check()
        return taken == 1

    def _mask(self) -> Words:
        mask = self._matcher.compute_bitmask()
        self._check()
        return np.frombuffer(mask, np.uint32)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher)


class Grammars:
    """Makes matchers for one model; thread-safe.

    The first one builds the tokenizer, which takes seconds for a large vocabulary.
    """

    def __init__(
        self, tokenizer_json: Path, *, vocab_size: int, end_ids: tuple[int, ...], model_id: str
    ) -> None:
        self._file = tokenizer_json
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._model_id = model_id
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")

    def begin(self, grammar: str) -> Future[GrammarMatcher]:
        """Begin to make a matcher on another thread; see `matcher`."""
        return self._compilers.submit(self.matcher, grammar)

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher for a new answer.

        Raises InvalidArgument for a grammar that is wrong or too large, Unsupported where the model
        cannot follow any.
        """
        if len(grammar) > MOST_CHARS:
            raise InvalidArgument(
                f"the grammar has {len(grammar):,} characters, more than {MOST_CHARS:,}"
            )
        _check_widths(grammar)
        tokenizer = self._built()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_grammar_size=_MOST_SYMBOLS, step_max_items=_MOST_ITEMS, verbose_errors=False
        )
        made = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if made.is_error():
            raise _refusal(made)
        matcher = GrammarMatcher(made, frozenset(self._end_ids))
        # The first masks take longest, and tell whether the grammar begins within its bounds.
        matcher.masks(matcher.forced())
        return matcher

    def _built(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build()
            return self._tokenizer

    def _build(self) -> LLTokenizer:
        if not self._end_ids:
            raise Unsupported(
                f"{self._model_id} has no token that ends an answer, so it can follow no grammar"
            )
        # Here: it takes a second and 10 MB, for what few engines are asked for.
        from llguidance import LLTokenizer

        try:
            text = self._file.read_text("utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._end_ids))
        except (OSError, ValueError) as problem:
            raise Unsupported(
                f"{self._model_id} can follow no grammar: {self._file} has no tokenizer that "
                f"llguidance reads ({problem})"
            ) from None


def _check_widths(grammar: str) -> None:
    """Raise InvalidArgument for schemas with objects that are too wide; whatever is no JSON is left
    to the compiler."""
    decoder = json.JSONDecoder(object_pairs_hook=_checked_width)
    starts = [match.end() for match in re.finditer(r"%json\s*|\A\s*(?=\{)", grammar)]
    for start in starts:
        with contextlib.suppress(ValueError, RecursionError):  # it refuses deep ones too
            decoder.raw_decode(grammar, start)


class _Width(int):
    """The number of keys of an object: what is left of it, and no number of the grammar's."""


def _checked_width(pairs: list[tuple[str, object]]) -> _Width:
    _check_width("an object", len(pairs), _MOST_KEYS)
    for key, value in pairs:
        if key == "patternProperties" and isinstance(value, _Width):
            _check_width(key, value, _MOST_PATTERNS)
        if isinstance(value, str) and "%json" in value:
            _check_widths(value)
    return _Width(len(pairs))


def _check_width(what: str, keys: int, most: int) -> None:
    if keys > most:
        raise InvalidArgument(
            f"{what} of the grammar has {keys:,} keys, more than {most:,}", param="grammar"
        )


def _refusal(matcher: LLMatcher) -> InvalidArgument:
    reason = matcher.get_error().partition("<non-verbose")[0].strip()
    return InvalidArgument(f"the grammar cannot be followed: {reason}", param="grammar")
