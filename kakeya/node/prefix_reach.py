"""What of a history is here, what an engine can begin from, and what is worth keeping of it.

Questions only: nothing here changes a tree or waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.node.prefix_names import Naming
from kakeya.node.prefix_pages import Lying, Shelf
from kakeya.precache.block_node import Node
from kakeya.precache.flights import Patience
from kakeya.precache.pieces import Piece

GRAIN_TOKENS = 16
"""The finest prefill grid, from whose boundaries an engine goes on within a block."""
CHECKPOINT_TOKENS = 4096
"""Where recurrent state is large beside a block, one block in so many tokens carries it."""


def missing_of(shelf: Shelf, pieces: Sequence[Piece], naming: Naming) -> tuple[list[Piece], int]:
    """What of a history is not in pages; and how much of the first of that another piece has."""
    missing = []
    for piece in pieces:
        node = shelf.tree.node(piece.id)
        if node is None or not node.in_ram:
            missing.append(piece)
    if not missing:
        return [], 0
    first = missing[0]
    _, shared = _share_in_pages(shelf, first, naming)
    if shared == len(first.tokens):  # all of a tail is in another piece
        return missing[1:], 0
    return missing, shared


def usable_of(
    shelf: Shelf, pieces: Sequence[Piece], naming: Naming
) -> list[tuple[Node[Lying], int]]:
    """What an engine can begin from: whole blocks, then what the best piece behind them shares."""
    needs_state = naming.state_bytes > 0
    whole = [piece.id for piece in pieces if not piece.is_tail]
    match = shelf.tree.match(whole, needs_state=needs_state)
    nodes = [(node, node.tokens) for node in match.nodes[: match.depth_ram]]
    if match.depth_ram < len(pieces):
        node, shared = _share_in_pages(shelf, pieces[match.depth_ram], naming)
        if node is not None:
            nodes.append((node, shared))
    return nodes


def best_share(shelf: Shelf, piece: Piece, naming: Naming) -> tuple[Node[Lying] | None, int]:
    """The block that shares most with a piece at its place, and how many tokens: one in pages
    rather than one on disk."""
    needs_state = naming.state_bytes > 0
    found = shelf.tree.tail(piece.parent, piece.tokens, needs_state=needs_state)
    return (shelf.tree.node(found[0]), found[1]) if found is not None else (None, 0)


def _share_in_pages(shelf: Shelf, piece: Piece, naming: Naming) -> tuple[Node[Lying] | None, int]:
    node, shared = best_share(shelf, piece, naming)
    return (node, shared) if node is not None and node.in_ram else (None, 0)


def carries_state(naming: Naming, pieces: Sequence[Piece], piece: Piece) -> bool:
    """Whether recurrent state is kept behind a block: behind each where it is small, else where a
    prompt ends, and now and then."""
    if not naming.state_bytes:
        return False
    if naming.state_bytes <= naming.block_bytes or piece.is_tail or piece is pieces[-1]:
        return True
    is_last_whole = pieces[-1].is_tail and piece.index == pieces[-1].index - 1
    return is_last_whole or (piece.index + 1) * naming.block_tokens % CHECKPOINT_TOKENS == 0


def patience_for(naming: Naming) -> Patience:
    """How long a leader may be without a sign, by what a block takes to compute."""
    block_s = naming.compute_s(naming.block_tokens)
    return Patience(
        fair_s=min(60.0, max(2.0, 16 * block_s)),
        brisk_s=min(10.0, 0.25 + 3 * block_s),
        least_shared=max(1, naming.block_tokens // 8),
        grain=min(GRAIN_TOKENS, naming.block_tokens),
    )
