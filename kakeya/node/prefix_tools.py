"""What all exchanges of a node share; `NodePrefixes` makes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kakeya.node.prefix_counts import PrefixCounts, Source
from kakeya.node.prefix_endings import PrefixEndings
from kakeya.node.prefix_given import EngineSeat, Given
from kakeya.node.prefix_meeting import Rendezvous
from kakeya.node.prefix_names import Naming, PrefixNames
from kakeya.node.prefix_pages import PrefixPages, Shelf
from kakeya.node.prefix_turns import Turns
from kakeya.precache.blocks import BlockId
from kakeya.precache.pieces import Piece
from kakeya.precache.retention import BlockClass

Bring = Callable[[Shelf, Naming, Sequence[Piece], BlockClass], Awaitable[Mapping[BlockId, Source]]]
"""Brings pieces of a history into pages from where they lie else; says where each lay."""
Meet = Callable[
    [Shelf, Naming, Sequence[Piece], BlockClass, Callable[[list[BlockId]], None]],
    Awaitable[Rendezvous | None],
]
"""Has the hindmost blocks come from a peer meanwhile; tells which are in pages once they meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTools:
    """What all exchanges of a node share.

    `landed` is told of each computed block that is in pages, `let_go` takes back what an engine was
    given once that certainly uses it no more.
    """

    names: PrefixNames
    pages: PrefixPages
    turns: Turns
    counts: PrefixCounts
    endings: PrefixEndings
    bring: Bring
    meet: Meet
    landed: Callable[[Shelf, BlockId], None]
    let_go: Callable[[Given, EngineSeat], None]
