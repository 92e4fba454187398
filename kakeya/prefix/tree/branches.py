"""The shape of a tree of prefixes: parents and children, places, and sums.

It keeps two laws by itself: a block in RAM can be reached from the beginning (all before it are in
RAM or on disk), and a block that is nowhere is forgotten, unless it has children. The tree above it
decides which blocks come and go.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic

from kakeya.prefix.names.blocks import ROOT, BlockId, shared_tokens
from kakeya.prefix.tree.answer import Gone
from kakeya.prefix.tree.eviction import EvictionOrder
from kakeya.prefix.tree.node import BlockFacts, Node, P


class Branches(Generic[P]):
    """All nodes of one tree, below a root that is no block."""

    __slots__ = ("disk_blocks", "disk_bytes", "nodes", "order", "ram_blocks", "ram_bytes", "root")

    def __init__(self, order: EvictionOrder[P]) -> None:
        no_block = BlockFacts(token_ids=bytes(4), nbytes=1)
        self.root: Node[P] = Node(ROOT, None, no_block, is_tail=False)
        self.nodes: dict[BlockId, Node[P]] = {}
        self.order = order
        self.ram_blocks = self.ram_bytes = 0
        self.disk_blocks = self.disk_bytes = 0

    def at(self, block_id: BlockId | None) -> Node[P] | None:
        """Find a block, None = the root."""
        return self.root if block_id is None else self.nodes.get(block_id)

    def is_reached(self, node: Node[P]) -> bool:
        """Whether a block and all before it are here."""
        while node.parent is not None and not node.in_ram:
            if not node.stored:
                return False
            node = node.parent
        return True

    def add(
        self, block_id: BlockId, parent: Node[P], facts: BlockFacts, *, is_tail: bool
    ) -> Node[P]:
        """Make a node, which is nowhere yet."""
        node = Node(block_id, parent, facts, is_tail=is_tail)
        self.nodes[block_id] = node
        insort(parent.children, node, key=_tokens)
        if is_tail:
            parent.tails.append(node)
        return node

    def put_in(self, node: Node[P], payload: P, facts: BlockFacts) -> None:
        """Have a block in RAM, which was not."""
        node.payload = payload
        node.facts = facts
        self.ram_blocks += 1
        self.ram_bytes += node.nbytes
        self.order.file(node)
        above, is_new = node.parent, not node.live_children
        while is_new and above is not None:
            is_new = not above.is_live
            above.live_children += 1
            self.order.file(above)
            above = above.parent

    def replace(self, node: Node[P], payload: P, facts: BlockFacts) -> P | None:
        """Replace the payload of a block in RAM; returns the earlier one."""
        before, node.payload = node.payload, payload
        self.ram_bytes += facts.nbytes - node.nbytes
        node.facts = facts
        self.order.file(node)
        return before

    def take_out(self, node: Node[P]) -> None:
        """Have a block no longer in RAM, which was; `settle` comes next."""
        node.payload = None
        self.ram_blocks -= 1
        self.ram_bytes -= node.nbytes
        node.facts = node.on_disk or node.facts
        self.order.file(node)
        above, was_last = node.parent, not node.live_children
        while was_last and above is not None:
            above.live_children -= 1
            self.order.file(above)
            was_last = not above.is_live
            above = above.parent

    def put_on_disk(self, node: Node[P], facts: BlockFacts) -> None:
        """Note that a block is on disk, in place of its earlier file."""
        self._count_off_disk(node)
        node.on_disk = facts
        self.disk_blocks += 1
        self.disk_bytes += facts.nbytes
        if not node.in_ram:
            node.facts = facts
        self.order.file(node)

    def take_off_disk(self, node: Node[P]) -> None:
        """Have a block no longer on disk; `settle` comes next."""
        self._count_off_disk(node)
        node.on_disk = None
        self.order.file(node)

    def settle(self, node: Node[P]) -> tuple[Gone[P], ...]:
        """Take out blocks that cannot be reached after one left, and forget blocks that are
        nowhere: children before their parents.
        """
        below: list[Node[P]] = []
        if not node.is_here:
            stack = list(node.children)
            while stack:
                child = stack.pop()
                if child.is_live:
                    below.append(child)
                    stack.extend(child.children)
        gone = []
        for child in reversed(below):
            if child.in_ram:
                gone.append(Gone(child.id, child.payload, child.stored))
                self.take_out(child)
            self._prune(child)
        self._prune(node)
        return tuple(gone)

    def drop(self, leaf: Node[P]) -> Gone[P]:
        """Forget a block without children, wherever it is."""
        gone = Gone(leaf.id, leaf.payload, leaf.stored)
        if leaf.in_ram:
            self.take_out(leaf)
        if leaf.stored:
            self.take_off_disk(leaf)
        self._prune(leaf)
        return gone

    def _count_off_disk(self, node: Node[P]) -> None:
        if node.on_disk is not None:
            self.disk_blocks -= 1
            self.disk_bytes -= node.on_disk.nbytes

    def _prune(self, node: Node[P]) -> None:
        """Forget a block that is nowhere and has no children, and those above it likewise."""
        above = node.parent
        while above is not None and not node.is_here and not node.children:
            if self.nodes.pop(node.id, None) is None:
                return
            near = bisect_left(above.children, _tokens(node), key=_tokens)
            del above.children[above.children.index(node, near)]
            if node.is_tail:
                above.tails.remove(node)
            node, above = above, above.parent


def alike(parent: Node[P], wanted: bytes) -> Iterator[tuple[int, Node[P]]]:
    """Go through the children that begin as `wanted` does, with how many tokens; most first."""
    children = parent.children
    right = bisect_left(children, wanted, key=_tokens)
    left = right - 1
    on_left = shared_tokens(_tokens(children[left]), wanted) if left >= 0 else 0
    on_right = shared_tokens(_tokens(children[right]), wanted) if right < len(children) else 0
    # The further away in this order, the less is shared.
    while on_left or on_right:
        if on_right >= on_left:
            yield on_right, children[right]
            right += 1
            on_right = (
                shared_tokens(_tokens(children[right]), wanted) if right < len(children) else 0
            )
        else:
            yield on_left, children[left]
            left -= 1
            on_left = shared_tokens(_tokens(children[left]), wanted) if left >= 0 else 0


def beginning_with(parent: Node[P], wanted: bytes) -> Iterator[Node[P]]:
    """Go through the children of which `wanted` is the beginning, or all."""
    children = parent.children
    for place in range(bisect_left(children, wanted, key=_tokens), len(children)):
        if not _tokens(children[place]).startswith(wanted):
            return
        yield children[place]


def _tokens(node: Node[P]) -> bytes:
    return node.facts.token_ids
