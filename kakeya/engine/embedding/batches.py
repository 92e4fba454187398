"""Which texts are computed next. Pure.

All texts that wait can share a forward, in which a short text costs as much as the longest one. So
a batch begins with the longest text that is left of one job, and takes the next shorter ones of all
jobs. Jobs take turns to begin a batch: a job of one text waits for as many batches as there are
jobs, however many texts they have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class EmbedJob:
    """The texts of one call in token ids, none of them empty, and the length of its vectors.

    `vectors` has a place for each text; `done` gets them once all are there. `waiting` counts the
    texts that are in no batch yet, `left` those without a vector.
    """

    texts: Sequence[Sequence[int]]
    size: int
    done: Future[list[bytes]] = field(default_factory=Future)
    vectors: list[bytes] = field(init=False)
    waiting: int = field(init=False)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.texts)
        self.waiting = self.left = len(self.texts)

    def give(self, index: int, vector: bytes) -> None:
        """Take the vector of a text; with the last one the job is done."""
        self.vectors[index] = vector
        self.left -= 1
        if not self.left and self.done.set_running_or_notify_cancel():
            self.done.set_result(self.vectors)

    def fail(self, failure: Exception) -> None:
        """End the job with an error."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_exception(failure)


class Waiting(NamedTuple):
    """A text that waits; sorted by length, then by arrival."""

    tokens: int
    order: int
    job: EmbedJob
    at: int

    @property
    def text(self) -> Sequence[int]:
        """The token ids."""
        return self.job.texts[self.at]


class EmbedQueue:
    """Jobs in the order of their turns, and their texts by length."""

    def __init__(self, batch_tokens: int) -> None:
        """A batch has at most so many tokens, padding included, or one text."""
        self._batch_tokens = batch_tokens
        self._turns: deque[EmbedJob] = deque()
        self._texts: list[Waiting] = []
        self._arrived = 0

    def __len__(self) -> int:
        """Texts that wait."""
        return len(self._texts)

    @property
    def jobs(self) -> int:
        """Jobs with texts that wait."""
        return len(self._turns)

    def add(self, job: EmbedJob) -> None:
        """Take a job of one text or more."""
        self._turns.append(job)
        for index, text in enumerate(job.texts):
            self._arrived += 1
            self._texts.append(Waiting(len(text), self._arrived, job, index))
        self._texts.sort()  # two runs: a merge

    def drop_ended(self) -> None:
        """Forget jobs that were cancelled, or failed."""
        if any(job.done.done() for job in self._turns):
            self._turns = deque(job for job in self._turns if not job.done.done())
            self._texts = [one for one in self._texts if not one.job.done.done()]

    def next_batch(self) -> list[Waiting]:
        """Take the texts of the next forward, longest first; [] = none wait."""
        if not self._turns:
            return []
        job = self._turns.popleft()
        first = next(at for at in reversed(range(len(self._texts))) if self._texts[at].job is job)
        most = max(1, self._batch_tokens // self._texts[first].tokens)
        begin = max(0, first + 1 - most)
        batch = self._texts[begin : first + 1][::-1]
        del self._texts[begin : first + 1]
        for one in batch:
            one.job.waiting -= 1
        self._turns = deque(one for one in (*self._turns, job) if one.waiting)
        return batch
