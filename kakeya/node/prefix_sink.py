"""Where blocks from peers go: into pages, as if an engine had filled them."""

from __future__ import annotations

from collections.abc import Iterable

from kakeya.core.units import pack_ids
from kakeya.memory.arena import Filling
from kakeya.memory.pins import Holder
from kakeya.node.arena import paged_bytes
from kakeya.node.prefix_names import Naming
from kakeya.node.prefix_pages import PrefixPages, Shelf
from kakeya.precache.block_node import BlockFacts
from kakeya.precache.blocks import BlockId
from kakeya.precache.pieces import Piece
from kakeya.precache.retention import BlockClass, Retention


class PageSink:
    """Lays the fetched blocks of one history into pages; `came` is what all can use now."""

    def __init__(
        self,
        pages: PrefixPages,
        shelf: Shelf,
        naming: Naming,
        pieces: Iterable[Piece],
        block_class: BlockClass,
        holder: Holder,
    ) -> None:
        self._pages = pages
        self._shelf = shelf
        self._naming = naming
        self._pieces = [piece for piece in pieces if not piece.is_tail]
        self._block_class = block_class
        self._holder = holder
        self.ids = [piece.id for piece in self._pieces]
        self.came: list[BlockId] = []

    async def put(self, index: int, payload: bytearray) -> bool:
        """Take a block; False = there are no pages for it, or those before it went."""
        filling = await self.fill(payload)
        if filling is None:
            return False
        if self.commit(index, filling):
            self.came.append(self.ids[index])
            return True
        node = self._shelf.tree.node(self.ids[index])
        return node is not None and node.in_ram

    async def fill(self, payload: bytearray) -> Filling | None:
        """Lay a block into pages that nobody sees; end it by `commit` or `give_back`."""
        filling = await self._pages.prepare(self._naming, len(payload), self._holder)
        if filling is not None:
            filling.view[:] = payload
        return filling

    def give_back(self, filling: Filling) -> None:
        """End what nobody is to see."""
        self._pages.give_back(filling)

    def commit(self, index: int, filling: Filling) -> bool:
        """Let all use a block; False = somebody else was first, or those before it went."""
        naming, piece, size = self._naming, self._pieces[index], filling.ref.length
        facts = BlockFacts(
            token_ids=pack_ids(piece.tokens),
            nbytes=paged_bytes(size),
            recompute_s=naming.compute_s(len(piece.tokens)),
            has_state=naming.state_bytes > 0 and size > naming.block_bytes,
            block_class=self._block_class,
            retention=Retention.LONG,
        )
        return self._pages.commit(self._shelf, self.ids, index, filling, facts)
