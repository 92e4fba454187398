"""KV blocks in pages: their places, their order of eviction, and the holds on them.

One tree for each fingerprint says which blocks are here; the arena holds the bytes. The arena may
take any block without a hold, so the trees follow it: blocks that can no longer be reached are
given back a moment later, since the arena is in the middle of its own work when it tells.

The budget is one for all trees, and so is the order in which blocks go for it: the block that is
worth least for its bytes goes first, by the time to compute or read it again, whatever its model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, InvalidArgument, InvariantBroken, OutOfPages, PageFreed
from kakeya.core.log import event
from kakeya.core.units import format_bytes
from kakeya.generation.retention import BlockClass, Retention
from kakeya.memory.pages.content import ContentType
from kakeya.memory.pages.node_arena import NodeArena
from kakeya.memory.pages.pins import Block, Hold, PinHolder
from kakeya.memory.pages.shared_arena import Filling
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.pages.counts import PrefixCounts
from kakeya.prefix.tree.answer import Gone
from kakeya.prefix.tree.eviction import Age
from kakeya.prefix.tree.node import BlockFacts, Node
from kakeya.prefix.tree.tree import PrefixTree

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lying:
    """The pages of a block, and how many bytes of them hold data."""

    block: Block
    length: int


@dataclass(slots=True, eq=False)
class FingerprintBlocks:
    """The blocks of one fingerprint."""

    fingerprint: KvFingerprint
    seed: bytes
    tree: PrefixTree[Lying]
    naming: Naming | None = None
    used_mono: float = 0.0


class PrefixPages:
    """The trees and the pages below them. Lives on the event loop."""

    def __init__(
        self,
        arena: NodeArena,
        *,
        budget_bytes: int,
        clock: Clock,
        counts: PrefixCounts,
        dropped: Callable[[Sequence[BlockId]], None],
        used: Callable[[FingerprintBlocks, Sequence[BlockId], Retention], None],
        opened: Callable[[FingerprintBlocks], None],
    ) -> None:
        """Callbacks for the disk: `dropped` gets blocks that a better one replaced, `used` gets
        uses before they count, `opened` gets fresh shelves."""
        self.arena = arena
        self.budget_bytes = budget_bytes
        self._clock = clock
        self._counts = counts
        self._dropped = dropped
        self._used = used
        self._opened = opened
        self._tenant = arena.tenant(
            ContentType.KV_CACHE, "prefixes", self._evicted, makes_way=self.make_way
        )
        self._age = Age()
        self._shelves: dict[bytes, FingerprintBlocks] = {}
        self._places: dict[Block, tuple[FingerprintBlocks, BlockId]] = {}
        self._leaving: set[Block] = set()
        self._is_sweeping = False
        self._filling_bytes = 0
        self._too_large: set[bytes] = set()
        self.problem = ""
        """Why the last allocation failed; "" = it did not."""

    # --- what there is

    def shelf(self, naming: Naming) -> FingerprintBlocks:
        """The blocks of a naming's fingerprint; an empty shelf is made."""
        shelf = self.shelf_of(naming.fingerprint, naming.seed)
        shelf.naming = naming
        shelf.used_mono = self._clock.mono()
        return shelf

    def shelf_of(self, fingerprint: KvFingerprint, seed: bytes) -> FingerprintBlocks:
        """Find or make the blocks of a fingerprint that no engine of this node has now."""
        shelf = self._shelves.get(seed)
        if shelf is None:
            tree: PrefixTree[Lying] = PrefixTree(fingerprint.block_tokens, age=self._age)
            shelf = self._shelves[seed] = FingerprintBlocks(fingerprint, seed, tree)
            self._opened(shelf)
        return shelf

    def find(self, seed: bytes) -> FingerprintBlocks | None:
        """The shelf with this seed, if there is one."""
        return self._shelves.get(seed)

    def shelves(self) -> tuple[FingerprintBlocks, ...]:
        """All of them."""
        return tuple(self._shelves.values())

    @property
    def used_bytes(self) -> int:
        """The bytes of all blocks, and of pages that are being filled."""
        return self._filling_bytes + sum(shelf.tree.ram_bytes for shelf in self._shelves.values())

    @property
    def free_bytes(self) -> int:
        """The bytes that can be taken without an eviction."""
        return max(0, self.budget_bytes - self.used_bytes)

    @property
    def filling_bytes(self) -> int:
        """The bytes of pages that are being filled."""
        return self._filling_bytes

    @property
    def is_at_rest(self) -> bool:
        """Whether no page is being filled, and no block that left its tree is still held."""
        return not self._filling_bytes and not self._leaving

    def check_integrity(self) -> None:
        """Check that trees and pages agree about each block. Raises InvariantBroken."""
        for block, (shelf, block_id) in self._places.items():
            node = shelf.tree.node(block_id)
            if node is None or node.payload is None or node.payload.block is not block:
                raise InvariantBroken("prefixes", f"{block} is not where its tree has it")
            if not block.is_live or block in self._leaving:
                raise InvariantBroken("prefixes", f"{block} is in a tree, and has left or is free")
        in_trees = sum(shelf.tree.stats().ram_blocks for shelf in self._shelves.values())
        if in_trees != len(self._places) or self._filling_bytes < 0:
            raise InvariantBroken(
                "prefixes",
                f"trees have {in_trees} blocks, pages {len(self._places)}; "
                f"{self._filling_bytes} bytes are being filled",
            )
        self.arena.check_integrity()

    # --- filling

    async def prepare(
        self,
        naming: Naming,
        length: int,
        holder: PinHolder,
        block_class: BlockClass = BlockClass.USER,
    ) -> Filling | None:
        """Pages for a block of `length` bytes; None = there are none now, or it is too long.

        The class BATCH evicts none of other classes. End it by `commit` or `give_back`.
        """
        if length > self.arena.largest_block_bytes:
            self._say_too_large(naming, length)
            return None
        size = self.arena.paged_bytes(length)
        if not self._make_room(size, block_class):
            return None
        self._filling_bytes += size
        try:
            filling = await self.arena.prepare(self._tenant, length, holder)
        except (OutOfPages, PageFreed) as refused:
            self._filling_bytes -= size
            self.problem = refused.message
            event(_log, "no pages for KV", level=logging.DEBUG, reason=refused.message)
            return None
        except BaseException:
            self._filling_bytes -= size
            raise
        self.problem = ""
        return filling

    def give_back(self, filling: Filling) -> None:
        """Give back pages that were not filled."""
        self._filling_bytes -= self.arena.paged_bytes(filling.length)
        filling.rollback()
        self._counts.rolled_back += 1

    def commit(
        self,
        shelf: FingerprintBlocks,
        ids: Sequence[BlockId],
        index: int,
        filling: Filling,
        facts: BlockFacts,
    ) -> bool:
        """Let all use a filled block, `ids[index]`; False = it was not needed, or cannot be."""
        length = filling.length
        node = shelf.tree.node(ids[index])
        if node is not None and node.in_ram_serves(facts):  # another request was first
            self.give_back(filling)
            return False
        self._filling_bytes -= self.arena.paged_bytes(length)
        try:
            filling.commit()
        except (PageFreed, Conflict):  # its engine ended meanwhile
            self._counts.rolled_back += 1
            return False
        lying = Lying(filling.block, length)
        now = self._clock.mono()
        grain = shelf.naming.grain(index) if shelf.naming is not None else 1
        try:
            taken = shelf.tree.insert(ids, index, lying, facts, now, grain=grain)
        except InvalidArgument:
            self._free(lying.block)
            raise
        if not taken:
            self._counts.rolled_back += 1
            self._free(lying.block)
            return False
        if taken.replaced is not None:
            self._places.pop(taken.replaced.block, None)
            self._free(taken.replaced.block)
        self._places[lying.block] = shelf, ids[index]
        self._counts.committed += 1
        self._let_go(taken.dropped, forgets=True)
        return True

    # --- using

    def hold(self, nodes: Iterable[Node[Lying]], holder: PinHolder) -> list[Hold]:
        """Pin the first of these that are still there, in order; end each by `release`."""
        holds: list[Hold] = []
        for node in nodes:
            if node.payload is None:
                break
            try:
                hold = self.arena.hold(node.payload.block, holder)
                hold.pin()
            except PageFreed:
                break
            holds.append(hold)
        return holds

    def release(self, holds: Sequence[Hold]) -> None:
        """End pins, the hindmost first: so the beginning of a prefix is the youngest."""
        for hold in reversed(holds):
            self.arena.at_now()
            if hold.pins > 0:  # not when the holder died meanwhile
                hold.unpin()
        if self._leaving:
            self._sweep_soon()

    def touch(
        self,
        shelf: FingerprintBlocks,
        ids: Sequence[BlockId],
        *,
        block_class: BlockClass,
        retention: Retention,
    ) -> None:
        """Note a use of a prefix, here and on disk."""
        now = self._clock.mono()
        self._used(shelf, ids, retention)
        shelf.tree.touch(ids, now, block_class=block_class, retention=retention)

    def view(self, lying: Lying) -> memoryview:
        """The bytes of a block that is held. Raises PageFreed."""
        return self.arena.view(lying.block, lying.length)

    # --- leaving

    def clear(self) -> int:
        """Take out all blocks; how many. A held block goes when its last hold ends."""
        count = 0
        for shelf in self.shelves():
            here = [node for node in shelf.tree if node.in_ram]
            count += len(here)
            for node in sorted(here, key=lambda node: -node.index):
                self.lose(shelf, node.id, for_room=False)
        return count

    def lose(self, shelf: FingerprintBlocks, block_id: BlockId, *, for_room: bool) -> None:
        """Take a block out of the pages, and the blocks that cannot be reached without it."""
        node = shelf.tree.node(block_id)
        if node is None or node.payload is None:
            return
        block = node.payload.block
        gone = shelf.tree.lose(block_id, for_room=for_room)
        self._places.pop(block, None)
        self._free(block)
        self._let_go(gone)

    def unstored(self, shelf: FingerprintBlocks, block_id: BlockId) -> None:
        """Note that a block is no longer on disk."""
        self._let_go(shelf.tree.unstored(block_id))

    def expire(self) -> int:
        """Take out blocks that were unused for longer than their retention; how many."""
        now, count = self._clock.mono(), 0
        for shelf in self.shelves():
            for node in shelf.tree.expired(now):
                self.lose(shelf, node.id, for_room=False)
                count += 1
        self._sweep()
        return count

    def _make_room(self, size: int, block_class: BlockClass) -> bool:
        """Evict until `size` fits the budget; False = too much of it is in use, or of use."""
        over = self.used_bytes + size - self.budget_bytes
        if over > 0:
            for shelf, node in self._victims(over):
                if BlockClass.BATCH is block_class is not node.block_class:
                    return False
                self._counts.evicted += 1
                self.lose(shelf, node.id, for_room=True)
        return self.used_bytes + size <= self.budget_bytes

    def _victims(self, nbytes: int) -> Iterator[tuple[FingerprintBlocks, Node[Lying]]]:
        """Choose victims from all trees: of the next one of each tree, the one of least worth."""
        plans = [(shelf, shelf.tree.victims(nbytes)) for shelf in self._shelves.values()]
        queues = [(shelf, list(reversed(plan))) for shelf, plan in plans if plan]
        while nbytes > 0 and queues:
            shelf, queue = min(queues, key=lambda pair: pair[0].tree.worth(pair[1][-1]))
            node = queue.pop()
            nbytes -= node.nbytes
            yield shelf, node
            queues = [pair for pair in queues if pair[1]]

    def make_way(self, most_bytes: int) -> int:
        """Evict the block of least worth, unless it is larger, in use, or not on disk yet; how many
        bytes that frees."""
        for shelf, node in self._victims(1):
            block = node.payload.block if node.payload is not None else None
            if block is None or block.dirty or block.is_pinned or node.nbytes > most_bytes:
                return 0
            self._counts.evicted += 1
            self.lose(shelf, node.id, for_room=True)
            return node.nbytes
        return 0

    def _evicted(self, block: Block) -> None:
        """Note that the arena evicted a block."""
        if block in self._leaving:
            self._leaving.discard(block)
            return
        found = self._places.pop(block, None)
        if found is None:
            return
        self._counts.evicted += 1
        shelf, block_id = found
        self._let_go(shelf.tree.lose(block_id), later=True)

    def _let_go(
        self, gone: Iterable[Gone[Lying]], *, forgets: bool = False, later: bool = False
    ) -> None:
        """Give back blocks that left a tree; not at once where the arena is at work."""
        for one in gone:
            if one.payload is not None:
                self._places.pop(one.payload.block, None)
                if later:
                    self._leaving.add(one.payload.block)
                else:
                    self._free(one.payload.block)
            if forgets and one.stored:
                self._dropped((one.id,))
        if later and self._leaving:
            self._sweep_soon()

    def _free(self, block: Block) -> None:
        if not block.is_live:
            return
        if block.is_pinned:
            self._leaving.add(block)
        else:
            self.arena.free(block)

    def _sweep_soon(self) -> None:
        if not self._is_sweeping:
            self._is_sweeping = True
            asyncio.get_running_loop().call_soon(self._sweep)

    def _sweep(self) -> None:
        """Give back blocks that left a tree and are no longer pinned."""
        self._is_sweeping = False
        leaving, self._leaving = self._leaving, set()
        for block in leaving:
            self._free(block)

    def _say_too_large(self, naming: Naming, length: int) -> None:
        if naming.seed not in self._too_large:
            self._too_large.add(naming.seed)
            event(
                _log,
                "prompts of this model are not kept: one block of KV is larger than pages allow",
                level=logging.WARNING,
                model=naming.fingerprint.model_id,
                block=format_bytes(length),
                largest=format_bytes(self.arena.largest_block_bytes),
            )
