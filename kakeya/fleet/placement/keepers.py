"""The nodes that keep a prefix warm for the one that declares it.

Each declaring node chooses for itself, and all choose alike: by rendezvous hashing of the text and
the node (Thaler, Ravishankar 1998), those first that have it already. A node that leaves or cannot
is replaced by the next one, and no other choice changes for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from hashlib import sha256


class Keeping(IntEnum):
    """The care of a node for a prefix; the numbers go on the wire."""

    NOTHING = 0
    KEPT = 1
    """It keeps it warm for another node."""
    DECLARED = 2
    """It is declared there, and warm without a word."""


def keepers(
    digest: bytes, nodes: Mapping[str, Keeping], count: int, unable: Collection[str] = ()
) -> tuple[str, ...]:
    """Choose up to `count` of the nodes to keep the prefix with this digest, in their order."""

    def order(node_id: str) -> tuple[int, bytes]:
        return -nodes[node_id], sha256(digest + node_id.encode()).digest()

    return tuple(sorted(nodes.keys() - set(unable), key=order)[: max(0, count)])
