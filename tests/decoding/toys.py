"""A toy language model and proposers of every temper, to hold drafting against plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from kakeya.decoding.draft.proposer import Draft, ProposerStats
from kakeya.decoding.draft.sampling import gumbel, select
from kakeya.generation.request import Sampling

VOCAB = 29
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)


class HashModel:
    """Logits are a hash of the last `order` tokens; as a Verifier it keeps and rolls back a cache.

    The cache is checked as a real KV would suffer: a history that does not begin with what the
    cache still holds is a fault of the decoder.
    """

    vocab_size = VOCAB

    def __init__(self, params: Sampling = GREEDY, order: int = 3) -> None:
        self.params = params
        self.order = order
        self.forwards = 0
        self.rows = 0
        self.cache: list[int] = []

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        key = hash(tuple(prefix[-self.order :])) & 0xFFFFFFFF
        return np.random.Generator(np.random.Philox(key=key)).normal(size=VOCAB).astype(np.float32)

    def next_token(self, prefix: Sequence[int]) -> int:
        noise = gumbel(self.params.seed, len(prefix), VOCAB)
        return select(2 * self.logits(prefix), self.params, noise)

    def verify(self, history: Sequence[int], draft: Sequence[int]) -> list[int]:
        assert all(0 <= token < VOCAB for token in draft)
        shared = 0
        while shared < min(len(self.cache), len(history) - 1):
            if self.cache[shared] != history[shared]:
                break
            shared += 1
        tokens = [*history, *draft]
        self.forwards += 1
        self.rows += 1 + len(draft)
        self.cache = tokens
        return [self.next_token(tokens[: len(history) + at]) for at in range(len(draft) + 1)]

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]


class ToyProposer:
    """Drafts by a function of (prefix, size)."""

    def __init__(self, make: Callable[[Sequence[int], int], Sequence[int]], name="toy") -> None:
        self.name = name
        self.stats = ProposerStats()
        self.asked_steps: list[int] = []
        self._make = make

    def propose(self, prefix: Sequence[int], size: int, num_steps: int = 1) -> Draft:
        self.stats.calls += 1
        self.asked_steps.append(num_steps)
        return Draft(source=self.name, tokens=tuple(self._make(prefix, size)))


def oracle(model: HashModel) -> ToyProposer:
    """Knows the model."""
    return ToyProposer(lambda prefix, size: model.plain(prefix, size))


def always_wrong(model: HashModel) -> ToyProposer:
    """Avoids the model's token at every depth."""
    return ToyProposer(
        lambda prefix, size: [(token + 1) % VOCAB for token in model.plain(prefix, size)]
    )


def corrupted(model: HashModel, share: float, rng: random.Random) -> ToyProposer:
    """The oracle with some tokens replaced."""

    def make(prefix: Sequence[int], size: int) -> list[int]:
        return [
            rng.randrange(VOCAB) if rng.random() < share else token
            for token in model.plain(prefix, size)
        ]

    return ToyProposer(make)


def empty(_: HashModel) -> ToyProposer:
    return ToyProposer(lambda prefix, size: ())


def too_long(model: HashModel) -> ToyProposer:
    """Three times as much as it was asked for."""
    return ToyProposer(lambda prefix, size: model.plain(prefix, 3 * size))


def out_of_vocabulary(model: HashModel) -> ToyProposer:
    """One good token, then ids that no vocabulary has."""
    return ToyProposer(lambda prefix, size: [*model.plain(prefix, 1), VOCAB, -1, 2**40][:size])


def stale(model: HashModel) -> ToyProposer:
    """Continues what the history was some tokens ago."""
    return ToyProposer(lambda prefix, size: model.plain(prefix[:-3] or prefix, size))


def failing(_: HashModel) -> ToyProposer:
    def make(prefix: Sequence[int], size: int) -> list[int]:
        raise RuntimeError("out of order")

    return ToyProposer(make)


def dying(model: HashModel, after: int = 5) -> ToyProposer:
    """Good until it is dead."""
    left = [after]

    def make(prefix: Sequence[int], size: int) -> list[int]:
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionError("gone")
        return model.plain(prefix, size)

    return ToyProposer(make)
