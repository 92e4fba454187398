"""The pieces of a history that KV is kept in: its whole blocks, and the tail behind them.

    [ block 0 ][ block 1 ] ... [ block n-1 ][ tail ] x
                                                     the last token is always computed

Logits are not kept, so one token is left over for a forward to begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.precache.blocks import BlockChain, BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One block of a history, or its tail; `parent` None = it is the first.

    `index` counts blocks from the beginning; a tail has the index that its block would have.
    """

    id: BlockId
    parent: BlockId | None
    index: int
    tokens: tuple[int, ...]
    is_tail: bool = False


def pieces_of(chain: BlockChain, token_ids: Sequence[int]) -> tuple[Piece, ...]:
    """Cut a history, all but its last token. Raises InvalidArgument for ids that are no uint32."""
    kept = tuple(token_ids[: max(0, len(token_ids) - 1)])
    size = chain.block_tokens
    pieces: list[Piece] = []
    parent: BlockId | None = None
    for index, block_id in enumerate(chain.ids(kept)):
        tokens = kept[index * size : (index + 1) * size]
        pieces.append(Piece(id=block_id, parent=parent, index=index, tokens=tokens))
        parent = block_id
    rest = kept[len(pieces) * size :]
    if rest:
        tail_id = chain.tail_id(parent, rest)
        tail = Piece(id=tail_id, parent=parent, index=len(pieces), tokens=rest, is_tail=True)
        pieces.append(tail)
    return tuple(pieces)
