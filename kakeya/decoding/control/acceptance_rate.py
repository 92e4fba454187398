"""How likely the next draft token is right, learned from drafts that were judged.

One cell holds the decayed counts of one situation: (match length bucket) for n-gram drafts,
(confidence bucket) for drafts that carry confidences, (depth) for others. Estimates are shrunk:
depth i toward depth i - 1, depth 1 toward PRIOR.

The token at depth i of an n-gram draft stands behind i - 1 right ones, so it continues a match that
is longer by as many. All depths of all such drafts therefore teach the same few cells, and the
first copied span of an engine is enough to know the rest. A longer match is at least as likely to
go on as a shorter one: each bucket is shrunk toward the one before, or toward its own prior where
that is higher.

Text changes its mind abruptly: a copied span begins, or ends. Decayed counts over 50 drafts would
take 20 drafts to notice. So each cell watches its current run of equal outcomes: once so long a
run would have been SURPRISING at the rate known before it, the run alone is remembered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from kakeya.decoding.draft.proposer import Draft

PRIOR = 0.3
"""Prior acceptance of a first token of a source that tells no match length."""
MATCH_PRIORS = (0.2, 0.4, 0.6, 0.75, 0.85, 0.95)
"""Prior acceptance behind a match, by its bucket."""
WEIGHT = 4.0
"""The prior counts as this many judged tokens."""
DECAY = 0.98
SURPRISING = 0.001
"""Chance of a run of equal outcomes below which the rate must have changed."""
MATCH_EDGES = (2, 3, 5, 9, 17)
"""Buckets of the match length: 1, 2, 3-4, 5-8, 9-16, 17 and more."""
CONFIDENCE_EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99)


class Cell:
    """Decayed counts of one situation."""

    __slots__ = ("_chance", "_in_run", "_run", "_was_right", "right", "tried")

    def __init__(self) -> None:
        self.tried = 0.0
        self.right = 0.0
        self._was_right = 0.0
        self._run = 0
        self._chance = 1.0
        self._in_run = 1.0

    def observe(self, right: float) -> None:
        """Count one judged token: 1.0 when it was right, 0.0 when not."""
        if right != self._was_right or not self._run:
            rate = (self.right + 1.0) / (self.tried + 2.0)
            self._was_right = right
            self._run = 0
            self._chance = 1.0
            self._in_run = rate if right else 1.0 - rate
        self._run += 1
        self._chance *= self._in_run
        if self._chance < SURPRISING:
            self.tried, self.right = float(self._run), right * self._run
            self._run = 0
        else:
            self.tried = DECAY * self.tried + 1.0
            self.right = DECAY * self.right + right

    def estimate(self, prior: float) -> float:
        """The rate, shrunk toward `prior`."""
        return (self.right + WEIGHT * prior) / (self.tried + WEIGHT)


class AcceptanceTable:
    """The cells of one draft source."""

    __slots__ = ("_by_confidence", "_by_depth", "_by_match", "_max_depth", "_overall")

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._by_match = _cells(len(MATCH_PRIORS))
        self._by_depth = _cells(max_depth)
        self._by_confidence = [Cell() for _ in range(len(CONFIDENCE_EDGES) + 1)]
        self._overall = _cells(max_depth)

    def chain(self, draft: Draft, depth: int) -> Iterator[float]:
        """Conditional acceptance of the draft's tokens in order, at most `depth` of them."""
        limit = min(depth, self._max_depth, len(draft.tokens))
        if draft.match_length:
            return self._matched(draft.match_length, limit)
        if len(draft.confidence) >= limit:
            return self._confident(draft.confidence[:limit])
        return _shrunk(self._by_depth[:limit])

    def overall(self, depth: int) -> Iterator[float]:
        """The same for a draft that was not made yet."""
        return _shrunk(self._overall[: min(depth, self._max_depth)])

    def observe(self, draft: Draft, right: int, judged: int) -> None:
        """Learn that the first `right` tokens were right, of `judged` that could be told."""
        judged = min(judged, self._max_depth)
        if draft.match_length:
            cells = [self._by_match[_bucket(draft.match_length + depth)] for depth in range(judged)]
        elif len(draft.confidence) >= judged:
            cells = [self._confidence_cell(value) for value in draft.confidence[:judged]]
        else:
            cells = self._by_depth
        for depth in range(judged):
            hit = 1.0 if depth < right else 0.0
            cells[depth].observe(hit)
            self._overall[depth].observe(hit)

    def _matched(self, length: int, limit: int) -> Iterator[float]:
        """Estimates for the tokens of a draft behind a match; see the module."""
        rates, shorter = [], 0.0
        for cell, prior in zip(self._by_match, MATCH_PRIORS, strict=True):
            shorter = cell.estimate(max(prior, shorter))
            rates.append(shorter)
        return (rates[_bucket(match)] for match in range(length, length + limit))

    def _confident(self, values: Sequence[float]) -> Iterator[float]:
        for value in values:
            yield self._confidence_cell(value).estimate(PRIOR)

    def _confidence_cell(self, value: float) -> Cell:
        return self._by_confidence[bisect_right(CONFIDENCE_EDGES, value)]


def _cells(count: int) -> list[Cell]:
    return [Cell() for _ in range(count)]


def _bucket(match_length: int) -> int:
    return bisect_right(MATCH_EDGES, match_length)


def _shrunk(cells: Sequence[Cell]) -> Iterator[float]:
    prior = PRIOR
    for cell in cells:
        prior = cell.estimate(prior)
        yield prior
