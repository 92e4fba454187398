"""Which block leaves RAM first: greedy dual-size-frequency over the leaves of trees.

    H = clock at its last use  +  weight of its class * uses * seconds to have it again / MiB

The lowest H goes first, and the clock then moves to that H: an unused block falls behind later
ones, however much it was worth (Cherkasova, "Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy"). Only leaves can go, so parents come after their last
child. A block on disk costs no more than its read. Blocks of the class BATCH go before all others,
by the same H.

Trees that share a budget share one clock, `Age`, so that their blocks can be compared: a second of
prefill is worth the same in each.

Leaves lie in a heap. An entry is never corrected in place: a leaf that changes is filed anew, and
an entry that is no longer its node's is dropped when it is met.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic

from kakeya.core.units import MIB
from kakeya.generation.retention import BlockClass
from kakeya.prefix.tree.node import Node, P

TAIL_SHARE = 0.5
"""Of two alike the tail goes first: only a repeated prompt finds it."""
_SLACK = 64  # entries beside two of each block before a heap is put in order

_Entry = tuple[float, int, Node[P]]  # H, order of filing, node


@dataclass(slots=True)
class Age:
    """The clock: the H of the last block that was evicted for room, in any of the trees that share
    it."""

    now: float = 0.0


class EvictionOrder(Generic[P]):
    """The leaves of one tree, in the order in which they go."""

    __slots__ = ("_age", "_disk_bytes_per_s", "_heap", "_numbers")

    def __init__(self, disk_bytes_per_s: float, age: Age) -> None:
        self._age = age
        self._disk_bytes_per_s = disk_bytes_per_s
        self._heap: list[_Entry[P]] = []
        self._numbers = count()

    @property
    def clock(self) -> float:
        """The H of the last eviction."""
        return self._age.now

    def worth(self, node: Node[P]) -> float:
        """The order of a node: its H; of the class BATCH in -1..0, in the order of their H."""
        h = self._h(node)
        return -1 / (1 + h) if node.block_class is BlockClass.BATCH else h

    def _h(self, node: Node[P]) -> float:
        seconds = node.facts.recompute_s
        if node.is_written:
            seconds = min(seconds, node.nbytes / self._disk_bytes_per_s)
        weight = node.block_class.weight * (TAIL_SHARE if node.is_tail else 1.0)
        return node.clock + weight * node.uses * seconds * MIB / node.nbytes

    def file(self, node: Node[P]) -> None:
        """Note that a node changed: it may go now, or no longer, or at another time."""
        if not node.may_go:
            node.entry = None
            return
        entry = (self.worth(node), next(self._numbers), node)
        node.entry = entry
        heappush(self._heap, entry)

    def went(self, node: Node[P]) -> None:
        """Move the clock on, as this node goes for want of room."""
        if node.may_go:
            self._age.now = max(self._age.now, self._h(node))

    def tidy(self, nodes: int) -> None:
        """Leave one entry of each leaf, once there are over two of each of so many nodes."""
        if len(self._heap) > 2 * nodes + _SLACK:
            self._heap[:] = [entry for entry in self._heap if entry[2].entry is entry]
            heapify(self._heap)

    def plan(self, nbytes: int) -> list[Node[P]]:
        """Choose blocks to evict for so many bytes, children before parents; fewer where no more
        may go."""
        chosen: list[Node[P]] = []
        bared: list[_Entry[P]] = []  # parents whose last child in RAM is chosen
        children: dict[Node[P], int] = {}
        kept: list[_Entry[P]] = []
        while nbytes > 0:
            entry = self._lowest(bared, kept)
            if entry is None:
                break
            node = entry[2]
            chosen.append(node)
            nbytes -= node.nbytes
            if (above := bare(node, children)) is not None:
                heappush(bared, (self.worth(above), next(self._numbers), above))
        for entry in kept:
            heappush(self._heap, entry)
        return chosen

    def _lowest(self, bared: list[_Entry[P]], kept: list[_Entry[P]]) -> _Entry[P] | None:
        """Take the lowest entry; one of the heap is noted in `kept`, to be put back."""
        heap = self._heap
        while heap and heap[0][2].entry is not heap[0]:
            heappop(heap)
        if bared and (not heap or bared[0] < heap[0]):
            return heappop(bared)
        if not heap:
            return None
        kept.append(heappop(heap))
        return kept[-1]


def bare(node: Node[P], children: dict[Node[P], int]) -> Node[P] | None:
    """Find the node above that may go once `node` has: its other children are not in RAM.

    `children` counts, of nodes with a child that goes, those that stay live.
    """
    above = node.parent
    while above is not None:
        left = children[above] = children.get(above, above.live_children) - 1
        if left or above.pins:
            return None
        if above.in_ram:
            return above
        above = above.parent
    return None
