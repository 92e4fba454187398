"""One block in a tree of prefixes: its places, its uses, and the cost of having it again.

Only the tree and its order of eviction change a node; all other code reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kakeya.core.errors import InvalidArgument
from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.names.blocks import BlockId

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """The facts that come with a block. Raises InvalidArgument.

    `token_ids` are packed as uint32, little-endian (`core.units.pack_ids`); fewer than a block has
    make a tail. `nbytes` are its bytes in pages, `recompute_s` the seconds to compute it again.
    """

    token_ids: bytes
    nbytes: int
    recompute_s: float = 0.0
    has_state: bool = False
    block_class: BlockClass = BlockClass.USER
    retention: Retention = Retention.SHORT

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) % 4:
            raise InvalidArgument(
                f"the tokens of a block take {len(self.token_ids)} bytes; "
                "they must take 4 each, and there must be some"
            )
        if self.nbytes < 1:
            raise InvalidArgument(f"a block of {self.nbytes} bytes; it must have 1 or more")
        if not self.recompute_s >= 0.0:
            raise InvalidArgument(
                f"recompute_s of a block is {self.recompute_s}; it must be 0 or more"
            )

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.token_ids) // 4


class Node(Generic[P]):
    """A block that is known, in RAM (then it has a payload), on disk, or for its children's sake.

    The block in RAM may differ from the block on disk: one of them may lack the state. `facts` are
    of the one in RAM, else of the one on disk; `on_disk` are of the latter, None = there is none.
    `index` counts blocks from the beginning. `live_children` are those below which, or in which,
    something is in RAM. `children` are in the order of their packed tokens, so that those which
    begin alike are neighbours; `tails` are those of them with fewer tokens than a block. `entry` is
    its place in the order of eviction.
    """

    __slots__ = (
        "block_class",
        "children",
        "clock",
        "entry",
        "facts",
        "id",
        "index",
        "is_tail",
        "live_children",
        "on_disk",
        "parent",
        "payload",
        "pins",
        "retention",
        "tails",
        "used_s",
        "uses",
    )

    def __init__(
        self, block_id: BlockId, parent: Node[P] | None, facts: BlockFacts, *, is_tail: bool
    ) -> None:
        self.id = block_id
        self.parent = parent
        self.index: int = parent.index + 1 if parent is not None else -1
        self.facts = facts
        self.is_tail = is_tail
        self.payload: P | None = None
        self.on_disk: BlockFacts | None = None
        self.pins = 0
        self.uses = 1
        self.used_s = 0.0
        self.clock = 0.0
        self.block_class = facts.block_class
        self.retention = facts.retention
        self.children: list[Node[P]] = []
        self.tails: list[Node[P]] = []
        self.live_children = 0
        self.entry: object | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes in RAM, if it is or were there."""
        return self.facts.nbytes

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self.facts.tokens

    @property
    def has_state(self) -> bool:
        """Whether a recurrent model can go on from its end."""
        return self.facts.has_state

    @property
    def in_ram(self) -> bool:
        """Whether it has a payload."""
        return self.payload is not None

    def in_ram_serves(self, facts: BlockFacts) -> bool:
        """Whether the block in RAM has all that a block with these facts would bring."""
        return self.payload is not None and self.has_state >= facts.has_state

    @property
    def stored(self) -> bool:
        """Whether it is on disk, with or without state."""
        return self.on_disk is not None

    @property
    def is_written(self) -> bool:
        """Whether the disk has all of the block in RAM."""
        return self.on_disk is not None and self.on_disk.has_state >= self.has_state

    @property
    def is_here(self) -> bool:
        """Whether it can be had, from RAM or from disk."""
        return self.payload is not None or self.on_disk is not None

    @property
    def is_live(self) -> bool:
        """Whether it or something below it is in RAM."""
        return self.payload is not None or self.live_children > 0

    @property
    def may_go(self) -> bool:
        """Whether it can leave RAM: a leaf of what is there, and not pinned."""
        return self.payload is not None and not self.pins and not self.live_children

    def __repr__(self) -> str:
        where = "+".join(
            word for word, is_so in (("ram", self.in_ram), ("disk", self.stored)) if is_so
        )
        return f"<block {self.index} {self.id.hex()[:8]} {where or 'nowhere'} pins={self.pins}>"
