"""Prompt lookup: the tokens behind the last occurrence of the current suffix may follow again.

`NGramIndex` maps the hash of every n-gram of a growing text, for a few lengths n, to the position
after its most recent occurrence. Appending a token writes one entry per n; drafting reads one each,
shortest first, as far as they occurred: both O(1), whatever the length of the text.

    text       ... x y z A B C D E ... x y z |
    suffix                             x y z      longest n-gram seen before
    draft                A B C D E                the tokens that followed it

Where the match is so recent that its continuation runs into the end of the text, the draft goes
round (overlapped copy): a text of period 3 drafts as many tokens as are asked for.

A hash collision would draft nonsense, and nonsense costs a step, never a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kakeya.core.errors import InvalidArgument
from kakeya.core.ids import NGRAM
from kakeya.decoding.draft.proposer import BlockProposal, Draft, ProposerStats

LENGTHS = (8, 5, 3, 2, 1)
"""Which n-grams are indexed. Gaps halve the cost of a token and change hardly any match."""

ROLLBACK = 96
"""Tokens at the end of a text that a proposer's index can take back without being built anew."""

KEPT_TOKENS = 256 * 1024
"""Tokens of all texts that a proposer keeps indices of; a token takes 0.5 kB without repetition."""

_CONFIDENCE = ((17, 0.9), (9, 0.8), (5, 0.6), (3, 0.4), (2, 0.2), (1, 0.1))
"""Confidence by least match length: a rank for the receiver to calibrate, no probability."""


class NGramIndex:
    """The n-grams of one growing text; its last `undo` tokens can be taken back.

    Not thread-safe.
    """

    __slots__ = (
        "_journal",
        "_keys",
        "_lengths",
        "_match",
        "_match_at",
        "_match_end",
        "_seen",
        "_tail",
        "_widest",
        "tokens",
    )

    def __init__(self, max_n: int = 8, min_n: int = 1, *, undo: int = 0) -> None:
        if not 1 <= min_n <= max_n:
            raise InvalidArgument(
                f"n-gram lengths {min_n}..{max_n}: min_n must be at least 1 and at most max_n"
            )
        between = {n for n in LENGTHS if min_n <= n <= max_n}
        self._lengths = tuple(sorted(between | {min_n, max_n}))
        self._widest = max_n
        self.tokens: list[int] = []
        self._tail: tuple[int, ...] = ()
        self._keys: list[int] = []  # of the n-grams that end the text, not yet in `_seen`
        self._seen: dict[int, int] = {}
        # Per token, newest last: the keys that it set, and their values before.
        self._journal: deque[list[tuple[int, int | None]]] = deque(maxlen=undo)
        self._match = 0
        self._match_at = 0
        self._match_end = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text."""
        text, seen, lengths, widest = self.tokens, self._seen, self._lengths, self._widest
        tail, keys = self._tail, self._keys
        journal = self._journal if self._journal.maxlen else None
        for token in tokens:
            at = len(text)
            if journal is not None:
                journal.append([(key, seen.get(key)) for key in keys])
            for key in keys:
                seen[key] = at
            text.append(token)
            tail = (*tail, token)[-widest:]
            keys = [hash(tail[-n:]) for n in lengths if n <= len(tail)]
        self._tail, self._keys = tail, keys

    @property
    def undoable(self) -> int:
        """How many tokens at the end can be taken back now: `undo` at most, and none twice."""
        return len(self._journal)

    def truncate(self, length: int) -> None:
        """Take the end of the text back, at most `undoable` tokens."""
        for _ in range(len(self.tokens) - length):
            for key, before in self._journal.pop():
                if before is None:
                    self._seen.pop(key, None)
                else:
                    self._seen[key] = before
        del self.tokens[length:]
        self._tail = tuple(self.tokens[-self._widest :])
        self._keys = [hash(self._tail[-n:]) for n in self._lengths if n <= len(self._tail)]
        self._match = 0

    def next_token(self) -> tuple[int | None, int]:
        """The first token of a draft, and the length of the matching n-gram; None, 0 = no draft."""
        at, length = self._latest()
        return (self.tokens[at], length) if length else (None, 0)

    def draft(self, size: int) -> tuple[list[int], int]:
        """A draft of `size` tokens or none, and how many tokens of suffix matched."""
        at, length = self._latest()
        tokens = self.tokens[at : at + max(size, 0)] if length else []
        if not tokens:
            return [], 0
        if len(tokens) < size:
            tokens = (tokens * (size // len(tokens) + 1))[:size]
        return tokens, self._matched(at, length)

    def _latest(self) -> tuple[int, int]:
        """The place behind the last occurrence of the longest known suffix, and its length or 0."""
        seen = self._seen
        at = length = 0
        for key, n in zip(self._keys, self._lengths, strict=False):
            found = seen.get(key)
            if found is None:
                break  # a longer n-gram ends with this one, and did not occur either
            at, length = found, n
        return at, length

    def _matched(self, at: int, length: int) -> int:
        """How long the match at `at` is known to be: it grows while drafts copy the same span."""
        end = len(self.tokens)
        grown = end - self._match_end
        if end - at == self._match_end - self._match_at and grown <= length:
            length = max(length, self._match + grown)
        self._match, self._match_at, self._match_end = length, at, end
        return length


class NGramProposer:
    """`NGramIndex` behind the stateless Proposer contract.

    Keeps the indices of the last few texts, within KEPT_TOKENS: a prefix that continues one of
    them costs its new tokens only. Whether it continues is told from its length and a handful of
    its tokens; a text that agrees there and differs elsewhere gets a worse draft, nothing else.
    Not thread-safe: ProposerService asks one request at a time.
    """

    def __init__(
        self,
        *,
        name: str = NGRAM,
        max_n: int = 8,
        min_n: int = 1,
        fallback_id: int = 0,
        kept_texts: int = 8,
    ) -> None:
        self.name = name
        self.stats = ProposerStats()
        self._lengths = (max_n, min_n)
        self._fallback_id = fallback_id
        self._kept_texts = kept_texts
        self._recent = [self.follow()]

    def propose(self, prefix: Sequence[int], size: int, num_steps: int = 1) -> Draft:
        """Draft at most `size` tokens; empty when no n-gram of the suffix occurred before.

        `num_steps` must be positive and is otherwise ignored: nothing is iterated.
        """
        if num_steps < 1:
            raise InvalidArgument(f"num_steps is {num_steps}, it must be at least 1")
        if not len(prefix):
            raise InvalidArgument("the prefix is empty: there is nothing to continue")
        if size < 1:
            raise InvalidArgument(f"the draft size is {size}, it must be at least 1")
        return self.draft_after(self._index_of(list(prefix)), size)

    def follow(self) -> NGramIndex:
        """A new index of this kind, for a caller that keeps a text and asks `draft_after` it."""
        return NGramIndex(*self._lengths, undo=ROLLBACK)

    def draft_after(self, index: NGramIndex, size: int) -> Draft:
        """Draft at most `size` tokens after the text of an index."""
        tokens, match = index.draft(size)
        draft = Draft(source=self.name)
        if tokens:
            confidence = next(value for least, value in _CONFIDENCE if match >= least)
            draft = Draft(
                source=self.name,
                tokens=tuple(tokens),
                confidence=(confidence,) * len(tokens),
                match_length=match,
            )
        self.stats.calls += 1
        self.stats.count(draft)
        return draft

    def unseen(self, prefix: Sequence[int]) -> int:
        """Tokens of the prefix that a draft has to index first, which is its cost."""
        heads = (_shared_head(prefix, index.tokens) for index in self._recent)
        return len(prefix) - max((head for head in heads if head is not None), default=0)

    def propose_block(
        self, committed: Sequence[int], block_size: int, num_steps: int = 1
    ) -> BlockProposal:
        """Draft exactly `block_size` tokens, filled up with the fallback id."""
        draft = self.propose(committed, block_size, num_steps)
        padding = (self._fallback_id,) * (block_size - len(draft.tokens))
        return BlockProposal(
            tokens=draft.tokens + padding, num_valid=len(draft.tokens), forward_passes=1
        )

    def _index_of(self, prefix: Sequence[int]) -> NGramIndex:
        """The index of exactly this prefix, made from that of a text which it continues."""
        recent = self._recent
        for at, index in enumerate(recent):
            shared = _shared_head(prefix, index.tokens)
            if shared is not None and len(index) - shared <= index.undoable:
                recent.insert(0, recent.pop(at))
                break
        else:
            shared, index = 0, self.follow()
            recent.insert(0, index)
        if shared < len(index):
            index.truncate(shared)
        if shared < len(prefix):
            index.extend(prefix[shared:])
        self._forget()
        return index

    def _forget(self) -> None:
        """Drop the indices asked for longest ago, beyond the bounds; never the newest."""
        recent = self._recent
        held = sum(map(len, recent))
        while len(recent) > 1 and (len(recent) > self._kept_texts or held > KEPT_TOKENS):
            held -= len(recent.pop())


def _shared_head(prefix: Sequence[int], text: Sequence[int]) -> int | None:
    """How much of `text` the prefix begins with, if that is all but a short end of it.

    The end is compared, and only some places before it. A drafter that is asked ahead of the
    verifier may have seen a few tokens that did not come true: those are the short end.
    """
    known = len(text)
    end = min(known, len(prefix))
    start = max(0, known - ROLLBACK)
    if end < start:
        return None
    near = max(0, start - 8)
    if any(prefix[at] != text[at] for at in range(0, near, max(1, near // 16))):
        return None
    if prefix[near:start] != text[near:start]:
        return None
    if prefix[start:end] == text[start:end]:
        return end
    shared = next(at for at in range(start, end) if prefix[at] != text[at])
    return shared if shared or not known else None
