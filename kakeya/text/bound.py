"""The least number of tokens that a text can have, told from its length.

Theory: where a tokenizer loses no byte, the bytes of a text are shared out over its tokens, so it
has at least (its bytes / the bytes of the longest token) of them. Where bytes may be lost (a
normalizer that rewrites, an added token that swallows the spaces around it, an unknown token)
nothing is promised: `least_tokens` is 0 then, and the text has to be tokenized to be counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kakeya.core.errors import InvalidArgument
from kakeya.text.detokenizer import BYTE_OF

_NFC_SHRINKS = 4
"""No composing turns more bytes than this into one; it comes to 3.5 for an iota with two marks."""
_LOSSLESS_STEPS = frozenset({"ByteLevel", "Digits", "Split"})


class TooManyTokens(InvalidArgument):
    """A prompt that cannot fit; it has at least `least_tokens`."""

    def __init__(self, least_tokens: int, at_most: int) -> None:
        super().__init__(
            f"the prompt has at least {least_tokens} tokens; it may have {at_most}", param="prompt"
        )
        self.least_tokens = least_tokens


class PromptBound:
    """Refuses, before any work, a prompt that a tokenizer cannot make short enough.

    `spec` is the content of tokenizer.json.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._longest_bytes = 0
        self._shrinks = _shrinks(spec["normalizer"])
        added: Sequence[Mapping[str, Any]] = spec["added_tokens"]
        swallows = any(token["lstrip"] or token["rstrip"] for token in added)
        if not self._shrinks or swallows or not _keeps_bytes(spec["pre_tokenizer"], spec["model"]):
            return
        plain = max(map(len, spec["model"]["vocab"]))  # one character each stands for one byte
        special = max((len(token["content"].encode()) for token in added), default=0)
        self._longest_bytes = max(plain, special)

    def least_tokens(self, pieces: Sequence[str]) -> int:
        """The least tokens that any encoding of these pieces has; 0 = unknown."""
        if not self._longest_bytes:
            return 0
        return -(-sum(map(self._least_bytes, pieces)) // self._longest_bytes)

    def check(self, pieces: Sequence[str], at_most: int) -> None:
        """Raise TooManyTokens when the pieces cannot have `at_most` tokens or fewer."""
        least = self.least_tokens(pieces)
        if least > at_most:
            raise TooManyTokens(least, at_most)

    def _least_bytes(self, piece: str) -> int:
        """The least bytes that the normalizer leaves of a piece; it leaves ASCII as it is."""
        return len(piece) if piece.isascii() else len(piece.encode()) // self._shrinks


def _shrinks(normalizer: Mapping[str, Any] | None) -> int:
    """The most bytes that become one; 0 = unknown."""
    if normalizer is None:
        return 1
    return _NFC_SHRINKS if normalizer["type"] == "NFC" else 0


def _keeps_bytes(before: Mapping[str, Any] | None, model: Mapping[str, Any]) -> bool:
    """Whether every byte of a text ends up in a token, as one character of it."""
    if before is None or model["type"] != "BPE" or not BYTE_OF.keys() <= model["vocab"].keys():
        return False
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    return any(step["type"] == "ByteLevel" for step in steps) and all(
        step["type"] in _LOSSLESS_STEPS and step.get("behavior") != "Removed" for step in steps
    )
