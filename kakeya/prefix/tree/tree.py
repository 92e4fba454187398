"""Which blocks of KV are here, as a tree of prefixes; pure: it holds no bytes and reads no clock.

A node is one block. Its id names its whole prefix, so a lookup is one dictionary access a block. A
block is in RAM (a payload of its owner), on disk, both, or neither; a node in neither is only kept
while it has children, and nothing is found behind it.

Laws that hold at any time:

    - each block in RAM can be reached: all before it are in RAM or on disk
    - a tail (fewer tokens than a block) has no children, and a block at most `MAX_TAILS` of them,
      but for those that are pinned
    - a pinned prefix is pinned from its beginning

A change that takes blocks away returns them, so that their owner frees their payloads. Texts are
marked: see `cuts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic

from kakeya.core.errors import InvalidArgument
from kakeya.generation.cuts import last_place, usable
from kakeya.generation.retention import BlockClass, Retention, weightier
from kakeya.prefix.names.blocks import BlockId, check_block_tokens
from kakeya.prefix.tree.answer import Gone, Insertion, Match, Pin, TreeStats
from kakeya.prefix.tree.branches import Branches, alike, beginning_with
from kakeya.prefix.tree.eviction import Age, EvictionOrder, bare
from kakeya.prefix.tree.node import BlockFacts, Node, P

MAX_TAILS = 16
"""Behind one block: conversations that share a system prompt part behind the same one."""
DISK_BYTES_PER_S = 1e9
"""Bytes a second that an SSD reads, with checksums verified, where nothing was measured."""


class PrefixTree(Generic[P]):
    """The blocks of one fingerprint. Times are monotonic seconds; ids are of chains of one seed."""

    def __init__(
        self,
        block_tokens: int,
        *,
        disk_bytes_per_s: float = DISK_BYTES_PER_S,
        age: Age | None = None,
    ) -> None:
        """`age` is shared by trees whose blocks go for one budget; None = this tree is alone."""
        check_block_tokens(block_tokens)
        self.block_tokens = block_tokens
        self._order: EvictionOrder[P] = EvictionOrder(disk_bytes_per_s, age or Age())
        self._branches = Branches(self._order)
        self._nodes = self._branches.nodes

    # --- questions

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node[P]]:
        return iter(self._nodes.values())

    @property
    def ram_bytes(self) -> int:
        """The bytes of its blocks in RAM."""
        return self._branches.ram_bytes

    def node(self, block_id: BlockId) -> Node[P] | None:
        """Find the node of a block."""
        return self._nodes.get(block_id)

    def match(self, ids: Sequence[BlockId], *, needs_state: bool = False) -> Match[P]:
        """Find the longest prefix; with `needs_state` such that a recurrent model can go on."""
        found: list[Node[P]] = []
        depth_ram = 0
        for block_id in ids:
            node = self._nodes.get(block_id)
            if node is None or not node.is_here:
                break
            if node.in_ram and depth_ram == len(found):
                depth_ram += 1
            found.append(node)
        if needs_state:
            depth_ram = _with_state(found, depth_ram)
            del found[_with_state(found, len(found)) :]
        return Match(depth_ram, len(found), tuple(found))

    def tail(
        self,
        parent: BlockId | None,
        wanted: bytes,
        *,
        needs_state: bool = False,
        grain: int = 1,
        in_ram: bool = False,
    ) -> tuple[BlockId, int] | None:
        """Find the block behind `parent` (None: the first) from which most of a text is of use.

        A tail or a whole one, in RAM rather than on disk; its id, and how many tokens serve a text
        of which pieces end each `grain` tokens. With `needs_state` all of its tokens do, as a
        recurrent model goes on from its end only. `in_ram`: nothing else is of interest.
        """
        above = self._branches.at(parent)
        if above is None or not self._branches.is_reached(above):
            return None
        if needs_state:
            return _whole(above, wanted, grain, in_ram=in_ram)
        best: Node[P] | None = None
        most = 0
        for shared, child in alike(above, wanted):
            # The further one goes, the less is shared: no more than a place of ours can serve.
            if last_place(wanted, shared, grain) < most + (best is None or best.in_ram):
                break
            if not child.in_ram and (in_ram or not child.stored):
                continue
            serves = usable(wanted, child.facts.token_ids, shared, grain)
            if serves > most or (serves == most and best and child.in_ram > best.in_ram):
                best, most = child, serves
        return None if best is None else (best.id, most)

    def victims(self, nbytes: int) -> list[Node[P]]:
        """Choose blocks to leave RAM for so many bytes: free each, in this order, and `lose` it.

        No pinned block is chosen, nor one with a block behind it that stays; fewer where no more
        may go.
        """
        return self._order.plan(nbytes)

    def worth(self, node: Node[P]) -> float:
        """The worth of a block: the lowest goes first, of all trees that share an age."""
        return self._order.worth(node)

    def expired(self, now: float) -> list[Node[P]]:
        """Find blocks in RAM that were unused for longer than their retention, the hindmost
        first."""
        unseen = [
            node
            for node in self
            if now - node.used_s > node.retention.seconds and node.in_ram and not node.pins
        ]
        unseen.sort(key=lambda node: node.index, reverse=True)
        found: list[Node[P]] = []
        children: dict[Node[P], int] = {}
        for node in unseen:
            if not children.get(node, node.live_children):
                found.append(node)
                bare(node, children)
        return found

    def stats(self) -> TreeStats:
        """Count once."""
        return TreeStats(
            ram_blocks=self._branches.ram_blocks,
            ram_bytes=self._branches.ram_bytes,
            disk_blocks=self._branches.disk_blocks,
            disk_bytes=self._branches.disk_bytes,
            pinned_blocks=sum(1 for node in self if node.pins),
            tails=sum(1 for node in self if node.is_tail),
        )

    # --- changes

    def insert(
        self,
        ids: Sequence[BlockId],
        index: int,
        payload: P,
        facts: BlockFacts,
        now: float,
        *,
        grain: int = 1,
    ) -> Insertion[P]:
        """Take the block `ids[index]`, which lies in RAM now, behind `ids[index - 1]`.

        Refused, and then the owner frees the payload: when all of it is in RAM already, when the
        one before it is not here, or for a tail of which all is in RAM in another block. One that
        brings the state that is missing takes the place of what is in RAM. A tail that this block
        has all of leaves, unless it carries state. A block has all of another text if it begins
        with it, and a piece ends there: at a cut, and each `grain` tokens. Raises InvalidArgument.
        """
        if not 0 <= index < len(ids):
            raise InvalidArgument(f"block {index} of {len(ids)} ids; there is none")
        self._check(facts)
        parent = self._branches.at(ids[index - 1] if index else None)
        if parent is None or parent.is_tail or not self._branches.is_reached(parent):
            return Insertion(taken=False)
        node = self._nodes.get(ids[index])
        _check_same(node, parent, facts)
        if node is not None and node.in_ram_serves(facts):
            return Insertion(taken=False)
        if self._is_covered(parent, facts, grain):
            return Insertion(taken=False)
        node = node or self._add(ids[index], parent, facts)
        self._learn(node, facts, now)
        replaced = None
        if node.in_ram:
            replaced = self._branches.replace(node, payload, facts)
        else:
            self._branches.put_in(node, payload, facts)
        self._order.tidy(len(self._nodes))
        return Insertion(taken=True, dropped=self._make_way(node, grain), replaced=replaced)

    def stored(
        self, block_id: BlockId, parent: BlockId | None, facts: BlockFacts, now: float
    ) -> bool:
        """Note that a block is on disk, in place of its earlier file; refused while the one before
        it is not known, or for one tail too many. Raises InvalidArgument.
        """
        self._check(facts)
        above = self._branches.at(parent)
        node = self._nodes.get(block_id)
        if above is None or above.is_tail:
            return False
        _check_same(node, above, facts)
        if node is None and self._is_tail(facts) and len(above.tails) >= MAX_TAILS:
            return False
        if node is None or not node.is_here:
            node = node or self._add(block_id, above, facts)
            self._learn(node, facts, now)
        self._branches.put_on_disk(node, facts)
        return True

    def unstored(self, block_id: BlockId) -> tuple[Gone[P], ...]:
        """Note that a block is no longer on disk; blocks that can no longer be reached leave
        RAM."""
        node = self._nodes.get(block_id)
        if node is None or not node.stored:
            return ()
        self._branches.take_off_disk(node)
        return self._branches.settle(node)

    def lose(self, block_id: BlockId, *, for_room: bool = True) -> tuple[Gone[P], ...]:
        """Note that a block left RAM; blocks that can no longer be reached leave with it.

        `for_room`: it went as room was wanted, which ages all others. Unknown ids are fine.
        """
        node = self._nodes.get(block_id)
        if node is None or not node.in_ram:
            return ()
        if for_room:
            self._order.went(node)
        self._branches.take_out(node)
        return self._branches.settle(node)

    def touch(
        self,
        ids: Sequence[BlockId],
        now: float,
        *,
        block_class: BlockClass = BlockClass.SPECULATIVE,
        retention: Retention = Retention.SHORT,
    ) -> tuple[Node[P], ...]:
        """Note a use of a prefix; a heavier class and a longer window stay with it.

        Returns its nodes in RAM, the hindmost first: in this order an owner that keeps its own ages
        makes the beginning the youngest, so that the end goes before it.
        """
        used: list[Node[P]] = []
        for block_id in ids:
            node = self._nodes.get(block_id)
            if node is None:
                break
            node.used_s = max(node.used_s, now)
            node.uses += 1
            node.clock = self._order.clock
            node.block_class = weightier(node.block_class, block_class)
            node.retention = max(node.retention, retention)
            self._order.file(node)
            if node.in_ram:
                used.append(node)
        self._order.tidy(len(self._nodes))
        return tuple(reversed(used))

    def pin(self, ids: Sequence[BlockId]) -> Pin[P] | None:
        """Keep a prefix in RAM; None, and nothing is kept, unless all of it is there."""
        nodes = tuple(self._nodes[block_id] for block_id in ids if block_id in self._nodes)
        if len(nodes) < len(ids) or not all(node.in_ram for node in nodes):
            return None
        above = self._branches.root
        for node in nodes:
            if node.parent is not above:
                raise InvalidArgument(f"{node} is not behind {above}; pin from the beginning on")
            above = node
        return Pin(nodes, self._order)

    # --- its parts

    def _check(self, facts: BlockFacts) -> None:
        if facts.tokens > self.block_tokens:
            raise InvalidArgument(
                f"a block of {facts.tokens} tokens; those of this tree have {self.block_tokens}"
            )

    def _is_tail(self, facts: BlockFacts) -> bool:
        return facts.tokens < self.block_tokens

    def _is_covered(self, parent: Node[P], facts: BlockFacts, grain: int) -> bool:
        """Whether all of a tail that is not in RAM is in a block that is."""
        if not self._is_tail(facts) or facts.has_state:
            return False
        others = beginning_with(parent, facts.token_ids)
        return any(other.in_ram and _has_all(other, facts, grain) for other in others)

    def _add(self, block_id: BlockId, parent: Node[P], facts: BlockFacts) -> Node[P]:
        return self._branches.add(block_id, parent, facts, is_tail=self._is_tail(facts))

    def _learn(self, node: Node[P], facts: BlockFacts, now: float) -> None:
        """Take over the facts of a block, but for those of its place."""
        node.block_class = weightier(node.block_class, facts.block_class)
        node.retention = max(node.retention, facts.retention)
        node.used_s = max(node.used_s, now)
        node.clock = self._order.clock

    def _make_way(self, node: Node[P], grain: int) -> tuple[Gone[P], ...]:
        """Drop the tails that `node` makes needless, and the oldest of too many."""
        if node.parent is None:
            return ()
        tails = node.parent.tails
        # A pin is on blocks in RAM: of one that was lost all the same it keeps no copy on disk.
        others = [tail for tail in tails if tail is not node and not (tail.in_ram and tail.pins)]
        going = [
            tail for tail in others if not tail.has_state and _has_all(node, tail.facts, grain)
        ]
        surplus = len(tails) - len(going) - MAX_TAILS
        if node.is_tail and surplus > 0:
            left = (tail for tail in others if tail not in going)
            going += sorted(left, key=lambda tail: tail.used_s)[:surplus]
        return tuple(self._branches.drop(tail) for tail in going)


def _check_same(node: Node[P] | None, parent: Node[P], facts: BlockFacts) -> None:
    """Refuse another block under the id of one that is known: ids name tokens and all before."""
    if node is None:
        return
    if node.parent is not parent:
        raise InvalidArgument(f"{node} is not behind {parent}, but behind {node.parent}")
    if node.facts.token_ids != facts.token_ids:
        raise InvalidArgument(f"{node} comes with other tokens than it has")


def _has_all(node: Node[P], other: BlockFacts, grain: int) -> bool:
    """Whether a block serves as well as one with this text does."""
    ours, theirs = other.token_ids, node.facts.token_ids
    if not theirs.startswith(ours):
        return False
    return usable(ours, theirs, other.tokens, grain) == other.tokens


def _whole(
    parent: Node[P], wanted: bytes, grain: int, *, in_ram: bool
) -> tuple[BlockId, int] | None:
    """Find the longest child with state that ends where a piece of `wanted` does."""
    same = (child for child in beginning_with(parent, wanted) if child.facts.token_ids == wanted)
    fitting = [
        child
        for child in (*parent.tails, *same)
        if (child.in_ram or (child.stored and not in_ram))
        and child.has_state
        and wanted.startswith(child.facts.token_ids)
        and last_place(wanted, child.tokens, grain) == child.tokens
    ]
    best = max(fitting, key=lambda child: (child.tokens, child.in_ram), default=None)
    return None if best is None else (best.id, best.tokens)


def _with_state(nodes: Sequence[Node[P]], depth: int) -> int:
    """Cut a depth back to the hindmost block that carries state."""
    while depth and not nodes[depth - 1].has_state:
        depth -= 1
    return depth
