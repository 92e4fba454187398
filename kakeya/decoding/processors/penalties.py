"""Penalties for repeated tokens, and biases, of one sequence.

Each token that has a bias, or that was counted, has a row in a few arrays. A token of which no
count is left keeps its row: the edit of that row then changes no bit of its logit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kakeya.decoding.processors.edits import Floats, Ids, TokenEdits
from kakeya.generation.request import Sampling

_FEWEST_ROWS = 64


class Penalties:
    """Counts the tokens of one sequence; `is_constant` says that no edit depends on them.

    Presence and frequency count the answer, repetition the prompt too.
    """

    __slots__ = ("_answered", "_biases", "_ids", "_rows", "_sampling", "_seen", "is_constant")

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self.is_constant = not has_penalties(sampling)
        biases = dict(sampling.logit_bias)
        # Only the repetition penalty asks for the tokens of the prompt.
        seen = set(prompt) if sampling.repetition_penalty != 1 else set()
        self._rows = {token: row for row, token in enumerate([*biases, *(seen - biases.keys())])}
        capacity = max(_FEWEST_ROWS, 2 * len(self._rows))
        self._ids: Ids = np.zeros(capacity, np.int32)
        self._biases: Floats = np.zeros(capacity, np.float32)
        self._answered: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._seen: npt.NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._ids[: len(self._rows)] = list(self._rows)
        self._biases[: len(biases)] = list(biases.values())
        self._seen[[self._rows[token] for token in seen]] = 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Count tokens of the answer."""
        if not self.is_constant:
            for token in tokens:
                self._count(token, 1)

    def edits(self, ahead: Sequence[int] = ()) -> list[TokenEdits]:
        """The edit of the next position, and of that behind each token of `ahead`."""
        if self.is_constant:
            return [self._edit()] * (1 + len(ahead))
        made = [self._edit()]
        for token in ahead:
            self._count(token, 1)
            made.append(self._edit())
        for token in ahead:
            self._count(token, -1)
        return made

    def _count(self, token: int, times: int) -> None:
        row = self._rows.get(token)
        if row is None:
            row = self._rows[token] = len(self._rows)
            if row == len(self._ids):
                self._grow()
            self._ids[row] = token
        self._answered[row] += times
        self._seen[row] += times

    def _grow(self) -> None:
        self._ids, self._answered, self._seen = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self._ids, self._answered, self._seen)
        )
        self._biases = np.concatenate([self._biases, np.zeros_like(self._biases)])

    def _edit(self) -> TokenEdits:
        count, sampling = len(self._rows), self._sampling
        answered, seen = self._answered[:count], self._seen[:count]
        penalties = sampling.frequency_penalty * answered + sampling.presence_penalty * (
            answered > 0
        )
        # Copies: the arrays change before the edit is computed.
        return TokenEdits(
            ids=self._ids[:count].copy(),
            biases=self._biases[:count].copy(),
            factors=np.where(seen > 0, sampling.repetition_penalty, 1.0).astype(np.float32),
            penalties=penalties.astype(np.float32),
        )


def has_penalties(sampling: Sampling) -> bool:
    """Whether tokens are penalised for those before them."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
