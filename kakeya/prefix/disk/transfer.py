"""Blocks of KV between pages and disk: every block is written through, and read back when wanted
(`read_back`). Writing lends the pages themselves, pinned, until they are on disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from kakeya.core.clock import Clock
from kakeya.core.errors import PageFreed
from kakeya.memory.pages.pins import Block, Hold
from kakeya.prefix.disk.kvb import StoredBlock
from kakeya.prefix.disk.read_back import ReadBack, facts_of
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.names.blocks import ROOT, BlockId
from kakeya.prefix.pages.counts import PrefixCounts
from kakeya.prefix.pages.pages import FingerprintBlocks, Lying, PrefixPages
from kakeya.prefix.tree.node import Node

_MAX_TO_WRITE = 4096
_LATER_S = 0.1
"""Seconds without a new block before waiting blocks are written: proofs and flushes take a
processor, and a prompt that is repeated or continued mostly is so at once."""
_LATEST_S = 0.5


@dataclass(frozen=True, slots=True)
class _ToWrite:
    """A write that waits, and the block in pages that it makes clean."""

    write: Callable[[], Awaitable[bool]]
    block: Block | None = None


class PrefixDisk:
    """See the module; `write` is a supervised task. Lives on the event loop."""

    def __init__(
        self, store: BlockStore, pages: PrefixPages, *, clock: Clock, counts: PrefixCounts
    ) -> None:
        self.store = store
        self._pages = pages
        self._clock = clock
        self._counts = counts
        self._holder = pages.arena.holder("prefixes on their way to disk")
        self._to_write: deque[_ToWrite] = deque()
        self._on_its_way = 0
        self._wake = asyncio.Event()
        self._added_mono = clock.mono()
        self.reading = ReadBack(store, pages, self._holder, clock=clock)

    # --- what is there

    def stock(self, shelf: FingerprintBlocks) -> None:
        """Tell a fresh shelf's tree of its blocks on disk."""
        blocks = [entry.block for entry in self.store.entries()]
        self._add(shelf, [block for block in blocks if block.fingerprint == shelf.seed])

    def stored(self, ids: Collection[BlockId]) -> None:
        """Note that blocks are on disk from now on."""
        by_seed: dict[bytes, list[StoredBlock]] = {}
        for block_id in ids:
            block = self.store.block(block_id)
            if block is not None:
                by_seed.setdefault(block.fingerprint, []).append(block)
        for seed, blocks in by_seed.items():
            shelf = self._pages.find(seed)
            if shelf is not None:
                self._add(shelf, blocks)

    def lost(self, ids: Collection[BlockId]) -> None:
        """Note that blocks are no longer on disk."""
        for shelf in self._pages.shelves():
            for block_id in ids:
                self._pages.unstored(shelf, block_id)

    def renew(self) -> None:
        """Renew the pins of blocks that wait to be written: they are no leaks."""
        for hold in self._holder.holds():
            if hold.pins > 0:
                hold.renew()

    # --- writing

    def keep(self, shelf: FingerprintBlocks, block_id: BlockId) -> None:
        """Have a block written when its turn comes; of too many, the oldest stay in memory only.

        Its pages are dirty until that has happened.
        """
        node = shelf.tree.node(block_id)
        if node is None or node.payload is None:
            return
        block = node.payload.block
        self._pages.arena.mark_dirty(block)
        self._later(_ToWrite(partial(self._put, shelf, block_id), block))

    def keep_payload(self, block: StoredBlock, payload: bytes) -> None:
        """Have a payload written that has a name among the blocks, and lies in no pages."""
        self._later(_ToWrite(partial(self.store.put, block, payload)))

    def forget(self) -> None:
        """Drop all writes that wait."""
        while self._to_write:
            self._clean(self._to_write.popleft().block)

    @property
    def waiting(self) -> int:
        """Blocks that the store has yet to take."""
        return len(self._to_write) + self._on_its_way

    async def write(self) -> None:
        """Hand blocks to the store, a moment after they came, for ever."""
        mono = self._clock.mono
        while True:
            await self._wake.wait()
            self._wake.clear()
            latest_mono = mono() + _LATEST_S
            while (left_s := min(self._added_mono + _LATER_S, latest_mono) - mono()) > 0:
                await self._clock.sleep(left_s)
            await self.flush()

    async def flush(self) -> None:
        """Hand the waiting blocks to the store now."""
        while self._to_write:
            waiting = self._to_write.popleft()
            self._on_its_way += 1
            try:
                if not await waiting.write():
                    self._clean(waiting.block)
            finally:
                self._on_its_way -= 1

    def _later(self, waiting: _ToWrite) -> None:
        if len(self._to_write) == _MAX_TO_WRITE:
            self._clean(self._to_write.popleft().block)
        self._to_write.append(waiting)
        self._added_mono = self._clock.mono()
        self._wake.set()

    async def _put(self, shelf: FingerprintBlocks, block_id: BlockId) -> bool:
        """Hand the store a block as it lies in pages now; False = it is not to be written."""
        node = shelf.tree.node(block_id)
        if node is None or node.payload is None:
            return False
        if node.is_written or not node.retention.is_on_disk:
            return False
        holds = self._pages.hold((node,), self._holder)
        if not holds:
            return False
        try:
            view = self._pages.view(node.payload)
        except PageFreed:
            self._pages.release(holds)
            return False
        released = partial(self._written, holds, view, node.payload.block)
        is_taken = await self.store.put(self._described(shelf, node), view, released)
        self._counts.written += is_taken
        return is_taken

    def _written(self, holds: Sequence[Hold], view: memoryview, block: Block) -> None:
        view.release()
        self._clean(block)
        self._pages.release(holds)

    def _clean(self, block: Block | None) -> None:
        if block is not None:
            self._pages.arena.mark_clean(block)

    def _described(self, shelf: FingerprintBlocks, node: Node[Lying]) -> StoredBlock:
        parent = node.parent.id if node.parent is not None else ROOT
        length = node.payload.length if node.payload else 0
        return StoredBlock(
            id=node.id,
            parent=parent,
            fingerprint=shelf.seed,
            facts=asdict(shelf.fingerprint.condensed()),
            index=node.index,
            packed_ids=node.facts.token_ids,
            payload_bytes=length,
            has_state=node.has_state,
            retention=node.retention,
            created_at=self._clock.wall(),
        )

    def _add(self, shelf: FingerprintBlocks, blocks: Sequence[StoredBlock]) -> None:
        now = self._clock.mono()
        for block in sorted(blocks, key=lambda one: one.index):
            parent = None if block.parent == ROOT else block.parent
            nbytes = self._pages.arena.paged_bytes(block.payload_bytes)
            shelf.tree.stored(block.id, parent, facts_of(block, nbytes), now)
