"""A real embedding, which ends the process at an id that it lacks, against hostile drafts."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kakeya.core.errors import InvalidArgument
from kakeya.decoding.library.speculative import SpeculativeDecoder
from tests.decoding.toys import ToyProposer

FAR = 50_000_000
WEIGHT = mx.random.normal((64, 16))


class Lookup:
    """The next token is the one whose row fits best to the row of the last one."""

    def verify(self, history: Sequence[int], draft: Sequence[int]) -> list[int]:
        rows = WEIGHT[mx.array([history[-1], *draft])]
        return mx.argmax(rows @ WEIGHT.T - 1e9 * mx.eye(64)[: len(rows)], axis=-1).tolist()


hostile = ToyProposer(lambda prefix, size: [FAR] * size)
try:
    decoder = SpeculativeDecoder(Lookup(), hostile, context_tokens=99)
    print("taken", list(decoder.generate([1, 2], 5)), flush=True)
except InvalidArgument as refusal:
    print("refused:", refusal.message)
decoder = SpeculativeDecoder(Lookup(), hostile, context_tokens=99, vocab_size=64)
print(len(list(decoder.generate([1, 2], 5))), "tokens")
try:
    list(decoder.generate([1, FAR], 5))
except InvalidArgument as refusal:
    print("refused:", refusal.message)
