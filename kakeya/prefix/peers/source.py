"""The prefixes of this node as peers ask for them: whole blocks, from pages or from disk.

A block that a lease pins stays where it is, in pages by a hold and on disk by the store's. Nothing
here wakes an engine: a fingerprint that only lies on disk is served as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from kakeya.core.errors import KakeyaError, PageFreed
from kakeya.memory.pages.pins import PinHolder
from kakeya.prefix.disk.kvb import StoredBlock
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.pages.pages import FingerprintBlocks, Lying, PrefixPages
from kakeya.prefix.peers.seams import TAIL_NAME_BYTES, BlockPart, FingerprintUsage, Loan
from kakeya.prefix.tree.node import Node

MAX_TOLD = 2048
"""Names that a filter on a card could hold."""


class NodeSources:
    """The `BlockSources` of a node's prefixes; `store` None = nothing is on disk."""

    def __init__(self, pages: PrefixPages, store: BlockStore | None) -> None:
        self._pages = pages
        self._store = store
        self._holder = pages.arena.holder("prefixes that peers fetch")

    def source(self, exact: bytes) -> NodeSource | None:
        """The blocks of the fingerprint with this digest."""
        shelf = self._pages.find(exact) or self._on_disk(exact)
        return None if shelf is None else NodeSource(shelf, self._pages, self._store, self._holder)

    def fingerprints(self) -> tuple[KvFingerprint, ...]:
        """Of every shelf, the last used first, then of the blocks on disk since before this
        start."""
        shelves = sorted(self._pages.shelves(), key=lambda shelf: -shelf.used_mono)
        known = {shelf.seed: shelf.fingerprint for shelf in shelves}
        tried = set(known)
        for entry in self._store.entries() if self._store is not None else ():
            if entry.block.fingerprint not in tried:
                tried.add(entry.block.fingerprint)
                found = _fingerprint_of(entry.block)
                if found is not None:
                    known[entry.block.fingerprint] = found
        return tuple(known.values())

    def renew(self) -> None:
        """Renew the pins of leases: they are no leaks."""
        for hold in self._holder.holds():
            if hold.pins > 0:
                hold.renew()

    def _on_disk(self, exact: bytes) -> FingerprintBlocks | None:
        if self._store is None:
            return None
        for entry in self._store.entries():
            if entry.block.fingerprint == exact:
                fingerprint = _fingerprint_of(entry.block)
                return None if fingerprint is None else self._pages.shelf_of(fingerprint, exact)
        return None


class NodeSource:
    """The blocks of one shelf."""

    def __init__(
        self,
        shelf: FingerprintBlocks,
        pages: PrefixPages,
        store: BlockStore | None,
        holder: PinHolder,
    ) -> None:
        self._shelf = shelf
        self._pages = pages
        self._store = store
        self._holder = holder

    def leading(self, ids: Sequence[BlockId]) -> tuple[int, ...]:
        """Bytes of each block of the longest leading run that is here."""
        sizes = []
        for block_id in ids:
            node = self._node(block_id)
            size = None if node is None or node.is_tail else self._size(node)
            if size is None:
                break
            sizes.append(size)
        return tuple(sizes)

    def tail(self, behind: BlockId, names: Sequence[bytes]) -> BlockPart | None:
        """The longest tail here behind a block with one of these names."""
        parent, best = self._node(behind), None
        for node in parent.tails if parent is not None else ():
            is_meant = node.tokens <= len(names) and (
                node.id[:TAIL_NAME_BYTES] == names[node.tokens - 1]
            )
            size = self._size(node) if is_meant else None
            if size is not None and (best is None or node.tokens > best.tokens):
                best = BlockPart(id=node.id, tokens=node.tokens, size=size)
        return best

    def pin(self, ids: Sequence[BlockId]) -> Callable[[], None]:
        """Keep those of these blocks that are here until the returned function is called."""
        in_pages = [node for node in map(self._node, ids) if node is not None and node.in_ram]
        holds = [hold for node in in_pages for hold in self._pages.hold((node,), self._holder)]
        # The arena keeps held blocks, the tree pinned ones, which have to be a prefix.
        beginning = list(takewhile(self._is_in_pages, ids))
        pin = self._shelf.tree.pin(beginning) if beginning else None
        let_go = self._store.hold(ids) if self._store is not None else None

        def unpin() -> None:
            self._pages.release(holds)
            if pin is not None:
                pin.unpin()
            if let_go is not None:
                let_go()

        return unpin

    async def read(self, block_id: BlockId) -> Loan | None:
        """Lend a block: the pages themselves, or its bytes from disk."""
        node = self._node(block_id)
        if node is not None and node.payload is not None:
            holds = self._pages.hold((node,), self._holder)
            if holds:
                try:
                    view = self._pages.view(node.payload)
                except PageFreed:
                    self._pages.release(holds)
                    return None

                def give_back() -> None:
                    view.release()
                    self._pages.release(holds)

                return Loan(view, give_back)
        found = await self._store.get(block_id) if self._store is not None else None
        return None if found is None else Loan(memoryview(found[1]), lambda: None)

    def resident(self) -> Iterable[BlockId]:
        """Names of whole blocks, parents before children, the last used first."""
        whole = (
            node
            for node in self._shelf.tree
            if node.is_here and not node.is_tail and node.retention.is_on_disk
        )
        for node in heapq.nsmallest(MAX_TOLD, whole, key=lambda node: (-node.used_s, node.index)):
            yield node.id

    def usage(self) -> FingerprintUsage:
        """The use of it now."""
        stats = self._shelf.tree.stats()
        return FingerprintUsage(
            blocks=len(self._shelf.tree),
            used_bytes=stats.ram_bytes + stats.disk_bytes,
            free_bytes=self._pages.free_bytes,
        )

    def _node(self, block_id: BlockId) -> Node[Lying] | None:
        return self._shelf.tree.node(block_id)

    def _is_in_pages(self, block_id: BlockId) -> bool:
        node = self._node(block_id)
        return node is not None and node.in_ram

    def _size(self, node: Node[Lying]) -> int | None:
        if not node.retention.is_on_disk:  # only this machine's memory is to have it
            return None
        if node.payload is not None:
            return node.payload.length
        stored = self._store.block(node.id) if node.stored and self._store is not None else None
        return None if stored is None else stored.payload_bytes


def _fingerprint_of(block: StoredBlock) -> KvFingerprint | None:
    """The fingerprint of a file, if its digest is the file's own."""
    fields: dict[str, Any] = dict(block.facts)
    try:
        fingerprint = KvFingerprint(**fields)
        return fingerprint if fingerprint.exact() == block.fingerprint else None
    except (KakeyaError, TypeError, AttributeError):
        return None
