"""Which pieces of a history are here, which an engine can begin from, and which to keep.

Questions only: nothing here changes a tree or waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.generation.cuts import unmarked
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece, longest_at
from kakeya.prefix.pages.pages import FingerprintBlocks, Lying
from kakeya.prefix.tree.node import Node

CHECKPOINT_TOKENS = 4096
"""Where recurrent state is large beside a block, one block in so many tokens carries it."""


def missing_of(
    shelf: FingerprintBlocks, pieces: Sequence[Piece], naming: Naming
) -> tuple[list[Piece], int]:
    """The pieces of a history that are not in pages, or lack the state that later pieces go on
    from, in the order of computing; and how many tokens of the first one another piece has."""
    reach = reach_of(shelf, pieces, naming, in_ram=True)
    passed = sum(served == naming.block_tokens for _, served in reach)
    missing = []
    for piece in pieces:
        if piece.index < passed:  # an engine goes on from what lies behind it
            continue
        node = shelf.tree.node(piece.id)
        is_here = node is not None and node.in_ram
        lacks_state = node is not None and not node.has_state
        if not is_here or (lacks_state and carries_state(naming, pieces, piece)):
            missing.append(piece)
    missing.sort(key=lambda piece: (piece.index, piece.count))
    while missing:
        _, shared = best_share(shelf, missing[0], naming, in_ram=True)
        if shared < missing[0].count:
            return missing, shared
        missing = missing[1:]  # all of a tail is in another piece
    return [], 0


def reach_of(
    shelf: FingerprintBlocks, pieces: Sequence[Piece], naming: Naming, *, in_ram: bool
) -> list[tuple[Node[Lying], int]]:
    """The blocks that an engine can begin from, in order, and how many tokens of each: whole ones,
    then the best piece behind them. Those in pages, or also those on disk.

    Where state is needed to go on, up to the last place at which it was kept.
    """
    match = shelf.tree.match([piece.id for piece in pieces if not piece.is_tail])
    depth = match.depth_ram if in_ram else match.depth_disk
    nodes = [(node, node.tokens) for node in match.nodes[:depth]]
    for index in range(depth, 0, -1):
        found = _behind(shelf, pieces, index, naming, in_ram=in_ram)
        if found or not naming.state_bytes or nodes[index - 1][0].has_state:
            return [*nodes[:index], *found]
    return _behind(shelf, pieces, 0, naming, in_ram=in_ram)


def in_pages(
    shelf: FingerprintBlocks, naming: Naming, token_ids: Sequence[int]
) -> list[tuple[Node[Lying], int]]:
    """`reach_of` a marked text, of the blocks in pages."""
    return reach_of(shelf, naming.pieces(*unmarked(token_ids)), naming, in_ram=True)


def best_share(
    shelf: FingerprintBlocks, piece: Piece, naming: Naming, *, in_ram: bool
) -> tuple[Node[Lying] | None, int]:
    """The block from which most of a piece can be taken, and how many tokens: one in pages rather
    than one on disk, or in pages only."""
    found = shelf.tree.tail(
        piece.parent,
        piece.packed,
        needs_state=naming.state_bytes > 0,
        grain=naming.grain(piece.index),
        in_ram=in_ram,
    )
    return (shelf.tree.node(found[0]), found[1]) if found is not None else (None, 0)


def _behind(
    shelf: FingerprintBlocks, pieces: Sequence[Piece], index: int, naming: Naming, *, in_ram: bool
) -> list[tuple[Node[Lying], int]]:
    """The piece that serves best in the place of a block; [] = there is none."""
    piece = longest_at(pieces, index)
    node, served = (None, 0)
    if piece is not None:
        node, served = best_share(shelf, piece, naming, in_ram=in_ram)
    return [(node, served)] if node is not None else []


def carries_state(naming: Naming, pieces: Sequence[Piece], piece: Piece) -> bool:
    """Whether recurrent state is kept behind a piece: behind each piece where the state is small,
    else at the end of the prompt, at its cuts, and at intervals."""
    if not naming.state_bytes:
        return False
    if naming.state_bytes <= naming.block_bytes or piece.is_tail or piece.is_end:
        return True
    behind = longest_at(pieces, piece.index + 1)
    is_last_whole = behind is None or behind.is_tail
    return is_last_whole or (piece.index + 1) * naming.block_tokens % CHECKPOINT_TOKENS == 0
