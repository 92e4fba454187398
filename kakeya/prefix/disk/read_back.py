"""Blocks of KV from disk into pages: for a request, where that is sooner than computing them, or
before one asks.

Reading goes straight into pages, which no request sees before their content was proved. A block
that cannot be read is computed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kakeya.core.clock import Clock
from kakeya.core.units import unpack_ids
from kakeya.generation.retention import BlockClass
from kakeya.memory.pages.pins import PinHolder
from kakeya.memory.pages.shared_arena import Filling
from kakeya.prefix.disk.kvb import StoredBlock
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.names.blocks import ROOT, BlockId
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece
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
_RECALLED = 1024
"""Blocks that a recall looks at, the last used first."""


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


class ReadBack:
    """See the module. Lives on the event loop."""

    def __init__(
        self, store: BlockStore, pages: PrefixPages, holder: PinHolder, *, clock: Clock
    ) -> None:
        self._store = store
        self._pages = pages
        self._holder = holder
        self._clock = clock
        self._rate = FIRST_RATE
        self._asking = 0
        """Requests that wait for blocks."""
        self._is_asked_for_nothing = asyncio.Event()
        self._is_asked_for_nothing.set()

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
        ours = (entry for entry in self._store.entries() if entry.block.fingerprint == shelf.seed)
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
                block = self._store.block(node.id)
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
                    readers.create_task(self._store.read_into(node.id, filling.view))
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
            facts_of(block, self._pages.arena.paged_bytes(block.payload_bytes)),
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


def _path(node: Node[Lying] | None) -> list[Node[Lying]]:
    """The nodes that lead to a block, and its own, in order."""
    path: list[Node[Lying]] = []
    while node is not None and node.id != ROOT:
        path.append(node)
        node = node.parent
    return path[::-1]


def facts_of(block: StoredBlock, nbytes: int) -> BlockFacts:
    """The facts of a block on disk for a tree; the seconds to compute it come later."""
    return BlockFacts(
        token_ids=block.packed_ids,
        nbytes=nbytes,
        has_state=block.has_state,
        retention=block.retention,
    )
