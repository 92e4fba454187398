"""Text to token ids; parts that were encoded before are not encoded again.

Agents send the same system prompt, and a conversation that only grows, with each request. A
tokenizer looks for its added tokens first and encodes the text between two of them by itself, so
the ids of a prompt are those of its parts, each beginning with a special token, put together. Parts
are kept by their text, the last used ones, so a turn costs only its new parts.

This does not hold where an added token takes spaces around it, or stands only between words, and
not for BPE with dropout, which encodes a text otherwise each time: nothing is cut, or kept, then.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

KEPT_CHARS = 4 * 1024 * 1024
"""Characters of all kept parts; their ids take about as many bytes."""
_MOST_ADDED = 512
"""With more added tokens, looking for them takes longer than it saves."""


class Encoder:
    """The encoding side of one tokenizer; for any number of threads.

    `spec` is the tokenizer as its tokenizer.json says it.
    """

    def __init__(
        self, tokenizer: Tokenizer, spec: Mapping[str, Any], kept_chars: int = KEPT_CHARS
    ) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            token["content"] for token in spec["added_tokens"] if token["special"]
        )
        self._cuts = _cuts(spec["added_tokens"])
        self._left_chars = 0 if spec["model"].get("dropout") else kept_chars
        self._most_chars = self._left_chars // 4
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens in it are special, and none is put around it."""
        ids: list[int] = []
        for part in self._parts(text):
            ids.extend(self._part(part))
        return ids

    def _parts(self, text: str) -> Iterator[str]:
        """Cut in front of each special token."""
        start = 0
        if self._cuts is not None:
            for found in self._cuts.finditer(text):
                if found.start() > start and found[0] in self._special:
                    yield text[start : found.start()]
                    start = found.start()
        if start < len(text):
            yield text[start:]

    def _part(self, text: str) -> Sequence[int]:
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
                return kept
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = array("I", encoding.ids)
        if len(text) <= self._most_chars:
            self._keep(text, ids)
        return ids

    def _keep(self, text: str, ids: array[int]) -> None:
        with self._lock:
            if text not in self._kept:
                self._kept[text] = ids
                self._left_chars -= len(text)
            while self._left_chars < 0:
                oldest, _ = self._kept.popitem(last=False)
                self._left_chars += len(oldest)


def _cuts(added: Sequence[Mapping[str, Any]]) -> re.Pattern[str] | None:
    """Finds added tokens as the tokenizer does: the first one, of several there the longest.

    None where a text is not to be cut.
    """
    # Others are looked for later, in the text that is left between these.
    found = sorted(
        (token for token in added if not token["normalized"]),
        key=lambda token: -len(token["content"]),
    )
    is_strange = any(
        token["lstrip"] or token["rstrip"] or token["single_word"] or not token["content"]
        for token in found
    )
    if is_strange or len(found) > _MOST_ADDED or not any(token["special"] for token in found):
        return None
    # No groups: a common beginning of all is then looked for at once.
    return re.compile("|".join(re.escape(token["content"]) for token in found))
