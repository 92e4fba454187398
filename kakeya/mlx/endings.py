"""What whole prompts end in: the logits behind their last token, least recently used first to go.

KV from blocks spares a prompt that is asked again all of its prefill, and leaves the step of its
last token, which a caller waits for before the first word. Its logits are the same each time, so
they are kept too, and the first word is chosen from them, in the way of the request that asks.
"""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx

LIMIT_BYTES = 4 << 20
"""300 prompts of a vocabulary of 3,000, six of one of 150,000, in 32 bits."""


class Endings:
    """Logits by the name of their prompt, within a bound. Shapes: [1, V] any float."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()
        self.held_bytes = 0

    def find(self, prompt: bytes) -> mx.array | None:
        """The logits behind a prompt; None where they are not known."""
        logits = self._kept.get(prompt)
        if logits is not None:
            self._kept.move_to_end(prompt)
        return logits

    def keep(self, prompt: bytes, logits: mx.array) -> None:
        """Keep a prompt's logits, which are computed; others go for them."""
        if prompt in self._kept or logits.nbytes > self._limit_bytes:
            return
        self._kept[prompt] = logits
        self.held_bytes += logits.nbytes
        self.shed(self.held_bytes - self._limit_bytes)

    def shed(self, size: int) -> None:
        """Drop the oldest until `size` bytes are gone or none is left."""
        while self._kept and size > 0:
            _, oldest = self._kept.popitem(last=False)
            self.held_bytes -= oldest.nbytes
            size -= oldest.nbytes
