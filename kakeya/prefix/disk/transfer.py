"""Blocks of KV between pages and disk: every block is written through, and read back when wanted.

Writing lends the pages themselves, pinned, until they are on disk; reading goes straight into
pages, which no request sees before their content was proved. A block that cannot be read is
computed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from kakeya.core.clock import Clock
from kakeya.core.errors import PageFreed
from kakeya.core.units import unpack_ids
from kakeya.generation.retention import BlockClass
from kakeya.memory.pages.pins import Block, Hold
from kakeya.memory.pages.shared_arena import Filling
from kakeya.prefix.disk.kvb import StoredBlock
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.names.blocks import ROOT, BlockId
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.counts import PrefixCounts
from kakeya.prefix.pages.pages import FingerprintBlocks, Lying, PrefixPages
from kakeya.prefix.pages.reach import reach_of
from kakeya.prefix.tree.node import BlockFacts, Node

_AT_ONCE = 8
"""Blocks that are asked for at the same time: twice as many as the store has readers."""
FIRST_RATE = 500e6
"""Bytes a second, until some were read: a slow SSD."""
_SLACK_S = 0.5
"""How much longer than computing a reading may take before it is given up."""
_HANGS_S = 2.0
"""Seconds beyond the time to compute: a disk that is silent for so long is waited for no more."""
_FORGIVING = 1.1
_MAX_TO_WRITE = 4096
_LATER_S = 0.1
"""Seconds without a new block before waiting blocks are written: proofs and flushes take a
processor, and a prompt that is repeated or continued mostly is so at once."""
_LATEST_S = 0.5
_RECALLED = 1024
"""Blocks that a recall looks at, the last used first."""


@dataclass(frozen=True, slots=True)
class _ToWrite:
    """A write that waits, and the block in pages that it makes clean."""

    write: Callable[[], Awaitable[bool]]
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class _Loading:
    """One read of blocks: the shelf that they are for, and the callback that hears of each."""

    shelf: FingerprintBlocks
    naming: Naming
    block_class: BlockClass
    landed: Callable[[BlockId], None]
    is_asked: bool = True  # a request waits, and would rather compute than wait for longer


@dataclass(frozen=True, slots=True)
class Recall:
    """The histories that came back, as token ids, the last used in front.

    `left_bytes` were allowed and not used. `is_cut`: one did not come, for want of pages or by a
    fault of the disk; another try may help.
    """

    histories: list[list[int]]
    left_bytes: int = 0
    is_cut: bool = False


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
        self._rate = FIRST_RATE
        self._asking = 0
        """Requests that wait for blocks."""
        self._is_asked_for_nothing = asyncio.Event()
        self._is_asked_for_nothing.set()

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

    # --- reading

    async def bring(
        self,
        shelf: FingerprintBlocks,
        naming: Naming,
        pieces: Sequence[Piece],
        block_class: BlockClass,
        landed: Callable[[BlockId], None],
    ) -> list[BlockId]:
        """Bring blocks of a history into pages, where that is sooner than computing; which came.

        `landed` is told of each.
        """
        reach = reach_of(shelf, pieces, naming, in_ram=False)
        if not any(node.stored and not node.in_ram for node, _ in reach):
            return []
        node, served = reach[-1]
        is_part = served < naming.block_tokens
        if is_part and not node.in_ram and not self._is_worth(naming, node, served):
            reach = reach[:-1]
        loading = _Loading(shelf, naming, block_class, landed)
        self._asking += 1
        self._is_asked_for_nothing.clear()
        try:
            return await self._load(loading, [node for node, _ in reach])
        finally:
            self._asking -= 1
            if not self._asking:
                self._is_asked_for_nothing.set()

    async def recall(self, shelf: FingerprintBlocks, naming: Naming, nbytes: int) -> Recall:
        """Bring the last used blocks into pages before a request asks.

        Whole histories come, as far as they fit so many bytes without an eviction; none is begun
        while a request waits for the disk.
        """
        ours = (entry for entry in self.store.entries() if entry.block.fingerprint == shelf.seed)
        newest = heapq.nlargest(_RECALLED, ours, key=lambda entry: entry.used_mono)
        loading = _Loading(
            shelf, naming, BlockClass.SPECULATIVE, landed=lambda _: None, is_asked=False
        )
        histories: list[list[int]] = []
        for entry in newest:
            await self._is_asked_for_nothing.wait()
            path = _path(shelf.tree.node(entry.block.id))
            left = sum(node.nbytes for node in path if not node.in_ram)
            if not left or not all(node.is_here for node in path):
                continue
            if left > min(nbytes, self._pages.free_bytes):
                break
            await self._load(loading, path)
            nbytes -= left
            if not path[-1].in_ram:
                return Recall(histories, nbytes, is_cut=True)
            histories.append([one for node in path for one in unpack_ids(node.facts.token_ids)])
        return Recall(histories, nbytes)

    def _is_worth(self, naming: Naming, node: Node[Lying], tokens: int) -> bool:
        """Whether a block is likely to be read before so many tokens of it were computed."""
        compute_s = naming.compute_s(tokens)
        if not compute_s or node.nbytes / self._rate < compute_s:
            return True
        # Nothing is measured while nothing is read: a disk that was busy once is tried again.
        self._rate = min(FIRST_RATE, self._rate * _FORGIVING)
        return False

    async def _load(self, loading: _Loading, nodes: Sequence[Node[Lying]]) -> list[BlockId]:
        """Bring the blocks of a path that are on disk alone, from its beginning.

        Ends early where there are no pages, a file is bad, or computing would be sooner for the
        request.
        """
        naming, path = loading.naming, [node.id for node in nodes]
        wanted = [node for node in nodes if node.stored and not node.in_ram]
        began_mono = self._clock.mono()
        came: list[BlockId] = []
        for start in range(0, len(wanted), _AT_ONCE):
            group = wanted[start : start + _AT_ONCE]
            if loading.is_asked and not self._is_worth(naming, group[0], group[0].tokens):
                break
            done = await self._load_group(loading, path, group)
            came += [node.id for node in group[:done]]
            spent_s = self._clock.mono() - began_mono
            due_s = naming.compute_s(sum(node.tokens for node in wanted[: len(came)])) + _SLACK_S
            is_late = loading.is_asked and naming.compute_s(1) > 0 and spent_s > due_s
            if done < len(group) or is_late:
                break
        return came

    async def _load_group(
        self, loading: _Loading, path: Sequence[BlockId], group: Sequence[Node[Lying]]
    ) -> int:
        blocks: list[StoredBlock] = []
        fillings: list[Filling] = []
        try:
            for node in group:
                block = self.store.block(node.id)
                if block is None:
                    break
                filling = await self._pages.prepare(
                    loading.naming, block.payload_bytes, self._holder, loading.block_class
                )
                if filling is None:
                    break
                blocks.append(block)
                fillings.append(filling)
            began_mono = self._clock.mono()
            read = await self._read(loading.naming, group, fillings)
            self._measure(sum(filling.length for filling in fillings), began_mono)
            count = 0
            for node, block, is_read in zip(group, blocks, read, strict=False):
                if not is_read or not self._commit(loading, path, node, block, fillings.pop(0)):
                    break
                count += 1
            return count
        finally:
            for filling in fillings:
                self._pages.give_back(filling)

    async def _read(
        self, naming: Naming, group: Sequence[Node[Lying]], fillings: Sequence[Filling]
    ) -> Sequence[bool]:
        """Read blocks into pages, those that there are pages for; nothing of a disk that hangs."""
        computed_s = naming.compute_s(sum(node.tokens for node in group))
        try:
            # A group waits for each when it is cancelled: threads write to these pages.
            async with asyncio.timeout(_HANGS_S + computed_s), asyncio.TaskGroup() as readers:
                reading = [
                    readers.create_task(self.store.read_into(node.id, filling.view))
                    for node, filling in zip(group, fillings, strict=False)
                ]
        except TimeoutError:
            return ()
        return [task.result() for task in reading]

    def _commit(
        self,
        loading: _Loading,
        path: Sequence[BlockId],
        node: Node[Lying],
        block: StoredBlock,
        filling: Filling,
    ) -> bool:
        """Let all use a block that was read, or give its pages back; whether it is here now."""
        shelf = loading.shelf
        if not node.stored:  # it was wiped meanwhile
            self._pages.give_back(filling)
            return False
        facts = replace(
            _facts(block, self._pages.arena.paged_bytes(block.payload_bytes)),
            recompute_s=loading.naming.compute_s(node.tokens),
            block_class=loading.block_class,
            retention=node.retention,
        )
        if not self._pages.commit(shelf, path, node.index, filling, facts):
            current = shelf.tree.node(node.id)
            if current is None or not current.in_ram:
                return False
        loading.landed(node.id)
        return True

    def _measure(self, size: int, began_mono: float) -> None:
        spent_s = self._clock.mono() - began_mono
        if size and spent_s > 0:
            self._rate += 0.2 * (size / spent_s - self._rate)

    def _add(self, shelf: FingerprintBlocks, blocks: Sequence[StoredBlock]) -> None:
        now = self._clock.mono()
        for block in sorted(blocks, key=lambda one: one.index):
            parent = None if block.parent == ROOT else block.parent
            nbytes = self._pages.arena.paged_bytes(block.payload_bytes)
            shelf.tree.stored(block.id, parent, _facts(block, nbytes), now)


def _path(node: Node[Lying] | None) -> list[Node[Lying]]:
    """The nodes that lead to a block, and its own, in order."""
    path: list[Node[Lying]] = []
    while node is not None and node.id != ROOT:
        path.append(node)
        node = node.parent
    return path[::-1]


def _facts(block: StoredBlock, nbytes: int) -> BlockFacts:
    """The facts of a block on disk for a tree; the seconds to compute it come later."""
    return BlockFacts(
        token_ids=block.packed_ids,
        nbytes=nbytes,
        has_state=block.has_state,
        retention=block.retention,
    )
