"""The pieces of a history that KV is kept in: whole blocks, the tail behind them, and beginnings
of blocks that end at a cut.

    [ block 0 ][ block 1 ] ... [ block n-1 ][ tail ] x
                     [ end )                         the last token is always computed

Logits are not kept, so one token is left over for a forward to begin with. A piece that ends at a
cut is a tail too, of all histories that end there: a request that shares the text in front of a cut
and nothing more takes that tail, before a whole block is there. Texts are marked: see `cuts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kakeya.core.units import unpack_ids
from kakeya.generation.cuts import marked
from kakeya.prefix.names.blocks import TOKEN_BYTES, BlockChain, BlockId, packed_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One block of a history, or a tail; `parent` None = it is the first.

    `index` counts blocks from the beginning; a tail has the index that its block would have.
    `packed` is its marked text. `is_end`: other requests are likely to part from the history at its
    end.
    """

    id: BlockId
    parent: BlockId | None
    index: int
    packed: bytes
    is_tail: bool = False
    is_end: bool = False

    @property
    def count(self) -> int:
        """How many tokens it has."""
        return len(self.packed) // TOKEN_BYTES

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its marked text."""
        return tuple(unpack_ids(self.packed))


def pieces_of(
    chain: BlockChain,
    token_ids: Sequence[int],
    cuts: Iterable[int] = (),
    ends: Collection[int] = (),
) -> tuple[Piece, ...]:
    """Cut a history, all but its last token: its blocks, its tail, then the pieces that end at a
    cut.

    `ends` are those cuts that pieces of their own end at. A cut between two blocks marks nothing:
    a piece ends there anyway. Raises InvalidArgument for ids that are no uint32.
    """
    size, total = chain.block_tokens, max(0, len(token_ids) - 1)
    text = packed_ids(token_ids[:total])
    if inner := [cut for cut in cuts if 0 < cut < total and cut % size]:
        text = packed_ids(marked(token_ids[:total], inner))

    def piece(parent: BlockId | None, start: int, end: int) -> Piece:
        packed = text[start * TOKEN_BYTES : end * TOKEN_BYTES]
        return Piece(
            id=chain.name(parent, packed),
            parent=parent,
            index=start // size,
            packed=packed,
            is_tail=end - start < size,
            is_end=end in ends,
        )

    pieces: list[Piece] = []
    for start in range(0, total, size):
        parent = pieces[-1].id if pieces else None
        pieces.append(piece(parent, start, min(start + size, total)))
    for end in sorted(ends):
        if 0 < end < total and end % size:
            index = end // size
            pieces.append(piece(pieces[index].parent, index * size, end))
    return tuple(pieces)


def longest_at(pieces: Sequence[Piece], index: int) -> Piece | None:
    """The block of a history with this index, or the tail in its place; None = it has neither."""
    found = pieces[index] if index < len(pieces) else None
    return found if found is not None and found.index == index else None


def path_to(pieces: Sequence[Piece], piece: Piece) -> list[BlockId]:
    """The names of the blocks that lead to a piece, and its own."""
    return [*(one.id for one in pieces[: piece.index]), piece.id]
