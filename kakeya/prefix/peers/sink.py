"""Where blocks from peers go: into pages, as if an engine had filled them."""

from __future__ import annotations

from collections.abc import Iterable

from kakeya.core.units import pack_ids
from kakeya.generation.retention import BlockClass, Retention
from kakeya.memory.pages.pins import PinHolder
from kakeya.memory.pages.shared_arena import Filling
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.pages import FingerprintBlocks, PrefixPages
from kakeya.prefix.tree.node import BlockFacts


class PageSink:
    """Lays the fetched blocks of one history into pages; `came` are the blocks that requests can
    use now."""

    def __init__(
        self,
        pages: PrefixPages,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Iterable[Piece],
        block_class: BlockClass,
        holder: PinHolder,
    ) -> None:
        self._pages = pages
        self._shelf = shelf
        self._naming = naming
        self._pieces = tuple(pieces)
        self._block_class = block_class
        self._holder = holder
        self.ids = [piece.id for piece in self._pieces if not piece.is_tail]
        self.came: list[BlockId] = []

    async def put(self, index: int, payload: bytearray, tail_tokens: int = 0) -> bool:
        """Take a block, or a tail of so many tokens; False = there are no pages for it, or those
        before it went."""
        filling = await self.fill(payload)
        if filling is None:
            return False
        block_id = self._tail_id(index, tail_tokens) if tail_tokens else self.ids[index]
        if self.commit(index, filling, tail_tokens):
            self.came.append(block_id)
            return True
        node = self._shelf.tree.node(block_id)
        return node is not None and node.in_ram

    async def fill(self, payload: bytearray) -> Filling | None:
        """Lay a block into pages that no request sees; end it by `commit` or `give_back`."""
        filling = await self._pages.prepare(
            self._naming, len(payload), self._holder, self._block_class
        )
        if filling is not None:
            filling.view[:] = payload
        return filling

    def give_back(self, filling: Filling) -> None:
        """Give back pages that no request is to see."""
        self._pages.give_back(filling)

    def commit(self, index: int, filling: Filling, tail_tokens: int = 0) -> bool:
        """Let all use a block; False = another request was first, or those before it went."""
        naming, size = self._naming, filling.length
        tokens, ids = self._pieces[index].tokens, self.ids
        if tail_tokens:
            tokens = tokens[:tail_tokens]
            ids = [*ids[:index], self._tail_id(index, tail_tokens)]
        facts = BlockFacts(
            token_ids=pack_ids(tokens),
            nbytes=self._pages.arena.paged_bytes(size),
            recompute_s=naming.compute_s(len(tokens)),
            has_state=size > naming.size(len(tokens), has_state=False),
            block_class=self._block_class,
            retention=Retention.IN_MEMORY,  # until the request that uses it says more
        )
        return self._pages.commit(self._shelf, ids, index, filling, facts)

    def _tail_id(self, index: int, tokens: int) -> BlockId:
        piece = self._pieces[index]
        return self._naming.chain.tail_id(piece.parent, piece.tokens[:tokens])
