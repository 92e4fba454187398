"""What all exchanges of a node share; `NodePrefixes` makes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kakeya.generation.retention import BlockClass
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.naming import Naming, PrefixNames
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.counts import PrefixCounts, Source
from kakeya.prefix.pages.pages import FingerprintBlocks, PrefixPages
from kakeya.prefix.peers.two_sided_fetch import Rendezvous
from kakeya.prefix.request.endings import PrefixEndings
from kakeya.prefix.request.grant import EngineSeat, KvGrant
from kakeya.prefix.request.turns import Turns

Bring = Callable[
    [FingerprintBlocks, Naming, Sequence[Piece], BlockClass], Awaitable[Mapping[BlockId, Source]]
]
"""Brings pieces of a history into pages from where they lie else; says where each lay."""
Meet = Callable[
    [FingerprintBlocks, Naming, Sequence[Piece], BlockClass, Callable[[list[BlockId]], None]],
    Awaitable[Rendezvous | None],
]
"""Has the hindmost blocks come from a peer meanwhile; tells which are in pages once they meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
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
    landed: Callable[[FingerprintBlocks, BlockId], None]
    let_go: Callable[[KvGrant, EngineSeat], None]
