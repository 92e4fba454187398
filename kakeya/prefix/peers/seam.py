"""Blocks of KV that are not on this node: the seam between its prefixes and other nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from kakeya.generation.retention import BlockClass
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.pages import FingerprintBlocks
from kakeya.prefix.peers.two_sided_fetch import Rendezvous


class PeerSource(Protocol):
    """Other nodes that may have blocks."""

    async def fetch(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        have: int,
        block_class: BlockClass,
    ) -> Collection[BlockId]:
        """Bring whole blocks from the first that is not here on into pages, sooner than they would
        be computed; which came. Never raises."""
        ...

    async def rendezvous(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        have: int,
        block_class: BlockClass,
        joined: Callable[[list[BlockId]], None],
    ) -> Rendezvous | None:
        """Have blocks come from the end while they are computed from the beginning, where that is
        sooner than either alone. Never raises."""
        ...
