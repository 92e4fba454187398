"""The endings of whole prompts: the logits behind their last token. Those of the class BATCH go
first, and take the room of each other only; within a class the least recently used.

KV spares a repeated prompt its prefill but for the step of its last token, and the caller waits for
that step before the first word. Its logits are the same each time, so they are kept too. They are
named as a block behind the prompt's last piece would be, by another seed: so equal names mean equal
tokens with equal cuts, computed by equal arithmetic, and no name is that of a block of KV. Logits
are float32, little-endian; shape [V].
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kakeya.core.units import MIB
from kakeya.generation.retention import BlockClass
from kakeya.prefix.names.blocks import BlockChain, BlockId, packed_ids
from kakeya.prefix.names.pieces import Piece, longest_at

LIMIT_BYTES = 4 * MIB
"""300 prompts of a vocabulary of 3,000, six of one of 150,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Where logits belong: behind `token_id`, the last of a prompt that `id` names."""

    id: BlockId
    token_id: int


@lru_cache(maxsize=256)  # each request asks, and a node has few
def ending_chain(chain: BlockChain) -> BlockChain:
    """The chain that names the logits of a model, by the chain of its KV."""
    return replace(chain, seed=hashlib.sha256(b"logits" + chain.seed).digest())


def ending_of(
    chain: BlockChain, pieces: Sequence[Piece], token_ids: Sequence[int]
) -> Ending | None:
    """Name the end of a history by its pieces; None for one of a single token, which has none.

    Raises InvalidArgument for ids that are no uint32.
    """
    if len(token_ids) < 2:
        return None
    last = longest_at(pieces, (len(token_ids) - 2) // chain.block_tokens)
    if last is None:
        return None
    token_id = token_ids[-1]
    name = ending_chain(chain).name(last.id, packed_ids((token_id,)))
    return Ending(id=name, token_id=token_id)


class Endings:
    """Logits by name, within a bound of bytes."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._kept: OrderedDict[BlockId, bytes] = OrderedDict()
        self._batch: OrderedDict[BlockId, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept) + len(self._batch)

    def find(self, ending_id: BlockId, block_class: BlockClass = BlockClass.USER) -> bytes:
        """The logits of that name; b"" where they are not known. Once a class other than BATCH used
        them, they are of BATCH no more."""
        for kept in (self._kept, self._batch):
            if logits := kept.get(ending_id, b""):
                break
        else:
            return b""
        if kept is self._batch and block_class is not BlockClass.BATCH:
            del kept[ending_id]
            kept = self._kept
        kept[ending_id] = logits
        kept.move_to_end(ending_id)
        return logits

    def keep(
        self, ending_id: BlockId, logits: bytes, block_class: BlockClass = BlockClass.USER
    ) -> bool:
        """Keep logits, and drop others for them; False where they are known, or too large."""
        if not logits or ending_id in self._kept or ending_id in self._batch:
            return False
        is_batch = block_class is BlockClass.BATCH
        others = sum(map(len, self._kept.values())) if is_batch else 0
        if others + len(logits) > self.limit_bytes:
            return False
        (self._batch if is_batch else self._kept)[ending_id] = logits
        self.held_bytes += len(logits)
        while self.held_bytes > self.limit_bytes:
            _, oldest = (self._batch or self._kept).popitem(last=False)
            self.held_bytes -= len(oldest)
        return True

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._batch.clear()
        self.held_bytes = 0
