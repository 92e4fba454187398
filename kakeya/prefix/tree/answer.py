"""The answers of a tree of prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.tree.eviction import EvictionOrder
from kakeya.prefix.tree.node import Node, P


@dataclass(frozen=True, slots=True)
class Match(Generic[P]):
    """The longest prefix that is here: `depth_ram` blocks from RAM alone, `depth_disk` with disk.

    `nodes` are the `depth_disk` first ones.
    """

    depth_ram: int
    depth_disk: int
    nodes: tuple[Node[P], ...]


@dataclass(frozen=True, slots=True)
class Gone(Generic[P]):
    """A block that left: its payload, None where it had none, and whether it is on disk."""

    id: BlockId
    payload: P | None
    stored: bool


@dataclass(frozen=True, slots=True)
class Insertion(Generic[P]):
    """Whether a block was taken (its truth value), and which blocks left for it.

    `dropped` tails are known no longer: free their payloads, and forget those that are on disk.
    `replaced` is the payload that it is in the place of, to be freed too.
    """

    taken: bool
    dropped: tuple[Gone[P], ...] = ()
    replaced: P | None = None

    def __bool__(self) -> bool:
        return self.taken


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStats:
    """The counts of a tree now."""

    ram_blocks: int
    ram_bytes: int
    disk_blocks: int
    disk_bytes: int
    pinned_blocks: int
    tails: int


class Pin(Generic[P]):
    """Blocks that are no victims until `unpin`, or the end of `with`.

    A pinned block that is lost all the same is gone; the pin does not pass to a later block of its
    id.
    """

    __slots__ = ("_order", "nodes")

    def __init__(self, nodes: tuple[Node[P], ...], order: EvictionOrder[P]) -> None:
        self.nodes = nodes
        self._order = order
        for node in nodes:
            node.pins += 1
            order.file(node)

    def unpin(self) -> None:
        """Let them go; harmless twice."""
        nodes, self.nodes = self.nodes, ()
        for node in nodes:
            node.pins -= 1
            if not node.pins:
                self._order.file(node)

    def __enter__(self) -> Pin[P]:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpin()
